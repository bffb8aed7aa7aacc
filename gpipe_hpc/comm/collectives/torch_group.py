"""A `Group` over a torch process group: collectives, exchanges and objects."""

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from gpipe_hpc.comm.collectives.at_once import all_gather, all_to_all
from gpipe_hpc.comm.collectives.group import (
    CollectiveHandle,
    CompletedHandle,
    CompletionCallbacks,
    Group,
    PeerTensor,
    TrafficCounter,
    rank_names,
)
from gpipe_hpc.comm.collectives.on_stream import StreamPlanExecutor
from gpipe_hpc.comm.collectives.plan import Plan
from gpipe_hpc.comm.collectives.plan_executor import Job, Parts, PlanExecutor, TrafficKind
from gpipe_hpc.comm.collectives.planned import (
    start_all_gather,
    start_ordered_all_reduce,
    start_ordered_reduce_scatter,
    start_reduce_scatter,
)
from gpipe_hpc.comm.collectives.shards import checked_counts, shards
from gpipe_hpc.comm.collectives.shared_memory_sum import SharedMemorySum
from gpipe_hpc.comm.collectives.sparse_group import SparseGroup
from gpipe_hpc.comm.collectives.summing import NARROW, BackendReductions, widened
from gpipe_hpc.comm.collectives.works import Started, TorchWorks
from gpipe_hpc.comm.net.pickling import dumps, loads
from gpipe_hpc.comm.transport.wire import as_bytes
from gpipe_hpc.comm.watchdog.activity import ActivityTracker
from gpipe_hpc.comm.watchdog.failure import lost
from gpipe_hpc.comm.watchdog.wait_listener import WaitListener
from gpipe_hpc.device.device import Device, accepts_device, uses_device_memory

EXCHANGE_TAG = 2**29  # plus the value of `TrafficKind`

T = TypeVar("T")


class TorchGroup:
    """Collectives over a torch process group.

    Args:
        group: the torch process group.
        ranks: world ranks of the group.
        pulse: activity tracker, to which the ranks being waited for are reported.
        device: the device of this rank.
        host: group of the same ranks for host tensors, if `group` handles only device tensors.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        ranks: tuple[int, ...],
        pulse: ActivityTracker,
        device: Device,
        host: SparseGroup | None = None,
    ) -> None:
        self.ranks = ranks
        self.size = self.width = len(ranks)
        self.position = ranks.index(dist.get_rank())
        self.sent = TrafficCounter()
        self.torch_group = group
        self._pulse, self._device = pulse, device
        self.shared_sum: SharedMemorySum | None = None
        self._carries, self._knows = (
            uses_device_memory(group, device),
            accepts_device(group, device),
        )
        self._host: Group = host or self
        self._greets = host.greet if host else None
        agree = host.all_reduce if host else partial(dist.all_reduce, group=group)
        self._own_sums = BackendReductions(group, ranks, device, agree)
        self._carrier = PlanExecutor(ranks, self.position, self._exchange, self._await)
        self._stream_carrier = StreamPlanExecutor(
            ranks, self.position, self._exchange_of_stream, self.all_reduce, device
        )

    def start_all_reduce(self, tensor: torch.Tensor) -> CollectiveHandle:
        """Start summing `tensor` in place."""
        if self._is_foreign(tensor) or not self._sums(tensor):
            return self._by_host(tensor, self._start_on_host)
        work = dist.all_reduce(tensor, group=self.torch_group, async_op=True)
        return self._collective(work, tensor)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum `tensor` in place, in shared memory if it is small."""
        if self.shared_sum is not None and self.shared_sum.accepts(tensor):
            self.shared_sum.all_reduce(tensor)
        else:
            self.start_all_reduce(tensor).wait()

    def all_reduce_hierarchical(self, tensor: torch.Tensor, between: Callable[[int], None]) -> None:
        """All-reduce `tensor` in place; there is only one level."""
        self.all_reduce(tensor)

    def all_reduce_max(self, tensor: torch.Tensor) -> None:
        """Replace each element by its maximum over all ranks."""
        if self._is_foreign(tensor) or not self._sums(tensor):
            host = self._device.to_host(tensor)
            widened(host, self._host.all_reduce_max)
            tensor.copy_(host)
            return
        greatest = dist.ReduceOp.MAX
        work = dist.all_reduce(tensor, op=greatest, group=self.torch_group, async_op=True)
        self._collective(work, tensor).wait()

    def start_broadcast(self, tensor: torch.Tensor, root: int) -> CollectiveHandle:
        """Start overwriting `tensor` with that of world rank `root`."""
        if self._is_foreign(tensor):
            return self._by_host(tensor, partial(self.start_broadcast, root=root))
        # As bytes, because a backend may not support every dtype.
        moved = as_bytes(tensor) if self.uses_own(tensor) and tensor.is_contiguous() else tensor
        work = dist.broadcast(moved, root, group=self.torch_group, async_op=True)
        return self._collective(work, tensor)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Overwrite `tensor` with that of world rank `root`."""
        self.start_broadcast(tensor, root).wait()

    def start_exchange(
        self, sends: Sequence[PeerTensor], receives: Sequence[PeerTensor]
    ) -> CollectiveHandle:
        """Start sends and receives over the group's connections, by host copies if necessary."""
        outside = not self._carries and self._device.is_accelerator
        if outside and any(self._device.holds(piece.tensor) for piece in (*sends, *receives)):
            return self._exchange_by_host(sends, receives)
        return self._start(TrafficKind.CALLER, sends, receives, self._await)

    def _sums(self, tensor: torch.Tensor) -> bool:
        """Return whether the device's backend can sum the dtype; see `BackendReductions`."""
        return not self.uses_own(tensor) or self._own_sums.goes(tensor.dtype)

    def _start_on_host(self, host: torch.Tensor) -> CollectiveHandle:
        """Start summing a host copy; dtypes that Gloo cannot sum are widened and summed at once."""
        if host.dtype not in NARROW:
            return self._host.start_all_reduce(host)
        widened(host, self._host.all_reduce)
        return CompletedHandle()

    def _is_foreign(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is on a device whose memory the backend cannot access."""
        return not self._knows and self._device.holds(tensor)

    def _by_host(
        self, tensor: torch.Tensor, start: Callable[[torch.Tensor], CollectiveHandle]
    ) -> CollectiveHandle:
        """Start a collective on a copy of `tensor` in host memory."""
        host = self._device.to_host(tensor)
        return _HostStagedHandle(start(host), [(tensor, host)])

    def _exchange_by_host(
        self, sends: Sequence[PeerTensor], receives: Sequence[PeerTensor]
    ) -> CollectiveHandle:
        """Start an exchange of copies in host memory."""
        out = [PeerTensor(rank, self._device.to_host(tensor)) for rank, tensor in sends]
        into = [PeerTensor(rank, torch.empty_like(t, device="cpu")) for rank, t in receives]
        pending = self._start(TrafficKind.CALLER, out, into, self._await)
        back = [(own.tensor, host.tensor) for own, host in zip(receives, into, strict=True)]
        return _HostStagedHandle(pending, back)

    def start_plan(self, plan: Plan, tensor: torch.Tensor, what: str) -> CollectiveHandle:
        """Start a plan: on a stream if the device's backend is used, else on a separate thread.

        Device tensors that must use Gloo are copied through host memory, which blocks.
        """
        if self.uses_own(tensor):
            return self._stream_carrier.start(plan, tensor, what)
        return self._carrier.start(plan, tensor, what)

    def start_job(self, job: Job, tensor: torch.Tensor, what: str) -> CollectiveHandle:
        """Start a job on a tensor that the device's backend sends; it runs on a side stream.

        See `start_plan`. All ranks must take part in each exchange of the job.
        """
        return self._stream_carrier.start_job(job, tensor, what)

    def start_reduce_scatter(
        self, whole: torch.Tensor, counts: Sequence[int] | None = None
    ) -> CollectiveHandle:
        """Reduce-scatter along a ring, or by the device backend's collective for equal shards.

        Gloo's own reduce-scatter is not used: it is an all-reduce and sends twice the bytes.
        """
        sizes = checked_counts(whole, counts, self.size)
        if not self.uses_own(whole) or len(set(sizes)) > 1 or not self._sums(whole):
            return start_reduce_scatter(self, whole, counts)
        own = shards(whole, counts, self.size)[self.position]
        work = dist.reduce_scatter_tensor(own, whole, group=self.torch_group, async_op=True)
        return self._collective(work, whole)

    def start_ordered_all_reduce(self, tensor: torch.Tensor) -> CollectiveHandle:
        """Start summing `tensor` in place in rank order; each rank exchanges with every other."""
        return start_ordered_all_reduce(self, tensor)

    def start_ordered_reduce_scatter(self, whole: torch.Tensor) -> CollectiveHandle:
        """Start a reduce-scatter in rank order; each rank exchanges with every other."""
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
        """All-gather along a ring, or by the device backend's collective for equal shards."""
        sizes = checked_counts(whole, counts, self.size)
        if not self.uses_own(whole) or len(set(sizes)) > 1:
            return start_all_gather(self, whole, counts)
        own = shards(whole, counts, self.size)[self.position]
        work = dist.all_gather_into_tensor(
            as_bytes(whole), as_bytes(own), group=self.torch_group, async_op=True
        )
        return self._collective(work, whole)

    def uses_own(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is sent by the device's own backend, such as NCCL."""
        return self._carries and self._device.holds(tensor)

    def _collective(self, work: dist.Work | None, tensor: torch.Tensor) -> CollectiveHandle:
        assert work is not None, f"not a member of {rank_names(self.ranks)}"
        what = f"a collective of {rank_names(self.ranks)}"
        started: Started = [(self.ranks, work)]
        is_apart = self._device.is_accelerator and self._device.holds(tensor)
        return TorchWorks(started, self._await, what, tells=not is_apart)

    def _await(self, ranks: Sequence[int] | None) -> None:
        self._pulse.waits_for = ranks

    def _exchange(
        self, traffic: TrafficKind, sends: Parts, receives: Parts, note: WaitListener
    ) -> None:
        self._start(traffic, self._pieces(sends), self._pieces(receives), note).wait()

    def _exchange_of_stream(
        self, traffic: TrafficKind, sends: Parts, receives: Parts, note: WaitListener
    ) -> None:
        """Run `_exchange`, but over the host group for greetings, which are host tensors."""
        if traffic is not TrafficKind.GREETING or self._greets is None:
            self._exchange(traffic, sends, receives, note)
            return
        self._greets(self._pieces(sends), self._pieces(receives))

    def _pieces(self, parts: Parts) -> list[PeerTensor]:
        return [PeerTensor(self.ranks[i], tensor) for i, tensor in parts]

    def _start(
        self,
        traffic: TrafficKind,
        sends: Sequence[PeerTensor],
        receives: Sequence[PeerTensor],
        note: WaitListener,
    ) -> CollectiveHandle:
        if traffic is not TrafficKind.GREETING:
            self.sent.count(sends)
        tag = EXCHANGE_TAG + traffic.value
        peers = sorted({piece.rank for piece in (*sends, *receives)})
        if not peers:
            return CompletedHandle()
        batched = self.uses_own((*sends, *receives)[0].tensor)
        start = self._start_batch if batched else self._post
        try:
            return TorchWorks(start(sends, receives, tag), note)
        except RuntimeError as error:
            raise lost(error, rank_names(peers)) from error

    def _post(
        self, sends: Sequence[PeerTensor], receives: Sequence[PeerTensor], tag: int
    ) -> Started:
        """Start each message separately, receives first, so that no send has to wait.

        Calling the process group directly takes half the time of `dist.isend` and `dist.irecv`.
        """
        group, at = self.torch_group, self.ranks.index
        return [
            ([piece.rank], start([piece.tensor], at(piece.rank), tag))
            for start, pieces in ((group.recv, receives), (group.send, sends))
            for piece in pieces
        ]

    def _start_batch(
        self, sends: Sequence[PeerTensor], receives: Sequence[PeerTensor], tag: int
    ) -> Started:
        """Start all messages in one batch, because NCCL would serialise separate ones."""
        operations = [
            dist.P2POp(start, as_bytes(piece.tensor), piece.rank, self.torch_group, tag)
            for start, pieces in ((dist.irecv, receives), (dist.isend, sends))
            for piece in pieces
        ]
        peers = sorted({piece.rank for piece in (*sends, *receives)})
        return [(peers, work) for work in dist.batch_isend_irecv(operations)]

    def merge_object(self, value: T, merge: Callable[[T, T], T]) -> T:
        """Gather the objects of all ranks and reduce them locally with `merge`."""
        merged: T = reduce(merge, self.all_gather_object(value))
        return merged

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the values of all ranks in rank order; see `gpipe_hpc.comm.net.pickling`."""
        parts = self._gather_values(value, self._gather)
        assert parts is not None, "every rank receives the values"
        return parts

    def gather_object(self, value: Any, root: int) -> list[Any] | None:
        """Return the values of all ranks on world rank `root`, None elsewhere."""
        return self._gather_values(value, partial(self._gather_at, root=root))

    def scatter_object(self, values: Sequence[Any] | None, root: int) -> Any:
        """Scatter objects: return this rank's entry of the root's `values`."""
        what = f"values for {rank_names(self.ranks)}"
        is_root = dist.get_rank() == root
        assert is_root == (values is not None), f"{what}: only rank {root} passes them"
        parts = [bytearray(dumps(value, what)) for value in values or ()]
        sizes = torch.tensor([len(part) for part in parts] if is_root else [0] * self.size)
        self.broadcast(sizes, root)
        own = self.position
        if values is not None:
            pieces = [
                PeerTensor(rank, torch.frombuffer(part, dtype=torch.uint8))
                for rank, part in zip(self.ranks, parts, strict=True)
                if rank != root
            ]
            self.start_exchange(pieces, ()).wait()
            return values[own]
        came = torch.empty(int(sizes[own]), dtype=torch.uint8)
        self.start_exchange((), [PeerTensor(root, came)]).wait()
        return loads(came.numpy().data, f"{what}, from rank {root}")

    def broadcast_object(self, value: Any, root: int) -> Any:
        """Return the value of world rank `root`."""
        what = f"a collective of {rank_names(self.ranks)}"
        own = bytearray(dumps(value, what) if dist.get_rank() == root else b"")
        size = torch.tensor([len(own)])
        self.broadcast(size, root)
        if dist.get_rank() == root:
            self.broadcast(torch.frombuffer(own, dtype=torch.uint8), root)
            return value
        told = torch.empty(int(size), dtype=torch.uint8)
        self.broadcast(told, root)
        return loads(told.numpy().data, f"{what}, from rank {root}")

    def _gather_values(
        self, value: Any, gather: Callable[[torch.Tensor], list[torch.Tensor] | None]
    ) -> list[Any] | None:
        """Serialise `value`, collect the bytes of all ranks with `gather`, and return the values.

        None if `gather` returns None, as on ranks that are not the root.
        """
        what = f"a collective of {rank_names(self.ranks)}"
        own = torch.frombuffer(bytearray(dumps(value, what)), dtype=torch.uint8)
        self._pulse.waits_for = self.ranks
        try:
            parts = gather(own)
        except RuntimeError as error:
            raise lost(error, what) from error
        self._pulse.waits_for = None
        if parts is None:
            return None
        sources = zip(self.ranks, parts, strict=True)
        return [loads(part.numpy().data, f"{what}, from rank {r}") for r, part in sources]

    def _gather_at(self, own: torch.Tensor, root: int) -> list[torch.Tensor] | None:
        """Return the bytes of every rank, of any length, on world rank `root`; None elsewhere."""
        longest = torch.tensor([own.numel()])
        dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=self.torch_group)
        # Messages of equal length: eight bytes of length, the data, padding.
        padded = torch.zeros(8 + int(longest), dtype=torch.uint8)
        padded[:8] = torch.tensor([own.numel()]).view(torch.uint8)
        padded[8 : 8 + own.numel()] = own
        is_root = dist.get_rank() == root
        gathered = torch.empty(self.size, padded.numel(), dtype=torch.uint8) if is_root else None
        into = None if gathered is None else list(gathered)
        dist.gather(padded, into, dst=root, group=self.torch_group)
        if gathered is None:
            return None
        counts = [int(part[:8].clone().view(torch.int64)) for part in gathered]
        return [part[8 : 8 + count] for part, count in zip(gathered, counts, strict=True)]

    def _gather(self, own: torch.Tensor) -> list[torch.Tensor]:
        """Return the bytes of every rank, of any length."""
        sizes = torch.empty(self.size, 1, dtype=torch.int64)
        size = torch.tensor([own.numel()])
        dist.all_gather(list(sizes), size, group=self.torch_group)
        counts = sizes.flatten().tolist()
        # Messages are padded to equal length.
        padded = torch.zeros(max(counts), dtype=torch.uint8)
        padded[: own.numel()] = own
        gathered = torch.empty(self.size, max(counts), dtype=torch.uint8)
        dist.all_gather(list(gathered), padded, group=self.torch_group)
        return [part[:count] for part, count in zip(gathered, counts, strict=True)]


class _HostStagedHandle:
    """A collective on host copies, which `wait` copies back to the original tensors."""

    def __init__(
        self, pending: CollectiveHandle, back: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        self._pending, self._back = pending, back
        self._calls = CompletionCallbacks()

    def when_done(self, call: Callable[[], None]) -> None:
        self._calls.add(call)

    def wait(self) -> None:
        self._pending.wait()
        for own, host in self._back:
            own.copy_(host)
        self._calls.make()
