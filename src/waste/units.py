"""The only parser and printer of quantities: capacities in GiB, rates in GB/s, times, counts."""

from __future__ import annotations

import re
from fractions import Fraction

from waste.errors import UsageError

_BINARY = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
# Twenty digits are more bytes than there are.
_SIZE = re.compile(r"\s*(\d{1,20}(?:\.\d{0,20})?|\.\d{1,20})\s*(?:([kmgt])(i?)(b?)|b)?\s*", re.IGNORECASE | re.ASCII)


def parse_bytes(text: str, *, name: str = "size") -> int:
    """Bytes in `text`: "4GiB" and "4g" are 4 * 2**30, "4GB" is 4 * 10**9, "4096" is bytes.

    Exact to the byte. Raises UsageError, naming `name`, for words, signs, zero and anything below one byte, and for
    more than twenty digits.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise UsageError(f"{name} {text!r} is not a size", hint="write it as 8GiB (2^30), 8GB (10^9) or plain bytes")
    number, prefix, binary, byte = match.groups()
    scale = 1
    if prefix:
        decimal = bool(byte) and not binary
        scale = (_DECIMAL if decimal else _BINARY)[prefix.lower()]
    value = int(Fraction(number) * scale)
    if value <= 0:
        raise UsageError(f"{name} {text!r} must be more than zero", hint="write it as 8GiB (2^30), 8GB (10^9)")
    return value


def parse_rate(text: str, *, name: str = "rate") -> int:
    """Bytes per second in `text`: "2GB/s", "500MB" or plain bytes; as `parse_bytes`, with or without "/s"."""
    amount = text.strip().removesuffix("/s")
    try:
        return parse_bytes(amount, name=name)
    except UsageError:
        raise UsageError(f"{name} {text!r} is not a rate", hint="write it as 2GB/s (10^9 bytes per second)") from None


def format_bytes(nbytes: float) -> str:
    """A capacity in binary units, three significant digits: "1.50 GiB", "640 B"."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1000 or unit == "TiB":
            break
        value /= 1024
    if unit == "B":
        return f"{int(value)} B"
    digits = max(0, 3 - len(str(int(abs(value)))))
    return f"{value:.{digits}f} {unit}"


def format_rate(bytes_per_s: float) -> str:
    """A rate in decimal units, as drives and memory are sold: "1.20 GB/s"."""
    value = float(bytes_per_s)
    for unit in ("B/s", "kB/s", "MB/s", "GB/s"):
        if abs(value) < 1000 or unit == "GB/s":
            break
        value /= 1000
    digits = max(0, 3 - len(str(int(abs(value)))))
    return f"{value:.{digits}f} {unit}"


def format_seconds(seconds: float) -> str:
    """A duration a person can read at a glance: "0.42 s", "3 min 20 s", "2 h 05 min"."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def format_count(count: float) -> str:
    """A number of parameters: "321 B", "25.4 M", "960"."""
    value = float(count)
    for unit in ("", " K", " M", " B", " T"):
        if abs(value) < 1000 or unit == " T":
            break
        value /= 1000
    if not unit:
        return f"{int(value)}"
    digits = max(0, 3 - len(str(int(abs(value)))))
    return f"{value:.{digits}f}{unit}"
