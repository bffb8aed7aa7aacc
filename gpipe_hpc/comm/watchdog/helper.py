"""The rank's side of its watcher: start it, exchange messages with it, end it."""

import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final

import gpipe_hpc
from gpipe_hpc.comm.watchdog.lines import Line, Message
from gpipe_hpc.comm.watchdog.own_process import OwnProcess, how_ended, is_stopped
from gpipe_hpc.comm.watchdog.watcher import Watcher

log = logging.getLogger("gpipe_hpc.watch")

_START: Final = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from gpipe_hpc.comm.watchdog.watcher import main; main()"
)
_END_S: Final = 5.0
_STOPPED_S: Final = 1.5  # without an answer, of a process that is stopped
_FIRST_ANSWER_S: Final = 30.0  # Python has to start first
_ANSWER_SHARE: Final = 0.3  # of the silence after which neighbours take this rank for lost
_LEAST_ANSWER_S: Final = 2.0
_PAUSE_S: Final = 2.0  # between two looks: the thread that looks did not run itself
_MOST_ENDS: Final = 3  # of helper processes; then a thread takes their place
_AGAIN: Final = ("orders", "listen", "peer")  # what a new helper has to be told too


class Helper:
    """A running watcher: a process of its own, or a thread if none can be started.

    It gets no files of this process but one socket, and no environment that matters: standard
    library alone, in a session of its own, so that a signal from the terminal or to the
    process group does not reach it. It can still be killed: then `replace` starts another.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._again: list[dict[str, Any]] = []
        self._ports: dict[str, int] = {}  # on which it listens, by address
        self._num_ends = 0
        self._answer_s = float("inf")  # how long it may take to answer
        self._open()

    def _open(self) -> None:
        own, theirs = socket.socketpair()
        self._line = Line(own)
        self._answered_s = self._looked_s = time.monotonic()
        self._has_answered = False
        self._process = _start(theirs) if self._num_ends < _MOST_ENDS else None
        if self._process is None:
            # Not told of a long call that holds the interpreter, but better than nothing.
            watcher = Watcher(Line(theirs), OwnProcess(None))
            threading.Thread(target=watcher.run, name="watcher", daemon=True).start()
        else:
            theirs.close()

    @property
    def is_there(self) -> bool:
        """Say whether the watcher can receive messages."""
        return self._line.is_open

    @property
    def process_number(self) -> int:
        """Return the process that watches: this one where it is a thread."""
        return self._pid if self._process is None else self._process.pid

    def send(self, **message: Any) -> None:
        """Send the watcher a message; any thread may."""
        with self._lock:
            if self._pid == os.getpid():
                if message["kind"] in _AGAIN:
                    self._again.append(message)
                if message["kind"] == "orders":
                    self._answer_s = max(_LEAST_ANSWER_S, _ANSWER_SHARE * message["silence_s"])
                self._line.send(message)

    def receive(self, limit_s: float) -> list[Message]:
        """Return the watcher's messages; wait up to `limit_s` for the first."""
        if self._line.is_open:
            poller = select.poll()
            poller.register(self._line.fileno(), select.POLLIN)
            poller.poll(1e3 * max(limit_s, 0.0))
        with self._lock:
            self._line.flush()
            messages = self._line.receive() if self._line.is_open else []
            for message in messages:
                if message.get("kind") == "listening" and message["port"]:
                    self._ports[message["host"]] = message["port"]
            if messages:
                self._answered_s, self._has_answered = time.monotonic(), True
            return messages

    @property
    def has_ended_well(self) -> bool:
        """Say whether a watcher that has ended did so in good order."""
        return self._process is None or self._process.returncode == 0

    def why_gone(self) -> str | None:
        """Return how the helper process has ended or why it was killed here; None: it works.

        One that is stopped by a signal, or does not answer what it is told each second, is killed:
        the neighbours would soon take this rank for lost.
        """
        now_s = time.monotonic()
        if now_s > self._looked_s + _PAUSE_S:
            self._answered_s += now_s - self._looked_s
        self._looked_s = now_s
        process, silent_s = self._process, now_s - self._answered_s
        if process is None:
            return None if self._line.is_open else "has ended"
        if not self._line.is_open:
            return self._end_of(process)
        limit_s = self._answer_s if self._has_answered else _FIRST_ANSWER_S
        if silent_s < min(_STOPPED_S, limit_s):
            return None
        if is_stopped(process.pid):
            why = "was stopped by a signal (SIGSTOP) or a debugger"
        elif silent_s > limit_s:
            why = f"gave no answer for {silent_s:.0f} s"
        else:
            return None
        with self._lock:
            self._line.close()
        process.kill()
        process.wait()
        return f"{why}, so it was killed"

    def replace(self) -> bool:
        """Start a new watcher in place of a lost one, with the same messages; False: none started.

        It listens where the one before it did, so that the neighbours find it.
        """
        with self._lock:
            if self._process is None or self._pid != os.getpid():
                return False
            self._line.close()
            self._num_ends += 1
            self._open()
            for message in self._again:
                port = self._ports.get(message["host"]) if message["kind"] == "listen" else None
                self._line.send(message | {"is_again": True} | ({"port": port} if port else {}))
        return True

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

    @staticmethod
    def _end_of(process: "subprocess.Popen[bytes]") -> str:
        """Return how a process ended that has closed its connection, or is about to end."""
        try:
            return how_ended(process.wait(_STOPPED_S))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return "closed its connection, so it was killed"


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
    except (OSError, ValueError, RuntimeError) as error:
        log.warning(
            "watch: cannot start a helper process with %r (%s); a thread does its work",
            sys.executable,
            error,
        )
        return None
