"""Control of a simulated host: start commands on it, and power it off."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

_INSIDE: Final = Path(__file__).with_name("inside.py")
_PATIENCE_S: Final = 60.0  # an answer takes milliseconds on an idle machine
_LOOK_S: Final = 0.02


class LackingError(Exception):
    """This machine or user cannot create hosts; the message gives the missing feature."""


class Asker:
    """One end of a socket for requests and answers: JSON, one per packet."""

    def __init__(self, own: socket.socket, process: subprocess.Popen[bytes], said: int):
        self._own, self._process, self._said = own, process, said
        own.settimeout(_PATIENCE_S)

    def first_answer(self) -> tuple[Any, list[int]]:
        """Return the first answer of the process, and the descriptors that it passes."""
        packet, descriptors, _, _ = socket.recv_fds(self._own, 1 << 16, 4)
        return self._read(packet), descriptors

    def ask(self, **request: object) -> Any:
        """Send a request; return the answer."""
        try:
            self._own.send(json.dumps(request).encode())
            return self._read(self._own.recv(1 << 16))
        except OSError as error:
            raise RuntimeError(f"two hosts: no answer ({error}): {self.said()}") from error

    def said(self) -> str:
        """Return the output of the process."""
        # pread does not move the file offset, which the process shares.
        text = os.pread(self._said, 1 << 16, 0)
        return text.decode(errors="replace").strip()

    def end(self) -> None:
        """Close the socket, which ends the process; make sure that it does."""
        self._own.close()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            self._process.wait(_PATIENCE_S)
        os.close(self._said)

    def _read(self, packet: bytes) -> Any:
        if not packet:
            raise RuntimeError(f"two hosts: a helper process ended: {self.said()}")
        return json.loads(packet)


def start_asked(command: Sequence[str], kept: Sequence[int] = (), **facts: object) -> Asker:
    """Start a program of this folder; its last argument is JSON with the facts and its socket."""
    own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    said = os.memfd_create("said")  # an unnamed file
    words = [*command, json.dumps({"control": theirs.fileno(), **facts})]
    with theirs:
        process = subprocess.Popen(
            words,
            cwd=_INSIDE.parents[2],
            env={"PATH": os.environ.get("PATH", os.defpath)},
            pass_fds=(theirs.fileno(), *kept),
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,  # Ctrl-C must not reach it; this process ends it
        )
    return Asker(own, process, said)


class Job:
    """A running command on a host; `output` has both of its streams."""

    def __init__(self, asker: Asker, number: int, output: Path) -> None:
        self._asker, self._number, self._output = asker, number, output
        self._code: int | None = None

    @property
    def code(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs."""
        if self._code is None:
            self._code = self._asker.ask(do="poll", job=self._number)["code"]
        return self._code

    @property
    def output(self) -> str:
        """Return the output so far."""
        return self._output.read_text(errors="replace") if self._output.exists() else ""

    def wait(self, limit_s: float) -> int:
        """Return the exit code once the command has ended; raises TimeoutError."""
        deadline_s = time.monotonic() + limit_s
        while self.code is None:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"not ended after {limit_s:g} s; output:\n{self.output}")
            time.sleep(_LOOK_S)
        return self.code

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the command and its session, unless it has ended."""
        self._asker.ask(do="signal", job=self._number, number=int(number))


class Host:
    """A simulated host: its namespaces and the process that keeps them."""

    def __init__(self, name: str, address: str, names: Mapping[str, str], mtu: int) -> None:
        self.name, self.address = name, address
        self._asker = start_asked(
            [sys.executable, "-I", str(_INSIDE)],
            name=name,
            address=address,
            names=dict(names),
            mtu=mtu,
        )
        self._is_on = True
        try:
            answer, descriptors = self._asker.first_answer()
            if "lacking" in answer:
                raise LackingError(answer["lacking"])
        except BaseException:
            self.power_off()
            raise
        (self.link_end,) = descriptors  # taken by the process that starts the link

    def start(
        self,
        command: Sequence[str],
        *,
        output: Path,
        folder: Path,
        environ: Mapping[str, str] | None = None,
    ) -> Job:
        """Start a command in a folder; its output is appended to the file `output`."""
        number = self._asker.ask(
            do="start",
            command=list(command),
            output=str(output.absolute()),
            folder=str(folder.absolute()),
            environ=dict(os.environ if environ is None else environ),
        )["job"]
        return Job(self._asker, number, output)

    def power_off(self) -> None:
        """Kill every process of the host, as in a power failure; return when none is left.

        The other host is not notified: the link stays, and nothing answers.
        """
        if self._is_on:
            self._is_on = False
            self._asker.end()
