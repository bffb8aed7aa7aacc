"""Number and limit of open file descriptors of this process."""

import os
import resource
from pathlib import Path
from typing import Final

_OPEN: Final = Path("/proc/self/fd")


def num_open() -> int:
    """Return the number of open file descriptors; 0 if the system does not report it."""
    try:
        return len(os.listdir(_OPEN))
    except OSError:
        return 0


def allow_files(num_files: int) -> int:
    """Raise the limit of open files to `num_files` if permitted; return the resulting limit."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if limit == unlimited or limit >= num_files:
        return num_files if limit == unlimited else limit
    allowed = num_files if most == unlimited else min(num_files, most)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, most))
    return allowed
