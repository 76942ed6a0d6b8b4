"""Native code: `_cpu`, the stages of the CPU backend, built from `csrc/` when the package is installed."""

from waste.errors import ResourceError


class NativeCodeError(ResourceError, ImportError):
    """The compiled extension is missing or does not load on this machine."""


try:
    from waste.kernels import _cpu as _cpu
except ImportError as error:
    raise NativeCodeError(
        f"waste's native code cannot be loaded: {str(error)!r}",
        hint="build it: pip install --force-reinstall waste (in a source tree: pip install -e .)",
    ) from error
