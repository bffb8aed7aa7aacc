"""The error file in which torchrun expects the cause of a worker's failure.

Without the file, torchrun prints only an exit code and a link about "error files". The format is
that of torch.distributed.elastic.multiprocessing.errors.
"""

import contextlib
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Final

FILE_VARIABLE: Final = "TORCHELASTIC_ERROR_FILE"
_STDERR: Final = 2


def write_torchrun_error(message: str, *, is_cause: bool, whole: str = "") -> None:
    """Write `message` as the reason why this process ends; does nothing without torchrun.

    `whole` is the message with its traceback. It is written instead if torchrun's output and this
    process's go to different places, so that torchrun's report is all that a user sees.

    torchrun compares times in whole seconds and calls the earliest file the root cause, or that of
    the lowest rank if several have the same second. So the time of the rank that failed is rounded
    down, and that of ranks that stop because of it (`is_cause` is False) is rounded up. A failed
    rank writes its file before it informs the others, and its later messages keep the time of the
    first.
    """
    path = os.environ.get(FILE_VARIABLE)
    if not path:
        return
    moment = _moment(Path(path)) if is_cause else math.ceil(time.time())
    shown = (message if not whole or _is_seen() else whole).strip()
    lines = shown.splitlines() or [""]
    told = {"message": lines[-1], "extraInfo": {"py_callstack": shown, "timestamp": str(moment)}}
    with contextlib.suppress(OSError):
        Path(path).write_text(json.dumps({"message": told}), "utf-8")


def _moment(left: Path) -> int:
    """Return the time of this process's failure in seconds: from an existing file, else now."""
    now = math.floor(time.time())
    try:
        return min(
            now, int(json.loads(left.read_text("utf-8"))["message"]["extraInfo"]["timestamp"])
        )
    except (OSError, ValueError, KeyError, TypeError):
        return now


def _is_seen() -> bool:
    """Return whether stderr of this process and of its launcher are the same file."""
    try:
        own, launchers = os.fstat(_STDERR), os.stat(f"/proc/{os.getppid()}/fd/{_STDERR}")
    except OSError:
        return False
    return sys.platform == "linux" and os.path.samestat(own, launchers)
