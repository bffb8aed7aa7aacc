"""State of the rank's process as seen by its watcher, from /proc and process descriptors."""

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Final

_STOPPED: Final = "Tt"  # by a signal, by a debugger
_WRITING_S: Final = 0.3  # time for a signal handler to write stacks
_EXIT_CODE_FIELD: Final = 49  # index among the fields after the name in /proc/PID/stat


class OwnProcess:
    """The process of the watcher's own rank; `pid` is None if the watcher is a thread of it."""

    def __init__(self, pid: int | None) -> None:
        self._pid = pid
        self._handle: int | None = None
        if pid is not None and hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):
                self._handle = os.pidfd_open(pid)
        self._has_gone = pid is not None and not self._exists()

    @property
    def handle(self) -> int | None:
        """Return a descriptor that becomes readable when the process ends; None if unavailable.

        Processes that the rank has forked do not keep it open, unlike a connection.
        """
        return self._handle

    def has_ended(self) -> bool:
        """Return whether the process has ended or is a zombie."""
        if self._pid is not None and not self._has_gone:
            self._has_gone = not self._exists() or self._state()[:1] in ("Z", "X")
        return self._has_gone

    def is_stopped(self) -> bool:
        """Return whether a signal or a debugger has stopped the process."""
        return self._pid is not None and is_stopped(self._pid)

    def has_ended_well(self) -> bool:
        """Return whether the process ended with exit code 0; False if the code is unknown."""
        return self._status() == 0

    def fate(self) -> str:
        """Return a text about how the process ended, with the exit code if it is known."""
        status = self._status()
        if status is None:
            return "ended without a report"
        code = os.waitstatus_to_exitcode(status)
        return how_ended(code) + ("" if code < 0 else " and without a report")

    def _status(self) -> int | None:
        """Return the wait status of a zombie; None if its parent has already collected it."""
        fields = self._state().split()
        if len(fields) <= _EXIT_CODE_FIELD or fields[0] != "Z":
            return None
        return int(fields[_EXIT_CODE_FIELD])

    def send(self, number: int) -> None:
        """Send a signal to the process, but never to a later one with the same process id."""
        if self._pid is None or self._has_gone:
            return
        with contextlib.suppress(OSError):
            if self._handle is not None:
                signal.pidfd_send_signal(self._handle, number)
            else:
                os.kill(self._pid, number)

    def stacks(self, number: int | None, file: str, max_bytes: int) -> str:
        """Return the stack traces written by the rank's signal handler, which needs no GIL.

        Args:
            number: the signal; None if the rank has no handler.
            file: the file that the handler writes.
            max_bytes: largest number of bytes to return.
        """
        if number is None:
            return "(its interpreter does not respond)"
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
        assert self._pid is not None, "a watcher thread runs in the rank's process"
        try:
            os.kill(self._pid, 0)
        except ProcessLookupError:
            return False
        except OSError:
            return True
        return True

    def _state(self) -> str:
        """Return the line of /proc/PID/stat after the process name; empty if there is none."""
        return "" if self._pid is None else _state_of(self._pid)


def is_stopped(pid: int) -> bool:
    """Return whether a signal or a debugger has stopped a process."""
    return _state_of(pid)[:1] in set(_STOPPED)


def how_ended(code: int) -> str:
    """Return a text about how a process ended, given its exit code as in subprocess."""
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
