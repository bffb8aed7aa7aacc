"""Mounts for this process and its children only: a small disk to fill, and a private /dev/shm."""

import ctypes
import os
from pathlib import Path
from typing import Final

_NEW_MOUNTS: Final = 0x00020000
_MS_REC, _MS_PRIVATE = 16384, 1 << 18


def make_own_disks(disk: Path, size: str) -> str | None:
    """Mount a small disk at `disk` and a private /dev/shm, which end with this process.

    Returns None, or the reason why this is not permitted; then nothing visible to others has
    changed.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> bool:
        words = (each.encode() or None for each in (source, target, kind))
        return bool(libc.mount(*words, ctypes.c_ulong(flags), options.encode() or None) == 0)

    done = (
        libc.unshare(_NEW_MOUNTS) == 0
        and mount("", "/", "", _MS_REC | _MS_PRIVATE)
        and mount("tmpfs", str(disk), "tmpfs", 0, f"size={size}")
        and mount("tmpfs", "/dev/shm", "tmpfs", 0, "mode=1777")
    )
    return None if done else os.strerror(ctypes.get_errno())
