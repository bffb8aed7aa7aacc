"""Start, restart and stop a rank's watcher process, and exchange messages with it."""

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
from gpipe_hpc.comm.watchdog.json_connection import JsonConnection, Message
from gpipe_hpc.comm.watchdog.own_process import OwnProcess, how_ended, is_stopped
from gpipe_hpc.comm.watchdog.watcher import Watcher

log = logging.getLogger("gpipe_hpc.watch")

_START: Final = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from gpipe_hpc.comm.watchdog.watcher import main; main()"
)
_END_S: Final = 5.0
_STOPPED_S: Final = 1.5  # time without an answer after which to check for a stopped process
_FIRST_ANSWER_S: Final = 30.0  # includes the start of Python
_ANSWER_SHARE: Final = 0.3  # share of the time after which neighbours consider this rank lost
_LEAST_ANSWER_S: Final = 2.0
_PAUSE_S: Final = 2.0  # a longer time between two checks means that this thread did not run
_MOST_ENDS: Final = 3  # number of lost processes after which a thread is used
_AGAIN: Final = ("orders", "listen", "peer")  # kinds of messages repeated to a new watcher


class Helper:
    """A running watcher: a separate process, or a thread if no process can be started.

    The process inherits no open file but one socket, imports only the standard library and runs in
    its own session, so that signals from the terminal or to the process group do not reach it. If
    it is killed, `replace` starts another one.
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
        self._line = JsonConnection(own)
        self._answered_s = self._looked_s = time.monotonic()
        self._has_answered = False
        self._process = _start(theirs) if self._num_ends < _MOST_ENDS else None
        if self._process is None:
            # A thread does not run while another one holds the GIL, but is better than nothing.
            watcher = Watcher(JsonConnection(theirs), OwnProcess(None))
            threading.Thread(target=watcher.run, name="watcher", daemon=True).start()
        else:
            theirs.close()

    @property
    def is_there(self) -> bool:
        """Return whether the watcher can receive messages."""
        return self._line.is_open

    @property
    def process_number(self) -> int:
        """Return the process id of the watcher; that of the rank if the watcher is a thread."""
        return self._pid if self._process is None else self._process.pid

    def send(self, **message: Any) -> None:
        """Send the watcher a message; thread-safe."""
        with self._lock:
            if self._pid == os.getpid():
                if message["kind"] in _AGAIN:
                    self._again.append(message)
                if message["kind"] == "orders":
                    self._answer_s = max(_LEAST_ANSWER_S, _ANSWER_SHARE * message["silence_s"])
                self._line.send(message)

    def receive(self, limit_s: float) -> list[Message]:
        """Return the watcher's messages; wait up to `limit_s` seconds for the first."""
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
        """Return whether a watcher that has ended did so without failure."""
        return self._process is None or self._process.returncode == 0

    def why_gone(self) -> str | None:
        """Return how the watcher has ended, or why it was killed by this method; None if it runs.

        A watcher that a signal has stopped, or that does not answer the message sent each second,
        is killed; otherwise the neighbours would soon consider this rank lost.
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
            why = f"did not respond for {silent_s:.0f} s"
        else:
            return None
        with self._lock:
            self._line.close()
        process.kill()
        process.wait()
        return f"{why}, so it was killed"

    def replace(self) -> bool:
        """Replace a lost watcher by a new one and repeat its messages; return whether it started.

        It listens on the same ports, so that the neighbours find it.
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
        """Notify the watcher that this rank ends without failure; `receive` then ends."""
        self.send(kind="left")

    def end(self) -> None:
        """Close the connection and wait for the watcher process to end."""
        with self._lock:
            self._line.close()
        if self._process is not None and self._pid == os.getpid():
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                log.warning("the watcher process of process %d has not ended", self._pid)

    def forget(self) -> None:
        """In a forked child process, close the parent's socket without affecting the parent."""
        self._line.drop()

    @staticmethod
    def _end_of(process: "subprocess.Popen[bytes]") -> str:
        """Wait for a watcher that has closed its connection, or kill it; return how it ended."""
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
            "watch: cannot start the watcher process with %r (%s); using a thread instead",
            sys.executable,
            error,
        )
        return None
