"""Fixtures for tests in several folders."""

import contextlib
import gc
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader, state_dict_loader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from gpipe_hpc.comm.world.threads import run_on_threads
from gpipe_hpc.device.device import Accelerator, Device, HostDevice
from tests import support
from tests.support import patience
from tests.tiers import is_left_out, sort_into_tiers

# No deadline: the duration of an example varies on a busy machine.
hypothesis.settings.register_profile("gpipe_hpc", deadline=None)
hypothesis.settings.load_profile("gpipe_hpc")

# With two cores and small tensors, more threads only slow each other down.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option --device, which runs comparisons with a plain loop on an accelerator."""
    parser.addoption("--device", default="cpu", help="cpu, or an accelerator as torch calls it")


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> Device:
    """Return the device for tests of exactness: the CPU, or the accelerator given by --device."""
    kind = request.config.getoption("--device")
    return HostDevice() if kind == "cpu" else Accelerator(torch.device(kind, 0))


@pytest.fixture(scope="session")
def on_threads(device: Device) -> Callable[..., list[Any]]:
    """Return a function that runs `body(world)` on ranks that are threads and use `device`."""

    def own(rank: int) -> Device:
        device.use()
        return device

    return partial(run_on_threads, device=own)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip files without tests that ``-m`` selects, since importing them takes time."""
    if not collection_path.name.startswith("test_"):
        return None
    path = collection_path.relative_to(config.rootpath).as_posix()
    return True if is_left_out(path, config.option.markexpr) else None


@pytest.hookimpl(tryfirst=True)  # before -m, which reads the markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that only the longer targets of the Makefile run."""
    sort_into_tiers(items)


def pytest_collection_finish() -> None:
    """Exclude existing objects from garbage collection: a full collection took 0.4 s."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def repository() -> Path:
    """Return the root folder of the repository."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture
def environ() -> dict[str, str]:
    """Return the environment without PYTHONPATH and variables of torchrun, MPI and Slurm."""
    torchrun = ("RANK", "WORLD_", "LOCAL_", "MASTER_", "TORCHELASTIC_")
    unwanted = (*torchrun, "OMPI_", "PMI_", "MV2_", "MPI_", "SLURM_", "GLOO_", "PYTHONPATH")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(unwanted)}
    return kept | {"OMP_NUM_THREADS": "1"}


def wait_until(holds: Callable[[], object], limit_s: float, what: str) -> None:
    """Wait until `holds()` is true; fail after `limit_s` seconds, extended on a busy machine."""
    began_s = time.monotonic()
    while not holds():
        waited_s = time.monotonic() - began_s
        if waited_s > limit_s and waited_s > limit_s * patience():
            pytest.fail(f"waited {waited_s:.0f} s in vain until {what}")
        time.sleep(0.01)


@pytest.fixture(scope="session")
def until() -> Callable[..., None]:
    """Return `wait_until`."""
    return wait_until


class ProcessServer:
    """Client of a running tests/process_server.py."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("process_server.py")
        self._process = subprocess.Popen(
            [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, **request: object) -> int | None:
        """Send a request and return the response."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer: int | None = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        """Stop the server."""
        self._process.communicate()


@pytest.fixture(scope="session")
def process_server() -> Iterator[ProcessServer]:
    server = ProcessServer()
    yield server
    server.close()


class Command:
    """A process that runs `python -m <module>`; stdout and stderr are one output."""

    def __init__(self, server: ProcessServer, path: Path, **request: object) -> None:
        self._server, self._path = server, path
        pid = server.ask(what="start", output=str(path), **request)
        assert pid is not None
        self.pid = pid
        self._code: int | None = None

    @property
    def code(self) -> int | None:
        """Return the exit code, negative for a signal, or None while the process runs."""
        if self._code is None:
            self._code = self._server.ask(what="poll", pid=self.pid)
        return self._code

    @property
    def output(self) -> str:
        """Return the output so far."""
        return self._path.read_text(errors="replace") if self._path.exists() else ""

    def wait(self, limit_s: float = 30.0) -> "Command":
        """Wait until the process has ended; return this object."""
        wait_until(lambda: self.code is not None, limit_s, f"it ended, having said: {self.output}")
        return self

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the process has ended."""
        if self.code is None:
            os.kill(self.pid, number)


Start = Callable[..., Command]


@pytest.fixture
def start(process_server: ProcessServer, environ: dict[str, str], tmp_path: Path):
    """Return a function that starts `python -m gpipe_hpc.train` and kills it after the test.

    With `is_whole`, the interpreter is finalized at exit, as for a user; by default it is not, to
    save time.
    """
    commands: list[Command] = []

    def start_one(
        *overrides: str,
        env: Mapping[str, str] | None = None,
        module: str = "gpipe_hpc.train",
        is_whole: bool = False,
    ) -> Command:
        command = Command(
            process_server,
            tmp_path / f"output{len(commands)}.txt",
            module=module,
            is_whole=is_whole,
            arguments=overrides,
            environ=environ | dict(env or {}),
            folder=str(tmp_path),
        )
        commands.append(command)
        return command

    yield start_one
    for command in commands:
        command.signal(signal.SIGKILL)
        command.wait()


@dataclass
class Ranks:
    """The processes of one launch, in order of rank."""

    commands: list[Command]

    def wait(self, limit_s: float = 30.0) -> "Ranks":
        """Wait until all ranks have ended; return this object."""
        for command in self.commands:
            command.wait(limit_s)
        return self

    @property
    def codes(self) -> list[int | None]:
        """Return the exit codes in order of rank."""
        return [command.code for command in self.commands]

    @property
    def outputs(self) -> list[str]:
        """Return the outputs so far in order of rank."""
        return [command.output for command in self.commands]


@pytest.fixture
def start_ranks(start: Start, free_port: Callable[[], int]) -> Callable[..., Ranks]:
    """Return a function that starts `world_size` ranks, or some of them, as torchrun does."""

    def start_all(
        world_size: int,
        *overrides: str,
        ranks: Sequence[int] | None = None,
        env: Mapping[str, str] | None = None,
        module: str = "gpipe_hpc.train",
        is_whole: bool = False,
    ) -> Ranks:
        port = free_port()
        places = [
            {
                "RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            for rank in (range(world_size) if ranks is None else ranks)
        ]
        return Ranks(
            [
                start(*overrides, env=place | dict(env or {}), module=module, is_whole=is_whole)
                for place in places
            ]
        )

    return start_all


@pytest.fixture
def train(start_ranks: Callable[..., Ranks]) -> Callable[..., str]:
    """Return a function that trains on some ranks, asserts success, and returns rank 0's output."""

    def train_all(world_size: int, *overrides: str, env: Mapping[str, str] | None = None) -> str:
        ranks = start_ranks(world_size, *overrides, env=env).wait(60)
        assert ranks.codes == [0] * world_size, "\n".join(ranks.outputs)
        return ranks.outputs[0]

    return train_all


@pytest.fixture
def two_hosts() -> Iterator[Callable[..., Any]]:
    """Return a function that creates a pair of simulated hosts; skip if that is not possible.

    The function takes the arguments of `TwoHosts`; the hosts are removed after the test.
    """
    from experiments.two_hosts import LackingError, TwoHosts  # few tests need it

    with contextlib.ExitStack() as stack:

        def make(rate: float = 100e6, delay_s: float = 0.005, **options: Any) -> TwoHosts:
            try:
                return stack.enter_context(TwoHosts(rate, delay_s, **options))
            except LackingError as error:
                pytest.skip(f"no two hosts here: {error}")

        yield make


@pytest.fixture
def free_port() -> Callable[[], int]:
    """Return `tests.support.free_port`."""
    return support.free_port


def marked(name: str, value: str) -> dict[int, dict[str, str]]:
    """Return the environments, by process id, of all processes in which a variable has a value."""
    found = {}
    for folder in Path("/proc").iterdir():
        try:
            raw = (folder / "environ").read_text(errors="replace") if folder.name.isdigit() else ""
            environ = dict(entry.split("=", 1) for entry in raw.split("\0") if "=" in entry)
            if environ.get(name) == value:
                found[int(folder.name)] = environ
        except OSError:
            continue  # the process has ended
    return found


class Torchrun:
    """A torchrun process and its workers, which are found by a variable in their environment."""

    def __init__(self, arguments: Sequence[str], environ: Mapping[str, str], folder: Path) -> None:
        self._mark = f"{folder}/{time.monotonic_ns()}"
        self._path = folder / f"torchrun{time.monotonic_ns()}.txt"
        with self._path.open("w") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *arguments],
                cwd=folder,
                env=environ | {"TEST_MARK": self._mark},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        """Return the output so far of all processes."""
        return self._path.read_text(errors="replace")

    def processes(self) -> dict[int, dict[str, str]]:
        """Return the environments of all running processes of this launch, by process id."""
        return marked("TEST_MARK", self._mark)

    def worker(self, rank: int) -> int | None:
        """Return the process id of a rank, or None if it is not running."""
        pids = (pid for pid, env in self.processes().items() if env.get("RANK") == str(rank))
        return next(pids, None)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the torchrun process."""
        self._process.send_signal(number)

    def wait(self, limit_s: float = 90.0) -> int:
        """Wait until torchrun and its workers have ended; return torchrun's exit code."""
        wait_until(lambda: self._process.poll() is not None, limit_s, "torchrun ended")
        wait_until(lambda: not self.processes(), 5, "its workers were gone")
        return self._process.returncode

    def kill(self) -> None:
        """Kill all processes of the launch."""
        for pid in [self._process.pid, *self.processes()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()


@pytest.fixture
def torchrun(environ: dict[str, str], tmp_path: Path) -> Iterator[Callable[..., Torchrun]]:
    """Return a function that starts torchrun; its processes are killed after the test."""
    launches: list[Torchrun] = []

    def launch(
        flags: Sequence[str],
        *overrides: str,
        env: Mapping[str, str] | None = None,
        module: str = "gpipe_hpc.train",
    ) -> Torchrun:
        arguments = [*flags, "-m", module, *overrides]
        launches.append(Torchrun(arguments, environ | dict(env or {}), tmp_path))
        return launches[-1]

    yield launch
    for each in launches:
        each.kill()


class Ended(NamedTuple):
    """Exit code of an mpiexec that has ended, and the output of all ranks."""

    code: int
    output: str


Mpiexec = Callable[..., Ended]


@pytest.fixture(scope="session")
def mpiexec(repository: Path) -> Iterator[Mpiexec]:
    """Return a function that runs Python on several ranks of the MPI in the test environment."""
    launcher = Path(sys.executable).with_name("mpiexec")
    assert launcher.exists(), "no mpiexec: pip install mpich, as requirements.lock says"
    unwanted = ("RANK", "WORLD_", "LOCAL_", "MASTER_", "TORCHELASTIC_", "PMI_", "MPI_", "SLURM_")
    environ = {k: v for k, v in os.environ.items() if not k.startswith(unwanted)}
    # The repository comes first, so that its package is imported.
    environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(repository), "PYTHONWARNINGS": "ignore"}

    def run(size: int, *arguments: object, folder: Path | None = None) -> Ended:
        words = [str(launcher), "-n", str(size), sys.executable, *map(str, arguments)]
        done = subprocess.run(
            words,
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=250,  # seconds; four ranks took over two minutes on a busy machine
            check=False,
        )
        return Ended(done.returncode, done.stdout.decode(errors="replace"))

    yield run


def run_processes(size, body, folder, timeout_s=60.0):
    """Run `body(rank)` in `size` forked processes with a Gloo process group; return the results."""
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()

    def target(rank):
        torch.set_num_threads(1)
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{folder}/rendezvous",
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=timeout_s),
            )
            answer = (rank, True, body(rank))
        except BaseException:
            answer = (rank, False, traceback.format_exc())
        queue.put(pickle.dumps(answer))

    workers = [context.Process(target=target, args=(rank,), daemon=True) for rank in range(size)]
    for worker in workers:
        worker.start()
    answers = sorted(pickle.loads(queue.get()) for _ in workers)
    for worker in workers:
        worker.join(timeout_s)
    failures = [text for _, is_good, text in answers if not is_good]
    assert not failures, "\n".join(failures)
    assert [worker.exitcode for worker in workers] == [0] * size
    return [value for _, _, value in answers]


@pytest.fixture(scope="session")
def processes():
    """Return `run_processes(size, body, folder)`."""
    return run_processes


@pytest.fixture(scope="session")
def tiny() -> tuple[str, ...]:
    """Return settings of a model that trains in less than a second."""
    return (
        "model.num_layers=1",
        "model.width=16",
        "data=synthetic",
        "data.seq_len=16",
        "train.batch_size=8",
        "train.validate_every=0",
        "pipeline.microbatches=2",
        "pipeline.partition=parameters",
        "checkpoint.every=0",
    )


@pytest.fixture(scope="session")
def stored_tensors() -> Callable[[Path], dict[str, torch.Tensor]]:
    """Return a function that reads all tensors of a checkpoint without using gpipe_hpc."""

    def read(path: Path) -> dict[str, torch.Tensor]:
        reader = FileSystemReader(path)
        entries = reader.read_metadata().state_dict_metadata
        tensors = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in entries.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            state_dict_loader.load(tensors, storage_reader=reader, no_dist=True)
        return tensors

    return read


@pytest.fixture(scope="session")
def same_end(stored_tensors: Callable[[Path], dict[str, torch.Tensor]]) -> Callable[..., None]:
    """Return a function that asserts that two runs have bitwise equal losses and final states."""

    def compare(one: Path, other: Path) -> None:
        assert losses(one) == losses(other)
        ends = [max((run / "checkpoints").glob("step_*")) for run in (one, other)]
        assert ends[0].name == ends[1].name
        states = [stored_tensors(path) for path in ends]
        assert states[0].keys() == states[1].keys() and len(states[0]) > 5
        for name, tensor in states[0].items():
            assert torch.equal(tensor, states[1][name]), name

    return compare


def losses(run: Path) -> list[tuple[int, float]]:
    """Return (step, loss) of each line of metrics.jsonl that has a loss."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]
