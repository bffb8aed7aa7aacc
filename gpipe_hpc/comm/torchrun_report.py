"""The file that torchrun reads a failed worker's cause from, to print it last.

Without one it says no more than an exit code and where to read about "error files". The form is
that of torch.distributed.elastic.multiprocessing.errors.
"""

import contextlib
import json
import math
import os
import time
from pathlib import Path
from typing import Final

FILE_VARIABLE: Final = "TORCHELASTIC_ERROR_FILE"


def tell_torchrun(text: str, *, is_cause: bool) -> None:
    """Leave `text` as what ended this process; no effect where no torchrun has started it.

    torchrun counts whole seconds and calls the earliest file the root cause, and in one second
    that of the lowest rank. So the time of the rank that failed is rounded down, and that of those
    which stop because of it (`is_cause` is False) up.
    """
    path = os.environ.get(FILE_VARIABLE)
    if not path:
        return
    moment = math.floor(time.time()) if is_cause else math.ceil(time.time())
    lines = text.strip().splitlines() or [""]
    told = {"message": lines[-1], "extraInfo": {"py_callstack": text, "timestamp": str(moment)}}
    with contextlib.suppress(OSError):
        Path(path).write_text(json.dumps({"message": told}), "utf-8")
