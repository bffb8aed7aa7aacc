"""The file that torchrun reads a failed worker's cause from, to print it last.

Without one it says no more than an exit code and where to read about "error files". The form is
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


def tell_torchrun(message: str, *, is_cause: bool, whole: str = "") -> None:
    """Leave `message` as what ended this process; no effect where no torchrun has started it.

    `whole`: the message below its traceback, which is left instead where torchrun prints elsewhere
    than this process does: its report is then all that is seen.

    torchrun counts whole seconds and calls the earliest file the root cause, and in one second
    that of the lowest rank. So the time of the rank that failed is rounded down, and that of those
    which stop because of it (`is_cause` is False) up. A rank that failed leaves its first words
    before the others can hear of it, and what it says later keeps that time.
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
    """Return the second in which this process failed: of what it has left already, or now."""
    now = math.floor(time.time())
    try:
        return min(
            now, int(json.loads(left.read_text("utf-8"))["message"]["extraInfo"]["timestamp"])
        )
    except (OSError, ValueError, KeyError, TypeError):
        return now


def _is_seen() -> bool:
    """Say whether what this process prints comes out where its launcher's own words do."""
    try:
        own, launchers = os.fstat(_STDERR), os.stat(f"/proc/{os.getppid()}/fd/{_STDERR}")
    except OSError:
        return False
    return sys.platform == "linux" and os.path.samestat(own, launchers)
