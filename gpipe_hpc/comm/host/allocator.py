"""Let the C library keep the memory that tensors leave behind, where they live on the host."""

import ctypes
import sys
from typing import Final

# Of glibc's malloc.h, which has no other names for them.
_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
_LARGEST_INT: Final = 2**31 - 1
_LARGEST_KEPT: Final = (2**30, 2**25)


def keep_freed_memory() -> bool:
    """Keep freed blocks of up to 1 GiB in the process; return whether the C library does so.

    By default glibc gives every block above 32 MiB back to the system at once, and the next step
    pays a page fault for each 4 KiB of it: up to a third of a step that works on such blocks. The
    process then holds on to its peak until it ends. For the whole process, once; no effect on
    memory of GPUs, and none with another C library.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    # Older versions refuse what is above the default.
    keeps = any(mallopt(_MMAP_THRESHOLD, size) == 1 for size in _LARGEST_KEPT)
    return mallopt(_TRIM_THRESHOLD, _LARGEST_INT) == 1 and keeps
