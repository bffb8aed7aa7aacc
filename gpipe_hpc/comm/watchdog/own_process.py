"""How a watcher looks at the process of its rank: by what the kernel says about it."""

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Final

_STOPPED: Final = "Tt"  # by a signal, by a debugger
_WRITING_S: Final = 0.3  # that a signal handler takes to write stacks
_EXIT_CODE_FIELD: Final = 49  # of those behind the name in /proc/PID/stat


class OwnProcess:
    """The rank's process, from outside. `pid` None: the watcher is a thread of it."""

    def __init__(self, pid: int | None) -> None:
        self._pid = pid
        self._handle: int | None = None
        if pid is not None and hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):
                self._handle = os.pidfd_open(pid)
        self._has_gone = pid is not None and not self._exists()

    @property
    def handle(self) -> int | None:
        """Return a descriptor that can be read once the process has ended, None if there is none.

        Unlike a connection it does not stay open while a process lives that the rank has forked.
        """
        return self._handle

    def has_ended(self) -> bool:
        """Say whether the process is gone, or a zombie."""
        if self._pid is not None and not self._has_gone:
            self._has_gone = not self._exists() or self._state()[:1] in ("Z", "X")
        return self._has_gone

    def is_stopped(self) -> bool:
        """Say whether a signal or a debugger keeps the process from running."""
        return self._pid is not None and is_stopped(self._pid)

    def has_ended_well(self) -> bool:
        """Say whether the process ended with code 0, if the kernel still knows."""
        return self._status() == 0

    def fate(self) -> str:
        """Return how the process ended, as far as the kernel still knows."""
        status = self._status()
        if status is None:
            return "ended without a report"
        code = os.waitstatus_to_exitcode(status)
        return how_ended(code) + ("" if code < 0 else " and without a report")

    def _status(self) -> int | None:
        """Return what a parent that waits for the process will get; None: it has got it."""
        fields = self._state().split()
        if len(fields) <= _EXIT_CODE_FIELD or fields[0] != "Z":
            return None
        return int(fields[_EXIT_CODE_FIELD])

    def send(self, number: int) -> None:
        """Send a signal to the process, and to no other that may have its number later."""
        if self._pid is None or self._has_gone:
            return
        with contextlib.suppress(OSError):
            if self._handle is not None:
                signal.pidfd_send_signal(self._handle, number)
            else:
                os.kill(self._pid, number)

    def stacks(self, number: int | None, file: str, max_bytes: int) -> str:
        """Return the stacks as the rank's signal handler writes them, without its interpreter.

        `number`: the signal, None where there is no handler; `file`: what the handler writes into.
        """
        if number is None:
            return "(its interpreter does not answer)"
        path = Path(file)
        try:
            before = path.stat().st_size
            self.send(number)
            time.sleep(_WRITING_S)
            with path.open("rb") as written:
                written.seek(before)
                text = written.read(max_bytes).decode(errors="replace")
        except OSError as error:
            return f"(no stack: {error})"
        return f"(holds the interpreter's lock)\n{text}"

    def _exists(self) -> bool:
        assert self._pid is not None, "a thread's own process is there"
        try:
            os.kill(self._pid, 0)
        except ProcessLookupError:
            return False
        except OSError:
            return True
        return True

    def _state(self) -> str:
        """Return the kernel's line about the process behind its name, empty where there is none."""
        return "" if self._pid is None else _state_of(self._pid)


def is_stopped(pid: int) -> bool:
    """Return whether a signal or a debugger keeps a process from running."""
    return _state_of(pid)[:1] in set(_STOPPED)


def how_ended(code: int) -> str:
    """Return how a process ended, by its exit code as subprocess gives it."""
    if code >= 0:
        return f"ended with code {code}"
    number = -code
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    return f"was killed by {name}"


def _state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(") ")[2]
    except OSError:
        return ""
