"""Hosts of a run's ranks: this machine, or two simulated hosts with a link.

Ranks are forked from tests/process_server.py, which has imported torch: one server per host.
"""

import contextlib
import json
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Final, Protocol

from experiments.soak.processes import ProcessInfo, inside, marked, seen
from experiments.two_hosts import Host, TwoHosts

ROOT: Final = Path(__file__).resolve().parents[2]
_SERVER: Final = ROOT / "tests" / "process_server.py"
_OF_LAUNCHERS: Final = (
    *("RANK", "WORLD_", "LOCAL_", "MASTER_", "TORCHELASTIC_", "GROUP_", "ROLE_", "SOAK_"),
    *("OMPI_", "PMI_", "MV2_", "MPI_", "SLURM_", "GLOO_", "GPIPE_HPC_"),
)
_MARK: Final = "SOAK_SERVER"
_SHARED_MEMORY: Final = Path("/dev/shm")


class Server(Protocol):
    """Client of the process server in tests/process_server.py."""

    def ask(self, **request: object) -> int | None:
        """Send a request; return the answer."""


class _Streams:
    """A server connected by two streams."""

    def __init__(self, requests: IO[str], answers: IO[str]) -> None:
        self._requests, self._answers = requests, answers

    def ask(self, **request: object) -> int | None:
        """Send a request; return the answer. Raises ConnectionError if the server has ended."""
        try:
            self._requests.write(json.dumps(request) + "\n")
            self._requests.flush()
            line = self._answers.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise ConnectionError("soak: the process server is gone")
        answer: int | None = json.loads(line)
        return answer

    def close(self) -> None:
        """Close both streams, which ends the server."""
        self._requests.close()
        self._answers.close()


class OwnServer(_Streams):
    """A server started by this process on this machine."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(_SERVER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=clean_environ(),
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        super().__init__(self._process.stdin, self._process.stdout)

    def close(self) -> None:
        """End the server."""
        super().close()
        self._process.wait(60.0)


class Process:
    """A rank, or another `python -m <module>`; its output contains both streams."""

    def __init__(self, server: Server, number: int, process: ProcessInfo, output: Path) -> None:
        self._server, self._number, self._output = server, number, output
        self.process = process
        self._code: int | None = None

    @property
    def code(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs."""
        if self._code is None:
            try:
                self._code = self._server.ask(what="poll", pid=self._number)
            except ConnectionError:  # its host has ended, so it has too
                self._code = -signal.SIGKILL
        return self._code

    @property
    def output(self) -> str:
        """Return the output so far."""
        return self._output.read_text(errors="replace") if self._output.exists() else ""


@dataclass(frozen=True)
class Place:
    """A host: how to reach its server, and how its processes are seen from here."""

    name: str
    address: str
    server: Server
    find: Callable[[int], ProcessInfo | None]
    shared_memory: Path
    is_private: bool  # the shared memory of this host only

    def start(
        self,
        words: Sequence[str],
        *,
        module: str,
        folder: Path,
        output: Path,
        environ: Mapping[str, str] | None = None,
    ) -> Process:
        """Start `python -m module` as a fork of the server."""
        environ = clean_environ() | dict(environ or {})
        number = self.server.ask(
            what="start",
            module=module,
            is_whole=environ.get("RANK", "0") == "0",
            arguments=list(words),
            environ=environ,
            folder=str(folder),
            output=str(output),
        )
        found = None if number is None else self.find(number)
        assert number is not None and found is not None, f"soak: {module} did not start"
        return Process(self.server, number, found, output)


class RunHosts:
    """The hosts of a run's ranks: the first half on the first host, and so on."""

    def __init__(self, places: Sequence[Place]) -> None:
        self.places = tuple(places)

    def place_of(self, rank: int, ranks: int) -> Place:
        """Return the host of a rank."""
        return self.places[rank * len(self.places) // ranks]

    def start(
        self, ranks: int, words: Sequence[str], *, folder: Path, logs: Path, env: Mapping[str, str]
    ) -> list[Process]:
        """Start ranks of gpipe_hpc.train with the environment that torchrun would set."""
        logs.mkdir(parents=True)
        on = [self.place_of(rank, ranks) for rank in range(ranks)]
        common = {
            "GPIPE_HPC_SECRET": secrets.token_hex(32),
            "MASTER_ADDR": on[0].address,
            "MASTER_PORT": str(_free_port()),
            "WORLD_SIZE": str(ranks),
            **env,
        }
        started = []
        for rank, place in enumerate(on):
            own = {
                "RANK": rank,
                "LOCAL_RANK": on[:rank].count(place),
                "LOCAL_WORLD_SIZE": on.count(place),
            }
            environ = common | {name: str(value) for name, value in own.items()}
            started.append(
                place.start(
                    words,
                    module="gpipe_hpc.train",
                    folder=folder,
                    output=logs / f"rank_{rank}.txt",
                    environ=environ,
                )
            )
        return started

    def close(self) -> None:
        """End simulated hosts."""


def this_machine(server: Server, is_private: bool) -> RunHosts:
    """Return this machine as the only host; `is_private`: its /dev/shm belongs to this test."""
    return RunHosts(
        [Place(socket.gethostname(), "127.0.0.1", server, seen, _SHARED_MEMORY, is_private)]
    )


class SimulatedHosts(RunHosts):
    """Two simulated hosts whose link can be cut and whose power can fail."""

    def __init__(self, scratch: Path) -> None:
        self._scratch, self._number = scratch, 0
        self._stack = ExitStack()
        super().__init__(())
        self.power_on()

    def power_on(self) -> None:
        """Create two new hosts with the same names and addresses."""
        self._stack.close()
        with ExitStack() as stack:
            self.pair = stack.enter_context(TwoHosts(rate=0.0, delay_s=0.0))
            self.places = tuple(self._place(host, stack) for host in self.pair.hosts)
            self._stack = stack.pop_all()

    def mend(self) -> None:
        """Undo a fault: restore the link, or both hosts if one has no power."""
        if all(place.shared_memory.exists() for place in self.places):
            self.pair.link.restore()
        else:
            self.power_on()

    def close(self) -> None:
        """End both hosts and their processes."""
        self._stack.close()

    def _place(self, host: Host, stack: ExitStack) -> Place:
        self._number += 1
        folder = self._scratch / f"{host.name}_{self._number}"
        folder.mkdir(parents=True)
        asked, answered = folder / "asked", folder / "answered"
        for pipe in (asked, answered):
            os.mkfifo(pipe)
        mark = str(folder)
        host.start(
            ["sh", "-c", f"exec {sys.executable} {_SERVER} < asked > answered"],
            output=folder / "said.txt",
            folder=folder,
            environ=clean_environ() | {_MARK: mark},
        )
        # Opening read-write does not block; opening the answers waits for the server.
        requests = stack.enter_context(os.fdopen(os.open(asked, os.O_RDWR), "w"))
        answers = stack.enter_context(answered.open())
        server = _Streams(requests, answers)
        here = os.readlink("/proc/self/ns/pid")
        found = marked(_MARK, mark)
        assert found is not None, "soak: the process server of a host did not start"
        namespace = os.readlink(f"/proc/{found.pid}/ns/pid")
        assert namespace != here, "soak: a host shares its processes with this machine"
        shared_memory = Path(f"/proc/{found.pid}/root/dev/shm")
        find = partial(inside, namespace)
        return Place(host.name, host.address, server, find, shared_memory, is_private=True)


def _free_port() -> int:
    """Return a free port outside of the range that the system assigns."""
    dealt = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(15_000, dealt)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def clean_environ() -> dict[str, str]:
    """Return an environment without launcher variables, in which this repository is importable."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_OF_LAUNCHERS)}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return kept | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
