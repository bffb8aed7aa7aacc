"""Each wait for what is under way is there for something: without it something here goes wrong.

As in test_needed.py, nobody lists the waits: one that nothing here misses fails this test. Found is
one whose loss the tracker refuses, or ends the program, or changes a bit of a training.
"""

import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from types import SimpleNamespace

import pytest

from gpipe_hpc.comm.collectives.collective_queue import CollectiveQueue
from gpipe_hpc.comm.collectives.works import TorchWorks
from gpipe_hpc.comm.world.mpi.works import QueuedWork
from tests.comm.world.mpi.test_progress import Requests, started
from tests.simulated.programs import DRIVES
from tests.simulated.removed_waits import Wait, waits, without
from tests.simulated.scenarios import ALL, on_cpu, played
from tests.simulated.single import single_device
from tests.simulated.test_transport import on_played

_BROKEN = "nothing of it is used: it ends what hangs"
# What is not missed here, and why it is there all the same.
ARGUED = {
    "checkpoint/background.py BackgroundSaver.finish job": "a process of the host",
    "checkpoint/background.py BackgroundSaver.give_up job": "a process of the host",
    "checkpoint/dcp.py read_tensors reader.read_data(planner.create_local_plan(), planner)": (
        "torch has read all when it gives its future back; others may not have"
    ),
    "engine/step_reduction.py StepReduction._exchange flags_pending": (
        "under local SGD the ranks of a replica combine flags; no training here raises one of "
        "them on a single rank"
    ),
    "engine/executor.py Executor._gather shards": (
        "layers wait for their own: here all begin when all is there, as outer.overlap=false says"
    ),
    "data_parallel/sharding.py _finish each": (
        "a process that ends would take its shards along; threads leave theirs in memory of all"
    ),
    "comm/world/processes.py ProcessWorld.break_groups work": _BROKEN,
    "comm/collectives/pairs.py PairConnections.break_off "
    "group.recv([torch.empty(1)], other, tag)": _BROKEN,
}
# There are no wide groups here: tests that have such among threads are there, and nobody takes the
# waits out.
ELSEWHERE = {
    "data_parallel/compression.py JobQueue.finish_on_thread": (
        "tests/data_parallel/test_wide_copies.py"
    ),
}
# The trainings that miss one, the cheapest first.
NEAR = {
    "comm/world/mpi/": ["mpi blocks", "mpi sums"],
    "comm/collectives/at_once.py": ["qsgd"],
    "comm/world/threads.py": ["sums", "flat shards"],
    "comm/transport/outbox.py": ["staged blocks", "direct blocks"],
    "comm/transport/payload.py": ["staged uneven"],
    "engine/stage_runner.py": ["one rank", "nests offloaded"],
    "data_parallel/buckets.py": ["sums", "flat shards", "shards that are read"],
    "data_parallel/compress": ["powersgd"],
    "data_parallel/reducer.py": ["float16 of replicas", "flat shards", "shards that are read"],
    "data_parallel/": ["shards that are read", "flat shards"],
    "engine/local_sgd.py": ["apart"],
    "engine/steps.py": ["tied in float16", "float16 of replicas"],
    "engine/step_reduction.py": ["apart"],
    "engine/gradient_norms.py": ["sums"],
    "engine/batchnorm_statistics.py": ["normed over replicas"],
    "engine/assembly.py": ["tied in float16"],
    "pipeline.py": ["shards that are read"],
}


def of_message() -> None:
    """MPI says late that a message is done."""
    mpi = Requests()
    message = started(mpi.progress(), mpi)
    threading.Timer(0.05, mpi.done.update, [{0: 4}]).start()
    message.wait(20.0)
    assert message.is_done


def of_turn() -> None:
    """A job on the host takes long."""
    begins = threading.Event()
    threading.Timer(0.05, begins.set).start()
    turn = CollectiveQueue("waits").start(lambda _: begins.wait(20.0) and None)
    QueuedWork(turn, []).wait()
    assert turn.is_done


def of_future() -> None:
    """A job fails: who has its future is told."""

    def fail(_: object) -> None:
        raise RuntimeError("a peer is gone")

    future = QueuedWork(CollectiveQueue("waits").start(fail), []).get_future()
    with pytest.raises(RuntimeError, match="a peer is gone"):
        future.wait()


# Played MPI is done with a host sum at once, and has no library to wait for: here one stands in.
PLAYED = {
    "comm/world/mpi/progress.py MpiMessage.wait self._progress": of_message,
    "comm/world/mpi/works.py QueuedWork.wait self._turn": of_turn,
    "comm/world/mpi/works.py QueuedWork._finish self._turn": of_future,
}
WAITS = list(waits())
NAMED = {scenario.name: scenario for scenario in ALL}


def near(wait: Wait) -> list[str]:
    """Return the trainings that may miss a wait."""
    return next((names for start, names in NEAR.items() if wait.file.startswith(start)), [])


@cache
def expected(name: str) -> list:
    return on_cpu(NAMED[name])


def goes_wrong_in_a_drive(wait: Wait) -> bool:
    try:
        with without(wait), single_device() as device:
            DRIVES[wait.file](device)
    except Exception:
        return True
    return bool(device.tracker.faults)


def goes_wrong_between_two(wait: Wait, has_backend: bool) -> bool:
    try:
        with without(wait):
            sums, faults, _ = on_played(has_backend=has_backend)
    except Exception:
        return True
    return sums is None or bool(faults)


def goes_wrong_in_training(wait: Wait, name: str) -> bool:
    try:
        with without(wait):
            found = played(NAMED[name]).results
    except Exception:
        return True
    pairs = zip(found, expected(name), strict=True)
    return any(own.unlike(cpu) for own, cpu in pairs)


def goes_wrong(program: Callable[[], None]) -> bool:
    try:
        program()
    except (AssertionError, pytest.fail.Exception):
        return True
    return False


def goes_wrong_with_a_stand_in(wait: Wait) -> bool:
    with without(wait):
        return goes_wrong(PLAYED[wait.name])


def is_missed(wait: Wait) -> bool:
    return (
        (wait.name in PLAYED and goes_wrong_with_a_stand_in(wait))
        or (wait.file in DRIVES and goes_wrong_in_a_drive(wait))
        or (
            wait.file.startswith("comm/transport/")
            and any(goes_wrong_between_two(wait, has) for has in (False, True))
        )
        or any(goes_wrong_in_training(wait, name) for name in near(wait))
    )


def is_elsewhere(wait: Wait) -> bool:
    return wait.name.startswith(tuple(ELSEWHERE))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "wait",
    [
        pytest.param(wait, id=str(wait))
        for wait in WAITS
        if wait.name not in ARGUED and not is_elsewhere(wait)
    ],
)
def test_each_is_missed_where_it_is_left_out(wait):
    assert is_missed(wait)


@pytest.mark.parametrize("program", PLAYED.values(), ids=lambda program: program.__name__)
def test_with_its_wait_all_is_well(program):
    assert not goes_wrong(program)


def test_what_is_argued_is_there(repository):
    """No argument outlives its wait, and no file stands for what is not there."""
    assert {*ARGUED, *PLAYED} <= {wait.name for wait in WAITS}
    for start, tests in ELSEWHERE.items():
        assert any(wait.name.startswith(start) for wait in WAITS)
        assert (repository / tests).exists()


def test_waits_are_found():
    found = {wait.name for wait in WAITS}
    assert "data_parallel/buckets.py Bucket.wait self._pending" in found
    assert "comm/collectives/works.py TorchWorks.wait work" in found
    assert len(found) > 60


def test_a_wait_that_is_left_out_is_that_of_its_line_alone_and_comes_back():
    (own,) = (
        wait for wait in WAITS if wait.name == "comm/collectives/works.py TorchWorks.wait work"
    )
    for has_it in (True, False, True):
        heard = []
        work = SimpleNamespace(wait=lambda heard=heard: heard.append("waited"))
        works = TorchWorks([((0,), work)], heard.append)
        with nullcontext() if has_it else without(own):
            works.wait()
        assert heard == ([(0,), "waited", None] if has_it else [(0,), None])
