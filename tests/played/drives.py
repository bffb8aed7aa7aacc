"""Programs of a few lines, each around one class of the package that orders streams."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gpipe_hpc import run_on_threads
from gpipe_hpc.checkpoint.host_copy import HostBuffer
from gpipe_hpc.comm.collectives.on_stream import StreamCarrier
from gpipe_hpc.comm.collectives.plan import Place
from gpipe_hpc.comm.collectives.ring import ring_all_reduce
from gpipe_hpc.comm.failing.patience import patiently, patiently_here
from gpipe_hpc.comm.group import Piece
from gpipe_hpc.comm.summing import OwnSums
from gpipe_hpc.comm.thread_hub import ThreadHub
from gpipe_hpc.comm.threads import ThreadGroup
from gpipe_hpc.engine.batch.intake import Intake
from gpipe_hpc.engine.device_clock import DeviceClock
from gpipe_hpc.engine.outer.compress.beside import BesideOnStream
from gpipe_hpc.engine.recorder import seconds_between, take_mark
from gpipe_hpc.engine.sums.fetched import Fetched
from tests.played.device import PlayedDevice

Drive = Callable[[PlayedDevice], object]


def made(device: PlayedDevice, size: int = 6) -> Tensor:
    return torch.ones(size, device=device.torch).mul_(2)


def _echo(
    traffic: object,
    sends: Sequence[tuple[int, Tensor]],
    receives: Sequence[tuple[int, Tensor]],
    note: object,
) -> None:
    """Exchange with a rank that has the same."""
    for (_, out), (_, into) in zip(sends, receives, strict=True):
        into.copy_(out if len(out) == len(into) else out[:1])


def plans(device: PlayedDevice) -> None:
    """A plan whose result is used, and one whose tensor is let go of before it was waited for."""
    carrier = StreamCarrier((0, 1), 0, _echo, lambda tensor: None, device)
    for is_used in (True, False):
        tensor = made(device)
        pending = carrier.start(ring_all_reduce(Place(2, 0), 6), tensor, "a sum")
        if is_used:
            pending.wait()
            assert tensor.tolist() == [4.0] * 6
        del tensor
        made(device)


def jobs(device: PlayedDevice) -> None:
    """Jobs on a stream of their own, which are used, or whose tensors are let go of."""
    beside = BesideOnStream(device)
    for is_used in (True, False):
        tensor = made(device)
        pending = beside.start(lambda own=tensor: own.add_(1), [tensor])
        if is_used:
            pending.wait()
            assert tensor.tolist() == [3.0] * 6
        del tensor, pending
        made(device)


def intake(device: PlayedDevice) -> None:
    """Batches that come, are used and let go of."""
    brings = Intake(device)
    for number in range(3):
        batch = torch.full((6,), float(number))
        own = brings.bring((batch, batch.long()))
        batch.fill_(-1.0)
        total = own[0] + own[1]
        del own
        brings.bring((batch,))
        assert total.tolist() == [2.0 * number] * 6


def fetched(device: PlayedDevice) -> None:
    assert Fetched.of(made(device), device).read().tolist() == [2.0] * 6
    values = Fetched.of(made(device), device)
    assert not values.event or not values.event.query()
    assert values.part(slice(2)).read().tolist() == [2.0] * 2


def clock(device: PlayedDevice) -> None:
    first = take_mark(device)
    made(device)
    last = take_mark(device)
    assert seconds_between(first, last) > 0
    moments = DeviceClock(device)
    for _ in range(4):  # steps of which nobody reads anything
        moments.begin()
        made(device)


def sends(device: PlayedDevice) -> None:
    """What is sent may be let go of at once, if nobody waits for it, or be written to again."""
    hub = ThreadHub(2)
    first, second = (ThreadGroup(hub, (0, 1), rank, 0, device) for rank in range(2))
    for _ in range(2):
        first.start_exchange([Piece(1, made(device))], [])
        made(device)
    for _ in range(3):
        out, into = made(device), made(device)
        first.start_exchange([Piece(1, out)], []).wait()
        out.zero_()
        second.start_exchange([], [Piece(0, into)]).wait()
        assert into.add_(1).tolist() == [3.0] * 6


def copies(device: PlayedDevice) -> None:
    """What a checkpoint in the background copies to the host, and writes."""
    tensors = {"own": made(device), "host": torch.ones(3)}
    assert HostBuffer(device).copy(tensors)["own"].tolist() == [2.0] * 6


def threads(device: PlayedDevice) -> None:
    """Ranks that are threads, and what works or meets for them on threads of their own."""

    def body(world: Any) -> float:
        made(device)
        with device.playing():
            found = patiently(world, "work", lambda: made(device).sum())
            patiently_here(world, "work", lambda: None)
        assert found is not None
        return float(found)

    assert run_on_threads(2, body, device=lambda rank: device) == [12.0] * 2


def refusals(device: PlayedDevice) -> None:
    """A backend that takes each sum, and says that it lacks one when the device comes to it."""

    def all_reduce(tensor: Tensor, group: object) -> None:
        if tensor.dtype is torch.float64:
            device.refuse_later(RuntimeError("no sum of float64"))

    group: Any = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", all_reduce)
        patch.setattr(dist, "get_rank", lambda: 0)
        goes = OwnSums(group, (0, 1), device, lambda _: None).goes
        found = [goes(dtype) for dtype in (torch.float64, torch.float32, torch.float64)]
    assert made(device).tolist() == [2.0] * 6
    assert found == [False, True, False]


DRIVES: dict[str, Drive] = {
    "comm/collectives/on_stream.py": plans,
    "engine/outer/compress/beside.py": jobs,
    "engine/batch/intake.py": intake,
    "engine/sums/fetched.py": fetched,
    "checkpoint/host_copy.py": copies,
    "comm/threads.py": sends,
    "comm/failing/patience.py": threads,
    "comm/summing.py": refusals,
    "engine/device_clock.py": clock,
    "engine/recorder.py": clock,
}
