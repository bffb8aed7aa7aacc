"""Settings of glibc's malloc for memory freed by host tensors."""

import ctypes
import sys
from collections.abc import Callable
from typing import Final, cast

# M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of glibc's malloc.h.
_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
_LARGEST_INT: Final = 2**31 - 1
_LARGEST_KEPT: Final = (2**30, 2**25)
_LARGE: Final = 2**20


def keep_freed_memory() -> bool:
    """Keep freed blocks of up to 1 GiB in the process; return whether the C library supports it.

    By default glibc returns every freed block above 32 MiB to the system, and the next step pays a
    page fault for each 4 KiB of a new block: up to a third of the time of a step that uses such
    blocks. With this setting the process keeps its peak memory until it ends. Call once; it applies
    to the whole process, not to GPU memory, and does nothing without glibc.
    """
    mallopt = _glibc_function("mallopt")
    if mallopt is None:
        return False
    # Older versions reject values above the default.
    keeps = any(mallopt(_MMAP_THRESHOLD, size) == 1 for size in _LARGEST_KEPT)
    return mallopt(_TRIM_THRESHOLD, _LARGEST_INT) == 1 and keeps


def return_freed_memory() -> bool:
    """Return each freed block of 1 MiB or more to the system; return whether this is supported.

    By default glibc raises this threshold up to 32 MiB as blocks are freed. Smaller blocks share
    one heap, which fragments. With a fixed low threshold the process uses only what its tensors
    need, but pays a page fault for each 4 KiB of a new block. Call once; it applies to the whole
    process.
    """
    mallopt = _glibc_function("mallopt")
    return mallopt is not None and mallopt(_MMAP_THRESHOLD, _LARGE) == 1


def trim_freed_memory() -> None:
    """Return all memory that is now free to the system; does nothing without glibc."""
    malloc_trim = _glibc_function("malloc_trim")
    if malloc_trim is not None:
        malloc_trim(0)


def _glibc_function(name: str) -> Callable[..., int] | None:
    """Return a function of the C library by name; None if it is not glibc."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        return cast(Callable[..., int], getattr(ctypes.CDLL(None), name))
    except (AttributeError, OSError):
        return None
