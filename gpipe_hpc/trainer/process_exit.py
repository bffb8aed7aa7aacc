"""Quick exit of a process that failed or was asked to stop."""

import atexit
import contextlib
import logging
import os
import sys
from typing import NoReturn


def end_soon(code: int) -> NoReturn:
    """Run exit handlers and exit with `code`, without tearing down the interpreter.

    Python would otherwise destroy every object of torch, which took more than ten seconds on a busy
    machine while the other ranks and the launcher waited.
    """
    atexit._run_exitfuncs()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)
