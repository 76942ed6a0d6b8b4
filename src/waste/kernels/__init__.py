"""Native code: `_cpu`, the stages of the CPU backend, built from `csrc/` when the package is installed."""

from waste.errors import ResourceError


class NativeCodeError(ResourceError, ImportError):
    """The compiled extension is missing or does not load on this machine."""


try:
    from waste.kernels import _cpu as _cpu
except ImportError as error:
    # Ctrl-C or SIGTERM, whose handlers run in the middle of the module's initialisation: nanobind makes an ImportError
    # of whatever is raised there.
    if error.__cause__ is not None and not isinstance(error.__cause__, Exception):
        raise error.__cause__ from None
    raise NativeCodeError(
        f"waste's native code cannot be loaded: {str(error)!r}",
        hint="build it: pip install --force-reinstall waste (in a source tree: pip install -e .)",
    ) from error
