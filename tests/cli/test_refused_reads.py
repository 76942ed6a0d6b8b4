"""`waste run` on file systems that refuse direct reads, or read less than they are asked for: the same text.

A library in front of the C library plays those file systems for a whole process, native code included.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# SHIM says which file system; every call that it bends adds a byte to the file SHIM_MARK.
SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

static int playing(const char* mode) {
    const char* wanted = getenv("SHIM");
    return wanted && !strcmp(wanted, mode);
}

static void mark(void) {
    const char* path = getenv("SHIM_MARK");
    int (*real)(const char*, int, ...) = dlsym(RTLD_NEXT, "open");
    int fd = path ? real(path, O_WRONLY | O_CREAT | O_APPEND, 0600) : -1;
    if (fd >= 0) {
        if (write(fd, "x", 1) != 1) abort();
        close(fd);
    }
}

static int refused_open(int flags) {
    if (!(flags & O_DIRECT) || !playing("refused at open")) return 0;
    mark();
    errno = EINVAL;
    return 1;
}

static int mode_of(int flags, va_list rest) { return flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, int) : 0; }

#define OPEN(name)                                                  \
    int name(const char* path, int flags, ...) {                    \
        va_list rest;                                               \
        va_start(rest, flags);                                      \
        int mode = mode_of(flags, rest);                            \
        va_end(rest);                                               \
        int (*real)(const char*, int, ...) = dlsym(RTLD_NEXT, #name); \
        return refused_open(flags) ? -1 : real(path, flags, mode);  \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                        \
    int name(int at, const char* path, int flags, ...) {                    \
        va_list rest;                                                       \
        va_start(rest, flags);                                              \
        int mode = mode_of(flags, rest);                                    \
        va_end(rest);                                                       \
        int (*real)(int, const char*, int, ...) = dlsym(RTLD_NEXT, #name);  \
        return refused_open(flags) ? -1 : real(at, path, flags, mode);      \
    }
OPENAT(openat)
OPENAT(openat64)

/* How many of n bytes this file system reads; -1: none, it refuses. Short counts lie in the middle of a page. */
static ssize_t granted(int fd, size_t n) {
    int direct = fcntl(fd, F_GETFL) & O_DIRECT;
    if (direct && playing("refused at read")) {
        mark();
        errno = EINVAL;
        return -1;
    }
    if (n > 4096 && playing("short")) {
        mark();
        return 4096 + (n - 4096) / 2;
    }
    return n;
}

#define PREAD(name)                                                                  \
    ssize_t name(int fd, void* to, size_t n, off64_t at) {                           \
        ssize_t (*real)(int, void*, size_t, off64_t) = dlsym(RTLD_NEXT, #name);      \
        ssize_t most = granted(fd, n);                                               \
        if (most < 0) return -1;                                                     \
        ssize_t got = real(fd, to, n, at);                                           \
        if (got > most) memset((char*)to + most, 0xee, got - most), got = most;      \
        return got;                                                                  \
    }
PREAD(pread)
PREAD(pread64)

static ssize_t vector(ssize_t got, ssize_t most, const struct iovec* to, int count) {
    if (got <= most || count != 1) return got;
    memset((char*)to[0].iov_base + most, 0xee, got - most);
    return most;
}

#define PREADV(name)                                                                          \
    ssize_t name(int fd, const struct iovec* to, int count, off64_t at) {                     \
        ssize_t (*real)(int, const struct iovec*, int, off64_t) = dlsym(RTLD_NEXT, #name);    \
        ssize_t most = granted(fd, to[0].iov_len);                                            \
        return most < 0 ? -1 : vector(real(fd, to, count, at), most, to, count);              \
    }
PREADV(preadv)
PREADV(preadv64)

#define PREADV2(name)                                                                              \
    ssize_t name(int fd, const struct iovec* to, int count, off64_t at, int flags) {               \
        ssize_t (*real)(int, const struct iovec*, int, off64_t, int) = dlsym(RTLD_NEXT, #name);    \
        ssize_t most = granted(fd, to[0].iov_len);                                                 \
        return most < 0 ? -1 : vector(real(fd, to, count, at, flags), most, to, count);            \
    }
PREADV2(preadv2)
PREADV2(preadv64v2)
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("a C compiler on Linux is needed")
    folder = tmp_path_factory.mktemp("shim")
    source, library = folder / "shim.c", folder / "shim.so"
    source.write_text(SHIM)
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", str(source), "-o", str(library), "-ldl"], check=True)
    return library


def run(model: Path, extra: dict[str, str]) -> tuple[str, str]:
    """(stdout, stderr) of an answer by a process with little room, so that most experts are read."""
    command = [sys.executable, "-m", "waste", "run", str(model), "Hello", "--raw", "-n", "6", "--temp", "0"]
    environment = {**{name: value for name, value in os.environ.items() if not name.startswith("WASTE_")}, **extra}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=True)
    return done.stdout, done.stderr


@pytest.fixture(scope="module")
def plain(default_nano: Path) -> tuple[str, str]:
    return run(default_nano, {})


@pytest.mark.parametrize("system", ["refused at open", "refused at read", "short"])
def test_the_same_text_whatever_the_file_system_does(
    system: str, shim: Path, default_nano: Path, plain: tuple[str, str], tmp_path: Path
) -> None:
    marks = tmp_path / "marks"
    direct = "no direct reads" not in plain[1]
    out, err = run(default_nano, {"LD_PRELOAD": str(shim), "SHIM": system, "SHIM_MARK": str(marks)})
    assert out == plain[0]
    assert out.strip()
    if system == "short" or direct:
        assert marks.exists()  # or this test has tried nothing
    told = [line for line in err.splitlines() if "no direct reads" in line]
    if direct:
        assert len(told) == (0 if system == "short" else 1)
