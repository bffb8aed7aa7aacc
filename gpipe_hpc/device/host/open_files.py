"""How many files and connections this process may have open."""

import os
import resource
from pathlib import Path
from typing import Final

_OPEN: Final = Path("/proc/self/fd")


def num_open() -> int:
    """Return how many files and connections are open; 0 where the system does not tell."""
    try:
        return len(os.listdir(_OPEN))
    except OSError:
        return 0


def allow_files(num_files: int) -> int:
    """Let this process open so many, as far as it may; return how many it may open then."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if limit == unlimited or limit >= num_files:
        return num_files if limit == unlimited else limit
    allowed = num_files if most == unlimited else min(num_files, most)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, most))
    return allowed
