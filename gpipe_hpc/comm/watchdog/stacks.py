"""Stack traces of the threads of this process."""

import faulthandler
import io
import os
import signal
import sys
import tempfile
import threading
import traceback
from typing import Final

_MAX_FRAMES: Final = 40
_NUM_TRIED: Final = 8


def all_stacks(first: int) -> str:
    """Return the stacks of all threads except the calling one; thread `first` comes first."""
    own = threading.get_ident()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sorted(sys._current_frames().items(), key=lambda entry: entry[0] != first)
    parts = []
    for number, frame in frames:
        if number != own:
            lines = traceback.format_stack(frame)[-_MAX_FRAMES:]
            parts.append(f"thread {names.get(number, number)}:\n{''.join(lines)}")
    return "".join(parts)


class StackSignal:
    """A signal at which this process writes its stacks, even if a call never releases the GIL.

    `number` is None if no signal is free. The handler stays installed when the object is deleted,
    because a later signal would otherwise end the process.
    """

    def __init__(self) -> None:
        self.number = _free_signal()
        self._file: io.FileIO | None = None
        if self.number is not None:
            descriptor, path = tempfile.mkstemp(prefix="gpipe_hpc_")
            os.unlink(path)
            self._file = io.FileIO(descriptor, "w")
            faulthandler.register(self.number, file=self._file, all_threads=True)

    @property
    def descriptor(self) -> int:
        """Return the descriptor of the file to which stacks are written; -1 if there is none."""
        return -1 if self._file is None else self._file.fileno()


def _free_signal() -> int | None:
    """Return a real-time signal without a handler; None if there is none."""
    if not hasattr(signal, "SIGRTMAX") or not hasattr(faulthandler, "register"):
        return None
    for number in range(signal.SIGRTMAX - 1, signal.SIGRTMAX - 1 - _NUM_TRIED, -1):
        if signal.getsignal(number) == signal.SIG_DFL:
            return int(number)
    return None
