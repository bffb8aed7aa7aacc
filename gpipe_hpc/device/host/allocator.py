"""What the C library does with memory that tensors of the host leave behind."""

import ctypes
import sys
from collections.abc import Callable
from typing import Final, cast

# Of glibc's malloc.h, which has no other names for them.
_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
_LARGEST_INT: Final = 2**31 - 1
_LARGEST_KEPT: Final = (2**30, 2**25)
_LARGE: Final = 2**20


def keep_freed_memory() -> bool:
    """Keep freed blocks of up to 1 GiB in the process; return whether the C library does so.

    By default glibc gives every block above 32 MiB back to the system at once, and the next step
    pays a page fault for each 4 KiB of it: up to a third of a step that works on such blocks. The
    process then holds on to its peak until it ends. For the whole process, once; no effect on
    memory of GPUs, and none with another C library.
    """
    mallopt = _of_glibc("mallopt")
    if mallopt is None:
        return False
    # Older versions refuse what is above the default.
    keeps = any(mallopt(_MMAP_THRESHOLD, size) == 1 for size in _LARGEST_KEPT)
    return mallopt(_TRIM_THRESHOLD, _LARGEST_INT) == 1 and keeps


def give_back_freed_memory() -> bool:
    """Give each block of 1 MiB and more back to the system when it is freed; return whether so.

    By default glibc raises that bound, up to 32 MiB, as blocks are freed. Blocks below it lie in
    one heap, and those that stay cut the room that others leave into pieces too small for the next.
    With a bound that stays low the process holds what its tensors need, and pays a page fault for
    each 4 KiB of a new block. For the whole process, once.
    """
    mallopt = _of_glibc("mallopt")
    return mallopt is not None and mallopt(_MMAP_THRESHOLD, _LARGE) == 1


def trim_freed_memory() -> None:
    """Give what is free now back to the system, once; nothing with another C library than glibc."""
    malloc_trim = _of_glibc("malloc_trim")
    if malloc_trim is not None:
        malloc_trim(0)


def _of_glibc(name: str) -> Callable[..., int] | None:
    """Return a function of the C library; None where it is not glibc's."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        return cast(Callable[..., int], getattr(ctypes.CDLL(None), name))
    except (AttributeError, OSError):
        return None
