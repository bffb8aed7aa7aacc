"""The rank's side of its watcher: start it, talk with it, end it."""

import logging
import os
import select
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Final

import gpipe_hpc
from gpipe_hpc.comm.watch.lines import Line, Message
from gpipe_hpc.comm.watch.own_process import OwnProcess
from gpipe_hpc.comm.watch.watcher import Watcher

log = logging.getLogger("gpipe_hpc.watch")

_START: Final = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from gpipe_hpc.comm.watch.watcher import main; main()"
)
_END_S: Final = 5.0


class Helper:
    """A running watcher: a process of its own, or a thread where none can be started.

    It gets no files of this process but one socket, and no environment that matters: standard
    library alone, in a session of its own, so that a signal from the terminal or to the
    process group does not reach it.
    """

    def __init__(self) -> None:
        own, theirs = socket.socketpair()
        self._pid = os.getpid()
        self._line = Line(own)
        self._lock = threading.RLock()
        self._process = _start(theirs)
        if self._process is None:
            # Not told of a long call that holds the interpreter, but better than nothing.
            watcher = Watcher(Line(theirs), OwnProcess(None))
            threading.Thread(target=watcher.run, name="watcher", daemon=True).start()
        else:
            theirs.close()

    @property
    def is_there(self) -> bool:
        """Say whether the watcher can be spoken to."""
        return self._line.is_open

    @property
    def process_number(self) -> int:
        """Return the process that watches: this one where it is a thread."""
        return self._pid if self._process is None else self._process.pid

    def send(self, **message: Any) -> None:
        """Tell the watcher something; any thread may."""
        with self._lock:
            if self._pid == os.getpid():
                self._line.send(message)

    def receive(self, limit_s: float) -> list[Message]:
        """Return what the watcher says, waiting `limit_s` for the first word."""
        if self._line.is_open:
            poller = select.poll()
            poller.register(self._line.fileno(), select.POLLIN)
            poller.poll(1e3 * max(limit_s, 0.0))
        with self._lock:
            self._line.flush()
            return self._line.receive() if self._line.is_open else []

    def leave(self) -> None:
        """Tell the watcher that this rank goes in good order; `receive` then ends."""
        self.send(kind="left")

    def end(self) -> None:
        """Give back the connection and, once the watcher has ended, its process number."""
        with self._lock:
            self._line.close()
        if self._process is not None and self._pid == os.getpid():
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                log.warning("the watcher of process %d has not ended", self._pid)

    def forget(self) -> None:
        """Close the socket in a process that a fork has made: it is the parent's."""
        self._line.drop()


def _start(end: socket.socket) -> "subprocess.Popen[bytes] | None":
    root = str(Path(gpipe_hpc.__file__).resolve().parent.parent)
    command = [sys.executable, "-I", "-S", "-c", _START, root, str(end.fileno()), str(os.getpid())]
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[end.fileno()],
            cwd="/",
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        log.warning(
            "watch: expected to start a helper process with %r, got %s; a thread does its work",
            sys.executable,
            error,
        )
        return None
