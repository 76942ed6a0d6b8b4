"""Products with ggml's CPU backend through ctypes, in one thread: what llama.cpp runs for a matrix times a batch.

A type may have several kernels, chosen by the kind of memory its matrix lies in: "CPU" (rows as in the file; one dot
product after another for one token, products of tiles for several), "CPU_REPACK" (rows interleaved on loading) and
"AMX". llama.cpp takes the first that supports the operation: AMX, CPU_REPACK, CPU; for routed experts CPU_REPACK or
CPU, as AMX does not support their operation.
"""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path

import numpy as np
import numpy.typing as npt
from ggml_library import Bytes, F32Array
from gguf import GGMLQuantizationType

_MADV_HUGEPAGE = 14
_PAGE = 4096


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", ctypes.c_bool))


_LOG = ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)
_SILENT = _LOG(lambda level, text, user: None)  # every matrix that is interleaved would be a line
# name -> (result, arguments), as ggml.h and ggml-backend.h declare them
_BASE = {
    "ggml_init": (c_void_p, [_InitParams]),
    "ggml_new_tensor_2d": (c_void_p, [c_void_p, c_int, c_int64, c_int64]),
    "ggml_mul_mat": (c_void_p, [c_void_p, c_void_p, c_void_p]),
    "ggml_new_graph_custom": (c_void_p, [c_void_p, c_size_t, ctypes.c_bool]),
    "ggml_graph_overhead_custom": (c_size_t, [c_size_t, ctypes.c_bool]),
    "ggml_tensor_overhead": (c_size_t, []),
    "ggml_build_forward_expand": (None, [c_void_p, c_void_p]),
    "ggml_backend_alloc_ctx_tensors_from_buft": (c_void_p, [c_void_p, c_void_p]),
    "ggml_backend_buffer_get_base": (c_void_p, [c_void_p]),
    "ggml_backend_buffer_get_size": (c_size_t, [c_void_p]),
    "ggml_backend_buffer_free": (None, [c_void_p]),
    "ggml_backend_buft_name": (c_char_p, [c_void_p]),
    "ggml_backend_dev_buffer_type": (c_void_p, [c_void_p]),
    "ggml_backend_dev_supports_op": (ctypes.c_bool, [c_void_p, c_void_p]),
    "ggml_backend_reg_dev_get": (c_void_p, [c_void_p, c_size_t]),
    "ggml_backend_reg_get_proc_address": (c_void_p, [c_void_p, c_char_p]),
    "ggml_backend_tensor_set": (None, [c_void_p, c_void_p, c_size_t, c_size_t]),
    "ggml_backend_tensor_get": (None, [c_void_p, c_void_p, c_size_t, c_size_t]),
    "ggml_backend_graph_compute": (c_int, [c_void_p, c_void_p]),
    "ggml_version": (c_char_p, []),
    "ggml_log_set": (None, [_LOG, c_void_p]),
}
_CPU = {
    "ggml_backend_cpu_init": (c_void_p, []),
    "ggml_backend_cpu_set_n_threads": (None, [c_void_p, c_int]),
    "ggml_backend_cpu_reg": (c_void_p, []),
}
_NODES = 8  # room in a graph of one product


class Backend:
    """ggml's CPU backend with one thread, which is the calling one."""

    def __init__(self, directory: Path) -> None:
        """directory: where libggml-base.so and libggml-cpu.so lie. OSError when they cannot be loaded."""
        # Global, so that the second finds the first whatever its run path says.
        base = ctypes.CDLL(str(directory / "libggml-base.so"), mode=ctypes.RTLD_GLOBAL)
        cpu = ctypes.CDLL(str(directory / "libggml-cpu.so"))
        for library, functions in ((base, _BASE), (cpu, _CPU)):
            for name, (result, arguments) in functions.items():
                function = getattr(library, name)
                function.restype, function.argtypes = result, arguments
        base.ggml_log_set(_SILENT, None)
        self.lib = base
        self._madvise = ctypes.CDLL(None).madvise
        self._madvise.argtypes = [c_void_p, c_size_t, c_int]
        self.handle = cpu.ggml_backend_cpu_init()
        cpu.ggml_backend_cpu_set_n_threads(self.handle, 1)
        registry = cpu.ggml_backend_cpu_reg()
        self.device = base.ggml_backend_reg_dev_get(registry, 0)
        self.host = base.ggml_backend_dev_buffer_type(self.device)
        extra = base.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
        found = [self.host]
        if extra:
            listed = ctypes.CFUNCTYPE(ctypes.POINTER(c_void_p), c_void_p)(extra)(self.device)
            while listed[len(found) - 1]:
                found.append(listed[len(found) - 1])
        # Kinds of memory by name: "CPU" first, then those with kernels of their own, in ggml's order of preference.
        self.kinds = {base.ggml_backend_buft_name(kind).decode(): kind for kind in found}

    @property
    def version(self) -> str:
        return str(self.lib.ggml_version().decode())

    def context(self, tensors: int, graphs: int = 0) -> int:
        """A context for so many tensors and graphs without their data."""
        size = tensors * self.lib.ggml_tensor_overhead()
        size += graphs * self.lib.ggml_graph_overhead_custom(_NODES, False)
        return int(self.lib.ggml_init(_InitParams(size + 4096, None, True)))

    def allocate(self, context: int, kind: int) -> int:
        """Memory for all tensors of a context, in huge pages where the system has some, as our weights lie."""
        buffer = int(self.lib.ggml_backend_alloc_ctx_tensors_from_buft(context, kind))
        begin = -(-self.lib.ggml_backend_buffer_get_base(buffer) // _PAGE) * _PAGE
        self._madvise(begin, self.lib.ggml_backend_buffer_get_size(buffer) // _PAGE * _PAGE - _PAGE, _MADV_HUGEPAGE)
        return buffer


class Matrices:
    """Copies of one matrix (N, K) in a kind of memory, each with a product by (T, K) inputs for every T wanted."""

    def __init__(
        self, backend: Backend, kind: str, name: str, blocks: Bytes, cols: int, copies: int, batches: tuple[int, ...]
    ) -> None:
        """blocks: (N, row bytes) as ggml writes them. NotImplementedError when `kind` has no kernel for the type."""
        lib = backend.lib
        self._backend, self._rows = backend, len(blocks)
        weights = backend.context(copies)
        matrices = [
            lib.ggml_new_tensor_2d(weights, GGMLQuantizationType[name], cols, self._rows) for _ in range(copies)
        ]
        buffer = backend.allocate(weights, backend.kinds[kind])
        inputs = backend.context(len(batches))
        f32 = GGMLQuantizationType.F32
        self._inputs = {tokens: lib.ggml_new_tensor_2d(inputs, f32, cols, tokens) for tokens in batches}
        backend.allocate(inputs, backend.host)
        work = backend.context(copies * len(batches), copies * len(batches))
        self._products: dict[int, list[tuple[int, int]]] = {}
        for tokens, given in self._inputs.items():
            self._products[tokens] = []
            for matrix in matrices:
                graph, product = lib.ggml_new_graph_custom(work, _NODES, False), lib.ggml_mul_mat(work, matrix, given)
                lib.ggml_build_forward_expand(graph, product)
                self._products[tokens].append((graph, product))
                if not lib.ggml_backend_dev_supports_op(backend.device, product):
                    lib.ggml_backend_buffer_free(buffer)
                    raise NotImplementedError(f"{kind} has no kernel for {name}")
        backend.allocate(work, backend.host)
        for matrix in matrices:
            lib.ggml_backend_tensor_set(matrix, blocks.ctypes.data, 0, blocks.nbytes)

    def give(self, x: F32Array) -> None:
        """Set the input of the products for len(x) tokens. x: (T, K) float32."""
        self._backend.lib.ggml_backend_tensor_set(self._inputs[len(x)], x.ctypes.data, 0, x.nbytes)

    def multiply(self, copy: int, tokens: int) -> None:
        """The product of one copy, in the calling thread."""
        self._backend.lib.ggml_backend_graph_compute(self._backend.handle, self._products[tokens][copy][0])

    def result(self, copy: int, tokens: int) -> npt.NDArray[np.float32]:
        """(T, N) of the product computed last."""
        y = np.empty((tokens, self._rows), np.float32)
        self._backend.lib.ggml_backend_tensor_get(self._products[tokens][copy][1], y.ctypes.data, 0, y.nbytes)
        return y
