"""Ranks as threads of one process with in-memory channels, for tests and debugging.

The engine is the same as with processes; only this module and the in-memory transport differ.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from operator import itemgetter
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from gpipe_hpc.comm.collectives.at_once import all_gather, all_to_all
from gpipe_hpc.comm.collectives.group import (
    CollectiveHandle,
    CompletionCallbacks,
    ControlGroup,
    Group,
    PeerTensor,
    SoloGroup,
    TrafficCounter,
    rank_names,
)
from gpipe_hpc.comm.collectives.plan import Plan
from gpipe_hpc.comm.collectives.plan_executor import Parts, PlanExecutor, TrafficKind
from gpipe_hpc.comm.collectives.planned import (
    start_all_gather,
    start_ordered_all_reduce,
    start_ordered_reduce_scatter,
    start_reduce_scatter,
)
from gpipe_hpc.comm.collectives.thread_plans import ThreadPlanExecutor
from gpipe_hpc.comm.net.pickling import check_travels
from gpipe_hpc.comm.transport.base import PlacedChannel, Transport
from gpipe_hpc.comm.transport.device_handoff import DeviceHandoff, accept_handoff, hand_off
from gpipe_hpc.comm.transport.memory import MemoryTransport
from gpipe_hpc.comm.transport.thread_hub import ExchangeKey, MailKey, ThreadHub
from gpipe_hpc.comm.watchdog.report import FailureReport
from gpipe_hpc.comm.watchdog.tracebacks import strip_own_frames
from gpipe_hpc.comm.watchdog.wait_listener import WaitListener, ignore_wait
from gpipe_hpc.device.device import Device, HostDevice
from gpipe_hpc.errors import LaunchError, PeerError, is_users_mistake

T = TypeVar("T")


class _SideStream:
    """Side stream on which a group communicates, so that collectives overlap with compute.

    As with NCCL, a collective waits for the work queued on the current stream when it starts, and
    `wait` makes the current stream wait for the collective.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._stream = device.stream()

    def follow(self) -> None:
        """Make the side stream wait for the work queued on the current stream."""
        self._stream.wait_stream(self.device.current_stream())

    def join(self) -> None:
        """Make the current stream wait for the work queued on the side stream."""
        self.device.current_stream().wait_stream(self._stream)

    def leave(self, tensor: torch.Tensor) -> DeviceHandoff:
        """Copy a tensor on the side stream; return a handle by which other ranks read the copy."""
        self.follow()
        with self.device.on(self._stream):
            left = hand_off(self.device, [tensor.clone()])
        self._lend(tensor)
        return left

    def fill(self, tensor: torch.Tensor, of: Callable[[], torch.Tensor]) -> None:
        """Copy the tensor returned by `of` into `tensor`; the current stream waits for the copy."""
        with self.device.on(self._stream):
            tensor.copy_(of())
            done = self._stream.record_event()
        self._lend(tensor)
        self.device.current_stream().wait_event(done)

    def _lend(self, tensor: torch.Tensor) -> None:
        if self.device.holds(tensor):
            self.device.keep_for_stream(tensor, self._stream)


class _ThreadCollective:
    """A collective in progress: this rank's input is published, and `wait` computes the result."""

    def __init__(
        self,
        aside: _SideStream,
        collect: Callable[[], list[DeviceHandoff]],
        tensor: torch.Tensor,
        result: Callable[[list[torch.Tensor]], torch.Tensor],
    ) -> None:
        self._aside, self._collect, self._tensor, self._result = aside, collect, tensor, result
        self._calls = CompletionCallbacks()

    def when_done(self, call: Callable[[], None]) -> None:
        self._calls.add(call)

    def wait(self) -> None:
        found = self._collect()

        def result() -> torch.Tensor:
            return self._result(
                [part for x in found for part in accept_handoff(self._aside.device, x)]
            )

        self._aside.fill(self._tensor, result)
        self._calls.make()


def _in_rank_order(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


class _ThreadExchange:
    """An exchange in progress: sent tensors are published, and `wait` copies the received ones."""

    def __init__(
        self, hub: ThreadHub, receives: Sequence[tuple[MailKey, torch.Tensor]], aside: _SideStream
    ) -> None:
        self._hub, self._receives, self._aside = hub, receives, aside
        self._calls = CompletionCallbacks()

    def when_done(self, call: Callable[[], None]) -> None:
        self._calls.add(call)

    def wait(self) -> None:
        for key, tensor in self._receives:
            left = self._hub.take_mail(key)
            self._aside.fill(tensor, partial(self._came, key, tensor, left))
        # Also wait for the copies of sent tensors: the caller may overwrite these afterwards.
        self._aside.join()
        self._calls.make()

    def _came(self, key: MailKey, tensor: torch.Tensor, left: DeviceHandoff) -> torch.Tensor:
        (came,) = accept_handoff(self._aside.device, left)
        if (came.dtype, came.numel()) != (tensor.dtype, tensor.numel()):
            raise ConnectionError(
                f"exchange: expected {tensor.numel()} x {tensor.dtype} from rank {key.source}, "
                f"got {came.numel()} x {came.dtype}; both ranks must make the same calls"
            )
        return came.view(tensor.shape)


class ThreadGroup:
    """Collectives among threads; sums are computed in rank order."""

    def __init__(
        self, hub: ThreadHub, ranks: tuple[int, ...], rank: int, serial: int, device: Device
    ) -> None:
        self.ranks = ranks
        self.size = self.width = len(ranks)
        self.position = ranks.index(rank)
        self.sent = TrafficCounter()
        self.torch_group: dist.ProcessGroup | None = None
        self._hub, self._rank, self._serial = hub, rank, serial
        self._aside = _SideStream(device)
        self._name: ExchangeKey = (ranks, serial)
        self._num_mails: dict[tuple[TrafficKind, int, int], int] = defaultdict(int)
        self._carrier = (
            ThreadPlanExecutor(ranks, self.position, self._exchange, device)
            if device.is_accelerator
            else PlanExecutor(ranks, self.position, self._exchange, ignore_wait)
        )

    def _contribute(self, left: DeviceHandoff) -> Callable[[], list[DeviceHandoff]]:
        """Publish this rank's input; return a function that collects the inputs of all ranks."""
        self._serial += 1
        key = (self.ranks, self._serial)
        self._hub.contribute(key, self._rank, left)
        return lambda: self._hub.collect(key)

    def _collective(
        self, tensor: torch.Tensor, result: Callable[[list[torch.Tensor]], torch.Tensor]
    ) -> CollectiveHandle:
        collect = self._contribute(self._aside.leave(tensor))
        return _ThreadCollective(self._aside, collect, tensor, result)

    def start_all_reduce(self, tensor: torch.Tensor) -> CollectiveHandle:
        """Publish a copy of `tensor`; `wait` overwrites `tensor` with the sum over all ranks."""
        return self._collective(tensor, _in_rank_order)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum `tensor` in place."""
        self.start_all_reduce(tensor).wait()

    def all_reduce_hierarchical(self, tensor: torch.Tensor, between: Callable[[int], None]) -> None:
        """All-reduce `tensor` in place; there is only one level."""
        self.all_reduce(tensor)

    def all_reduce_max(self, tensor: torch.Tensor) -> None:
        """Replace each element by its maximum over all ranks."""
        self._collective(tensor, lambda parts: torch.stack(parts).amax(0)).wait()

    def start_broadcast(self, tensor: torch.Tensor, root: int) -> CollectiveHandle:
        """Publish a copy of `tensor`; `wait` overwrites `tensor` with the root's copy."""
        return self._collective(tensor, itemgetter(self.ranks.index(root)))

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Overwrite `tensor` with that of world rank `root`."""
        self.start_broadcast(tensor, root).wait()

    def start_exchange(
        self, sends: Sequence[PeerTensor], receives: Sequence[PeerTensor]
    ) -> CollectiveHandle:
        """Publish copies of the tensors to send; `wait` fills the tensors to receive."""
        return self._start(TrafficKind.CALLER, sends, receives)

    def start_plan(self, plan: Plan, tensor: torch.Tensor, what: str) -> CollectiveHandle:
        """Start a plan on the group's background thread."""
        return self._carrier.start(plan, tensor, what)

    def start_reduce_scatter(
        self, whole: torch.Tensor, counts: Sequence[int] | None = None
    ) -> CollectiveHandle:
        """Start a reduce-scatter along a ring."""
        return start_reduce_scatter(self, whole, counts)

    def start_ordered_all_reduce(self, tensor: torch.Tensor) -> CollectiveHandle:
        """Start summing `tensor` in place in rank order; each rank exchanges with every other."""
        return start_ordered_all_reduce(self, tensor)

    def start_ordered_reduce_scatter(self, whole: torch.Tensor) -> CollectiveHandle:
        """Start a reduce-scatter that adds each element in rank order."""
        return start_ordered_reduce_scatter(self, whole)

    def all_to_all(self, whole: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
        """Send its shard of `whole` to each rank and return the shards received from all ranks."""
        return all_to_all(self, whole, counts)

    def all_gather(self, whole: torch.Tensor, counts: Sequence[int]) -> None:
        """Fill `whole` with the shards of all ranks by direct exchange with every other rank."""
        all_gather(self, whole, counts)

    def start_all_gather(
        self, whole: torch.Tensor, counts: Sequence[int] | None = None
    ) -> CollectiveHandle:
        """Start an all-gather along a ring."""
        return start_all_gather(self, whole, counts)

    def _start(
        self, traffic: TrafficKind, sends: Sequence[PeerTensor], receives: Sequence[PeerTensor]
    ) -> CollectiveHandle:
        if traffic is not TrafficKind.GREETING:
            self.sent.count(sends)
        # Receives must wait for pending work of the caller's stream on the same memory.
        self._aside.follow()
        for piece in sends:
            key = self._mail(traffic, self._rank, piece.rank)
            self._hub.put_mail(key, self._aside.leave(piece.tensor))
        keys = [self._mail(traffic, piece.rank, self._rank) for piece in receives]
        awaited = zip(keys, (piece.tensor for piece in receives), strict=True)
        return _ThreadExchange(self._hub, list(awaited), self._aside)

    def _mail(self, traffic: TrafficKind, source: int, destination: int) -> MailKey:
        number = self._num_mails[traffic, source, destination]
        self._num_mails[traffic, source, destination] += 1
        return MailKey(self._name, traffic, source, destination, number)

    def _exchange(
        self, traffic: TrafficKind, sends: Parts, receives: Parts, note: WaitListener
    ) -> None:
        out, into = (
            [PeerTensor(self.ranks[i], t) for i, t in parts] for parts in (sends, receives)
        )
        self._start(traffic, out, into).wait()

    def merge_object(self, value: T, merge: Callable[[T, T], T]) -> T:
        """Gather the objects of all ranks and reduce them locally with `merge`."""
        merged: T = reduce(merge, self.all_gather_object(value))
        return merged

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the objects of all ranks, not copies; checks that processes could send them."""
        check_travels(value, f"a collective of {rank_names(self.ranks)}")
        # The value may contain device tensors.
        found = self._contribute(hand_off(self._aside.device, (), value))()
        for left in found:
            accept_handoff(self._aside.device, left)
        return [left.value for left in found]

    def gather_object(self, value: Any, root: int) -> list[Any] | None:
        """Return every rank's value on world rank `root`, None elsewhere."""
        values = self.all_gather_object(value)
        return values if self._rank == root else None

    def scatter_object(self, values: Sequence[Any] | None, root: int) -> Any:
        """Return this rank's entry of the values of world rank `root`: the object itself."""
        dealt: Sequence[Any] = self.broadcast_object(values, root)
        return dealt[self.position]

    def broadcast_object(self, value: Any, root: int) -> Any:
        """Return the value of world rank `root`: the object itself."""
        values = self.all_gather_object(value if self._rank == root else None)
        return values[self.ranks.index(root)]


class ThreadWorld:
    """A world of ranks that are threads, as seen from one rank; they share a ThreadHub.

    `device` is None for the CPU.
    """

    def __init__(self, hub: ThreadHub, rank: int, device: Device | None = None) -> None:
        self.hub = hub
        self.rank = rank
        self.size = hub.size
        self.device: Device = device or HostDevice()
        self.secret = hub.secret
        self.activity: object = "starting"
        self.is_one_process = True
        self._is_told = False  # of a failure
        self._num_groups: dict[tuple[int, ...], int] = {}
        self.world_group: ControlGroup = self.group([tuple(range(self.size))])

    def group(self, members: Sequence[Sequence[int]]) -> Group:
        """Return the group of `members` that contains this rank."""
        ranks = next(tuple(m) for m in members if self.rank in m)
        if len(ranks) == 1:
            return SoloGroup(self.rank)
        # Groups over the same ranks need disjoint serial numbers.
        count = self._num_groups[ranks] = self._num_groups.get(ranks, 0) + 1
        return ThreadGroup(self.hub, ranks, self.rank, count * 10**12, self.device)

    def control_group(self, members: Sequence[Sequence[int]]) -> ControlGroup:
        """Return the group of `members` that contains this rank; threads need no hierarchy."""
        return self.group(members)

    def transport(
        self, channels: Sequence[PlacedChannel], device: Device | None = None
    ) -> Transport:
        """Open channels in memory."""
        return MemoryTransport(self.hub, channels, self.device)

    @property
    def doing(self) -> str:
        """Return the current activity as text."""
        return str(self.activity)

    @property
    def has_peer_failure(self) -> bool:
        """Return whether another rank has failed and this rank has not handled it yet."""
        return self.hub.report is not None and not self._is_told

    def fail(self, report: str, *, is_mistake: bool = False, is_stop: bool = False) -> None:
        """Store the report if it is the first one, and wake all waiting threads."""
        self._is_told = True
        with self.hub.changed:
            if self.hub.report is None:
                self.hub.report = FailureReport(report, is_mistake, is_stop)
            self.hub.changed.notify_all()

    def explain(self, symptom: str) -> FailureReport:
        """Return the first failure report, or `symptom` if there is none."""
        self._is_told = True
        return self.hub.report or FailureReport(symptom)


class RankThread(threading.Thread):
    """A thread that runs a rank; `num_edges` counts the starts and ends of its training steps."""

    num_edges = 0


@contextmanager
def within_step() -> Iterator[None]:
    """Mark a training step of this rank by incrementing its thread's `num_edges` before and after.

    A draw of the user's loop from the global random generator happens outside of this context.
    """
    thread = threading.current_thread()
    if not isinstance(thread, RankThread):
        yield
        return
    thread.num_edges += 1
    try:
        yield
    finally:
        thread.num_edges += 1


def run_on_threads(
    size: int,
    body: Callable[[ThreadWorld], T],
    *,
    timeout_s: float = 60.0,
    device: Callable[[int], Device] | None = None,
) -> list[T]:
    """Run `body(world)` on `size` ranks, each a thread; return their results in rank order.

    Raises the first failure. Failures that only result from that of another rank are raised if
    there is no other. Waits within the threads have their own time-outs.

    Args:
        size: number of ranks.
        body: called with the world of each rank.
        device: device of each rank, created on its thread; None: the CPU.
    """
    hub = ThreadHub(size, timeout_s)
    results: list[Any] = [None] * size
    failures: list[BaseException] = []

    def target(rank: int) -> None:
        try:
            own = None if device is None else device(rank)
            if own is not None:
                own.use()
            results[rank] = body(ThreadWorld(hub, rank, own))
        except BaseException as failure:
            failures.append(failure)
            told = f"rank {rank}: {type(failure).__name__}: {failure}"
            ThreadWorld(hub, rank).fail(told, is_mistake=is_users_mistake(failure))

    threads = [
        RankThread(target=target, args=(rank,), name=f"rank{rank}", daemon=True)
        for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        causes = [f for f in failures if not isinstance(f, PeerError | ConnectionError)]
        first = (causes or failures)[0]
        strip_own_frames(first)
        raise first
    # If a body has caught a reported failure, unconsumed messages are expected.
    if hub.report is None and (hub.mail or any(hub.queues.values())):
        raise LaunchError(
            "threads: the bodies returned before all messages were received; wait for pending "
            "communication first (pipe.parameters() waits for parameters sent by the optimizer's "
            "last step), and do not use a pipeline after its body has returned"
        )
    return results
