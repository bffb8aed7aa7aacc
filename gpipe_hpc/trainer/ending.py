"""How the process of a run ends that failed or was asked to stop: soon."""

import atexit
import contextlib
import logging
import os
import sys
from typing import NoReturn


def end_soon(code: int) -> NoReturn:
    """End the process with `code`, once what is registered for the exit has run.

    Python would go on to take every object of torch apart. On a busy machine that took more than
    ten seconds, in which the others, and the launcher, waited.
    """
    atexit._run_exitfuncs()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)
