"""Which machine this process is on, as far as one of its namespaces goes."""

import os
import socket
from pathlib import Path
from typing import Final

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


def shared_identity(namespace: str) -> str:
    """Return a text that two processes share if both are in one namespace of one running kernel.

    `namespace`, a name in /proc/self/ns, is what is to be shared: `net` (127.0.0.1 is the same
    interface), `mnt` (a path leads to the same file), `pid` (a number means the same process),
    `time` (the monotonic clock is one). Two containers of a host have the kernel in common, but
    namespaces of their own. Empty where the system does not tell: with nobody for sure.
    """
    try:
        return f"{_BOOT.read_text().strip()} {os.readlink(f'/proc/self/ns/{namespace}')}"
    except OSError:
        return ""


def kernel_identity() -> str:
    """Return a text that all processes of one running kernel share, those of containers too."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return socket.gethostname()
