"""Worker processes shared by contestants, as seen by the process that controls them."""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.cells import Contestant
from gpipe_hpc.errors import GpipeError

# How long processes may take to start, and to answer.
START_S: Final = 120.0
ANSWER_S: Final = 120.0

# Equal for all contestants. Freed memory stays with the process, so that a step causes no page
# faults, and uses huge pages if the system has them.
ALLOCATOR: Final = {
    "MALLOC_MMAP_THRESHOLD_": "33554432",
    "MALLOC_TRIM_THRESHOLD_": "4294967296",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
# Waits for the end of the process that holds its input, then kills the named process groups.
_GUARD: Final = 'read -r _; for group do kill -s KILL -- "-$group"; done'
_ROOT: Final = Path(__file__).resolve().parents[1]


class WorkerError(GpipeError):
    """Worker processes failed, ended or did not answer."""


class WorkerPool:
    """Worker processes that run steps of their contestants on request.

    They are stopped (SIGSTOP) while they wait, because each Gloo group has a thread that wakes up
    100 times a second, and peers have dozens of groups.
    """

    def __init__(
        self,
        contestants: Sequence[Contestant],
        size: str,
        logs: Path,
        paths: tuple[str, ...] = (),
    ) -> None:
        """Start the processes; `paths` are added to Python's module search path.

        `absent` lists the contestants that cannot be loaded, with the reason. Raises WorkerError if
        a process cannot start.
        """
        self.contestants = {each.name: each for each in contestants}
        self.name = contestants[0].crew
        self.logs = logs
        self._processes: list[subprocess.Popen[bytes]] = []
        self._streams: list[socket.socket] = []
        self._rests: list[bytes] = []
        logs.mkdir(parents=True, exist_ok=True)
        port = _free_port()
        for rank in range(contestants[0].num_ranks):
            self._start(rank, port, size, paths)
        self._guard = self._start_guard()
        try:
            answers = self._collect(START_S)
        except WorkerError:
            self.close()
            raise
        self.version = str(answers[0]["version"])
        self.absent = {
            name: self._report(f"{name}: {reason}")
            for answer in answers
            for name, reason in answer["absent"].items()
        }
        self._signal(signal.SIGSTOP)

    def _start(self, rank: int, port: int, size: str, paths: tuple[str, ...]) -> None:
        ours, theirs = socket.socketpair()
        entrants = {each.name: each.entrant for each in self.contestants.values()}
        contestant = next(iter(self.contestants.values()))
        places = [str(_ROOT), *paths, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            **os.environ,
            **ALLOCATOR,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(contestant.num_ranks),
            "LOCAL_WORLD_SIZE": str(contestant.num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": str(contestant.num_threads),
            "PYTHONPATH": os.pathsep.join(places),
        }
        with (self.logs / f"{self.name}-{rank}.log").open("ab") as log:
            self._processes.append(
                subprocess.Popen(
                    [
                        contestant.python or sys.executable,
                        *("-m", "benchmarks.worker"),
                        *(str(theirs.fileno()), json.dumps(entrants), size),
                    ],
                    env=environment,
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )
        theirs.close()
        self._streams.append(ours)
        self._rests.append(b"")

    def _start_guard(self) -> subprocess.Popen[bytes]:
        """Start a process that ends the workers' process groups if this process is killed.

        The kernel then ends their first processes; the processes that those have started would
        remain stopped.
        """
        groups = [str(process.pid) for process in self._processes]
        return subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, "guard", *groups],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def ask(self, request: dict[str, Any], timeout_s: float = ANSWER_S) -> list[dict[str, Any]]:
        """Send the same request to all ranks; return their answers in order of ranks.

        Raises WorkerError if one fails or is late; the crew cannot be used afterwards.
        """
        line = (json.dumps(request) + "\n").encode()
        self._signal(signal.SIGCONT)
        try:
            for stream in self._streams:
                stream.sendall(line)
        except OSError as error:
            raise WorkerError(self._report(f"has ended ({error})")) from error
        answers = self._collect(timeout_s)
        self._signal(signal.SIGSTOP)
        return answers

    def run(self, cell: str, num_steps: int) -> list[dict[str, Any]]:
        """Run steps from a common start time; add the seconds since then to each rank's answer."""
        self._signal(signal.SIGCONT)
        at_s = time.monotonic() + 0.005
        answers = self.ask({"do": "run", "cell": cell, "steps": num_steps, "at_s": at_s})
        for answer in answers:
            answer["wall_s"] = answer["end_s"] - at_s
        return answers

    def _collect(self, timeout_s: float) -> list[dict[str, Any]]:
        deadline = time.monotonic() + timeout_s
        answers: dict[int, dict[str, Any]] = {}
        while len(answers) < len(self._streams):
            waiting = [rank for rank in range(len(self._streams)) if rank not in answers]
            left_s = max(deadline - time.monotonic(), 0.0)
            ready = select.select([self._streams[rank] for rank in waiting], [], [], left_s)[0]
            if not ready:
                raise WorkerError(
                    self._report(f"ranks {waiting} gave no answer in {timeout_s:g} s")
                )
            for rank in waiting:
                if self._streams[rank] in ready and self._read(rank):
                    line, _, self._rests[rank] = self._rests[rank].partition(b"\n")
                    answers[rank] = json.loads(line)
                    if "failed" in answers[rank]:
                        raise WorkerError(self._report(f"rank {rank}: {answers[rank]['failed']}"))
        return [answers[rank] for rank in range(len(self._streams))]

    def _read(self, rank: int) -> bool:
        """Read the available output of a rank; return whether a line is complete."""
        try:
            data = self._streams[rank].recv(1 << 20)
        except OSError:
            data = b""
        if not data:
            raise WorkerError(self._report(f"rank {rank} has ended"))
        self._rests[rank] += data
        return b"\n" in self._rests[rank]

    def _report(self, what: str) -> str:
        return f"processes {self.name}: {what}; logs are in {self.logs}"

    def _signal(self, number: int) -> None:
        for process in self._processes:
            # Signal the whole session, so that child processes stop and continue too.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)

    def close(self) -> None:
        """End the processes and all their descendants."""
        self._signal(signal.SIGCONT)
        for stream in self._streams:
            stream.close()
        for process in self._processes:
            try:
                process.wait(timeout=3.0)
            except subprocess.TimeoutExpired:
                self._signal(signal.SIGKILL)
                process.wait()
        self._guard.communicate()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port
