"""Short programs, each of which exercises one class of the package that orders streams."""

import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gpipe_hpc import run_on_threads
from gpipe_hpc.checkpoint.host_copy import HostBuffer
from gpipe_hpc.checkpoint.parts import _forward
from gpipe_hpc.comm.collectives.group import CollectiveHandle, PeerTensor
from gpipe_hpc.comm.collectives.on_stream import StreamPlanExecutor
from gpipe_hpc.comm.collectives.packed import broadcast_packed
from gpipe_hpc.comm.collectives.plan import PlanPosition
from gpipe_hpc.comm.collectives.plan_executor import PlanExecutor
from gpipe_hpc.comm.collectives.ring import ring_all_reduce
from gpipe_hpc.comm.collectives.sparse_group import SparseGroup
from gpipe_hpc.comm.collectives.summing import BackendReductions
from gpipe_hpc.comm.collectives.thread_plans import StreamEnqueuer
from gpipe_hpc.comm.collectives.torch_adapter import _PendingWork
from gpipe_hpc.comm.collectives.tree_group import TreeGroup
from gpipe_hpc.comm.collectives.two_sided import TwoSidedGroup
from gpipe_hpc.comm.transport.thread_hub import ThreadHub
from gpipe_hpc.comm.watchdog.heartbeat import run_here_with_heartbeat, run_with_heartbeat
from gpipe_hpc.comm.watchdog.wait_listener import ignore_wait
from gpipe_hpc.comm.world.processes import ProcessWorld
from gpipe_hpc.comm.world.threads import ThreadGroup
from gpipe_hpc.data_parallel import ShardSpan
from gpipe_hpc.data_parallel.compression import JobQueue
from gpipe_hpc.device.deferred import AsyncHostTensor, record_mark, seconds_between
from gpipe_hpc.device.device import HostDevice
from gpipe_hpc.engine.inputs import Intake
from gpipe_hpc.engine.offload import HostCopy, PinnedBufferPool
from gpipe_hpc.engine.recorder import DeviceClock
from gpipe_hpc.preflight.connections import GroupConnection
from tests.simulated.backend import RANKS, OnHost, group_over
from tests.simulated.device import SimulatedDevice

Drive = Callable[[SimulatedDevice], object]


def made(device: SimulatedDevice, size: int = 6) -> Tensor:
    return torch.ones(size, device=device.torch).mul_(2)


def _echo(
    traffic: object,
    sends: Sequence[tuple[int, Tensor]],
    receives: Sequence[tuple[int, Tensor]],
    note: object,
) -> None:
    """Exchange with a rank that has the same tensors."""
    for (_, out), (_, into) in zip(sends, receives, strict=True):
        into.copy_(out if len(out) == len(into) else out[:1])


def plans(device: SimulatedDevice) -> None:
    """A plan whose result is used, and one whose tensor is freed before the wait."""
    carrier = StreamPlanExecutor((0, 1), 0, _echo, lambda tensor: None, device)
    for is_used in (True, False):
        tensor = made(device)
        pending = carrier.start(ring_all_reduce(PlanPosition(2, 0), 6), tensor, "a sum")
        if is_used:
            pending.wait()
            assert tensor.tolist() == [4.0] * 6
        del tensor
        made(device)


def jobs(device: SimulatedDevice) -> None:
    """Jobs on their own stream whose tensors are used or freed."""
    queue = JobQueue("jobs", device)
    for is_used in (True, False):
        tensor = made(device)
        pending = queue.start(lambda own=tensor: own.add_(1), [tensor])
        if is_used:
            pending.wait()
            assert tensor.tolist() == [3.0] * 6
        del tensor, pending
        made(device)


def intake(device: SimulatedDevice) -> None:
    """Batches that are loaded, used and freed."""
    brings = Intake(device)
    for number in range(3):
        batch = torch.full((6,), float(number))
        own = brings.to_device((batch, batch.long()))
        batch.fill_(-1.0)
        total = own[0] + own[1]
        del own
        brings.to_device((batch,))
        assert total.tolist() == [2.0 * number] * 6


def fetched(device: SimulatedDevice) -> None:
    assert AsyncHostTensor.of(made(device), device).read().tolist() == [2.0] * 6
    values = AsyncHostTensor.of(made(device), device)
    assert not values.event or not values.event.query()
    assert values.part(slice(2)).read().tolist() == [2.0] * 2
    polled = AsyncHostTensor.of(made(device), device)
    for _ in range(2):  # at first they may not have come
        values_there = polled.poll()
        assert values_there is None or values_there.tolist() == [2.0] * 6


def deferred(device: SimulatedDevice) -> None:
    fetched(device)
    first = record_mark(device)
    made(device)
    last = record_mark(device)
    assert seconds_between(first, last) > 0


def clock(device: SimulatedDevice) -> None:
    moments = DeviceClock(device)
    for _ in range(4):  # steps of which nobody reads anything
        moments.begin()
        made(device)


def sends(device: SimulatedDevice) -> None:
    """Sent tensors that are freed immediately, without a wait, or written again."""
    hub = ThreadHub(2)
    first, second = (ThreadGroup(hub, (0, 1), rank, 0, device) for rank in range(2))
    for _ in range(2):
        first.start_exchange([PeerTensor(1, made(device))], [])
        made(device)
    for _ in range(3):
        out, into = made(device), made(device)
        first.start_exchange([PeerTensor(1, out)], []).wait()
        out.zero_()
        second.start_exchange([], [PeerTensor(0, into)]).wait()
        assert into.add_(1).tolist() == [3.0] * 6


def late(
    traffic: object,
    sends: Sequence[tuple[int, Tensor]],
    receives: Sequence[tuple[int, Tensor]],
    note: object,
) -> None:
    """Slow exchange with a rank that has the same tensors."""
    time.sleep(0.02)
    _echo(traffic, sends, receives, note)


def host_plans(device: SimulatedDevice) -> None:
    """A plan over host memory that another thread executes."""
    tensor = torch.full((6,), 2.0)
    carrier = PlanExecutor((0, 1), 0, late, ignore_wait)
    carrier.start(ring_all_reduce(PlanPosition(2, 0), 6), tensor, "a sum").wait()
    assert tensor.tolist() == [4.0] * 6


def put_by_thread(device: SimulatedDevice) -> None:
    """A plan that another thread launches on its stream, with a delay."""
    tensor = made(device)
    carrier = StreamPlanExecutor((0, 1), 0, _echo, lambda tensor: None, device)

    def begin() -> CollectiveHandle:
        time.sleep(0.02)
        return carrier.start(ring_all_reduce(PlanPosition(2, 0), 6), tensor, "a sum")

    StreamEnqueuer("plans", device).start(begin).wait()
    assert tensor.add_(1).tolist() == [5.0] * 6


def host_jobs(device: SimulatedDevice) -> None:
    """A job over host memory that another thread runs."""
    tensor = torch.full((6,), 2.0)

    def job() -> None:
        time.sleep(0.02)
        tensor.add_(1)

    JobQueue("jobs", HostDevice()).start(job, [tensor]).wait()
    assert tensor.tolist() == [3.0] * 6


def gathered(device: SimulatedDevice) -> None:
    """Results of thread-group collectives, used as soon as the calls return."""

    def body(world: Any) -> None:
        group = world.world_group
        tensor = made(device)
        group.all_reduce_max(tensor.mul_(world.rank + 1))
        assert tensor.add_(1).tolist() == [5.0] * 6
        levels = TreeGroup((0, 1), world.rank, [group], width=2)
        tensor = made(device)
        levels.start_all_reduce(tensor).wait()
        assert tensor.add_(1).tolist() == [5.0] * 6
        # Of its own memory, or side by side with others.
        for parts in ([made(device)], [made(device), made(device, 3)]):
            for tensor in parts:
                tensor.mul_(world.rank + 1)
            broadcast_packed(group, parts, 1)
            assert all(set(tensor.add_(1).tolist()) == {5.0} for tensor in parts)

    run_on_threads(2, body, device=lambda rank: device)


def wide(device: SimulatedDevice) -> None:
    """Collectives of three ranks over slow connections through other ranks."""

    def body(world: Any) -> None:
        mesh = world.group([(0, 1, 2)])

        def start(traffic: Any, out: Any, into: Any, note: object) -> Any:
            time.sleep(0.01)
            return mesh._start(traffic, out, into)

        group = SparseGroup(mesh.ranks, world.rank, start, lambda peers: None, ignore_wait)
        tensor = torch.full((6,), float(world.rank + 1))
        group.all_reduce(tensor)
        assert tensor.tolist() == [6.0] * 6
        tensor.fill_(world.rank)
        group.all_reduce_max(tensor)
        assert tensor.tolist() == [2.0] * 6
        tensor.fill_(world.rank)
        group.broadcast(tensor, 1)
        assert tensor.tolist() == [1.0] * 6
        group.all_gather(tensor.fill_(world.rank), [2, 2, 2])
        assert tensor.tolist() == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
        before, behind = (world.rank - 1) % 3, (world.rank + 1) % 3
        own, came = torch.tensor([world.rank]), torch.tensor([-1])
        group.greet([PeerTensor(behind, own)], [PeerTensor(before, came)])
        assert came.item() == before
        assert group.all_gather_object({"rank": world.rank}) == [{"rank": r} for r in range(3)]
        dealt = ["a", "bb", "ccc"] if world.rank == 0 else None
        assert group.scatter_object(dealt, 0) == ["a", "bb", "ccc"][world.rank]

    run_on_threads(3, body)


def threads_and_sends(device: SimulatedDevice) -> None:
    sends(device)
    gathered(device)


def all_jobs(device: SimulatedDevice) -> None:
    jobs(device)
    host_jobs(device)


def offloads(device: SimulatedDevice) -> None:
    """Offloaded and fetched micro-batches, and steps that fail while copies are running."""
    room = PinnedBufferPool(device)

    def kept() -> HostCopy:
        copy = HostCopy([], device, room)
        with copy.collecting():
            leaf = made(device).requires_grad_()
            # What autograd saves is the copy's alone.
            graphs.append(leaf.exp().exp().sum())
        return copy

    graphs: list[Tensor] = []
    for fails in (False, True, False):
        first, second = kept(), kept()
        for copy in (first, second):
            room.before_compute()
            copy.offload()
        for copy in (second, first):
            room.before_compute()
            made(device, 12)
            copy.fetch()
            if not fails:
                copy.wait()
                graphs.pop().backward()
        graphs.clear()
        del first, second, copy
        room.end()
        made(device, 12)
    for fails in (False, True):
        back_at_once = kept()
        back_at_once.offload()
        back_at_once.fetch()
        if not fails:
            back_at_once.wait()
            graphs.pop().backward()
        graphs.clear()
        del back_at_once
        room.end()
        made(device, 6)
    full = kept()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(MemoryError):
        own = room.take

        def take(num_bytes: int) -> Tensor:
            patch.setattr(room, "take", refuse)
            return own(num_bytes)

        def refuse(num_bytes: int) -> Tensor:
            raise MemoryError

        patch.setattr(room, "take", take)
        full.offload()
    graphs.clear()
    del full
    room.end()
    made(device, 6)


def copies(device: SimulatedDevice) -> None:
    """Host copies of a background checkpoint, and its writing."""
    tensors = {"own": made(device), "host": torch.ones(3)}
    assert HostBuffer(device).copy(tensors)["own"].tolist() == [2.0] * 6


def threads(device: SimulatedDevice) -> None:
    """Ranks as threads, and their helper threads."""

    def body(world: Any) -> float:
        made(device)
        with device.playing():
            found = run_with_heartbeat(world, "work", lambda: made(device).sum())
            run_here_with_heartbeat(world, "work", lambda: None)
        assert found is not None
        return float(found)

    assert run_on_threads(2, body, device=lambda rank: device) == [12.0] * 2


def refusals(device: SimulatedDevice) -> None:
    """A backend that accepts each reduction but reports it as unsupported when it runs."""

    def all_reduce(tensor: Tensor, group: object) -> None:
        if tensor.dtype is torch.float64:
            device.refuse_later(RuntimeError("no sum of float64"))

    group: Any = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", all_reduce)
        patch.setattr(dist, "get_rank", lambda: 0)
        goes = BackendReductions(group, (0, 1), device, lambda _: None).goes
        found = [goes(dtype) for dtype in (torch.float64, torch.float32, torch.float64)]
    assert made(device).tolist() == [2.0] * 6
    assert found == [False, True, False]


def torchs(device: SimulatedDevice) -> None:
    """Collectives of torch over the device's backend, used as soon as they return."""
    with group_over(device, knows_device=True) as (group, _):
        tensor = made(device)
        group.all_reduce(tensor)
        assert tensor.add_(1).tolist() == [5.0] * 6
        tensor = made(device)
        group.all_reduce_max(tensor)
        assert tensor.add_(1).tolist() == [3.0] * 6
        tensor = made(device).to(torch.int32)
        group.broadcast(tensor, 0)
        assert tensor.mul_(0).tolist() == [0] * 6
        tensor = made(device)
        group.start_plan(ring_all_reduce(PlanPosition(2, 0), 6), tensor, "a sum").wait()
        assert tensor.tolist() == [4.0] * 6
        group.start_exchange([PeerTensor(1, made(device))], [PeerTensor(1, tensor)]).wait()
        assert tensor.add_(1).tolist() == [3.0] * 6


def torchs_by_host(device: SimulatedDevice) -> None:
    """Collectives of torch over a backend for host memory only."""
    with group_over(device, knows_device=False) as (group, backend):
        tensor = made(device)
        group.all_reduce(tensor)
        assert tensor.add_(1).tolist() == [5.0] * 6
        host = torch.ones(3)
        for _ in range(2):
            group.all_reduce(host)
            group.all_reduce_max(host)
            group.broadcast(host, 0)
        assert host.tolist() == [7.0] * 3  # doubled, and one more as it comes, and again
        assert group.scatter_object([{"a": 1}, {"b": 2}], 0) == {"a": 1}
        (dealt,) = backend.mail
        backend.told.append(torch.tensor([len(dealt), 0]))
        assert group.scatter_object(None, 1) == {"b": 2}
        assert all(work.is_over for work in backend.works)


def on_two_sides(device: SimulatedDevice) -> None:
    """Objects through the host, tensors over the device's backend."""
    with group_over(device, knows_device=True) as (group, _):
        both = TwoSidedGroup(group, group, device)
        first, second = both.all_to_all(made(device), [4, 2])
        assert first.add_(1).tolist() == second.add_(1).tolist() == [3.0] * 4
        del first, second
        _, came = both.all_to_all(made(device), [4, 2])
        came.add_(1)
        del came  # its memory was of the job's stream, which the next caller's comes ahead of
        with device.on(device.stream()):
            both.all_to_all(made(device), [4, 2])
        tensor = made(device)
        both.all_gather(tensor, [4, 2])
        assert tensor.add_(1).tolist() == [3.0] * 6


def handed_on(device: SimulatedDevice) -> None:
    """Shards of a state sent to the rank that writes them."""
    side = [ShardSpan(rank, 2 * rank, 2 * rank + 2) for rank in RANKS]
    with group_over(device, knows_device=True) as (group, backend):
        _forward(group, side, 1, torch.full((2,), 7.0), 2)
        row = torch.zeros(4)
        _forward(group, side, 0, row)
        assert row.tolist() == [0.0, 0.0, 7.0, 7.0] and not backend.mail


def lines(device: SimulatedDevice) -> None:
    """Messages that are timed."""
    with group_over(device, knows_device=True) as (group, _):
        line = GroupConnection(group, 1, HostDevice())
        line.send(torch.full((2,), 7.0))
        assert line.expect(2, torch.float32)().tolist() == [7.0] * 2


def first_byte(device: SimulatedDevice) -> None:
    """The byte that opens a queue between two ranks, whose memory is reused afterwards."""
    with group_over(device, knows_device=True) as (_, backend):
        for rank in RANKS:
            world: Any = SimpleNamespace(
                rank=rank, _own_backend="played", _form=lambda ranks, name: backend
            )
            own: Any = device
            ProcessWorld._open_queue(world, RANKS, own)
            device.empty((1,), torch.uint8).add_(1)
        assert not backend.mail


def faces(device: SimulatedDevice) -> None:
    """Waits of torch for one of gpipe_hpc's groups."""
    work = OnHost(lambda: None)
    pending: Any = work
    _PendingWork(pending).wait()
    assert work.is_over


def both_of_torchs(device: SimulatedDevice) -> None:
    torchs(device)
    torchs_by_host(device)


DRIVES: dict[str, Drive] = {
    "comm/collectives/on_stream.py": plans,
    "data_parallel/compression.py": all_jobs,
    "engine/run.py": intake,
    "engine/offload.py": offloads,
    "device/deferred.py": deferred,
    "checkpoint/host_copy.py": copies,
    "comm/world/threads.py": threads_and_sends,
    "comm/collectives/tree_group.py": gathered,
    "comm/collectives/packed.py": gathered,
    "comm/world/processes.py": first_byte,
    "comm/collectives/plan_executor.py": host_plans,
    "comm/collectives/sparse_group.py": wide,
    "comm/watchdog/heartbeat.py": threads,
    "comm/collectives/summing.py": refusals,
    "checkpoint/parts.py": handed_on,
    "preflight/connections.py": lines,
    "comm/collectives/thread_plans.py": put_by_thread,
    "comm/collectives/torch_adapter.py": faces,
    "comm/collectives/two_sided.py": on_two_sides,
    "comm/collectives/torch_group.py": both_of_torchs,
    "comm/collectives/works.py": both_of_torchs,
    "engine/recorder.py": clock,
}
