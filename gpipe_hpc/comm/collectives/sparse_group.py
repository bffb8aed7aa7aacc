"""A `Group` of many ranks with logarithmically many connections: to ranks 1, 2, 4, 8, ... away.

A Gloo group is a full mesh: each of 4,096 replicas of a stage would keep 4,095 connections open.
Here it keeps 23. Sums are bitwise equal to those of a full mesh: all terms of an element are
forwarded to one rank, which adds them in the order of the mesh. This takes 2 log2(n) rounds instead
of the 2 (n - 1) of Gloo's ring, and sends log2(n) / 2 + 1 times the vector instead of twice.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist

from gpipe_hpc.comm.collectives.bruck import (
    all_reduce,
    all_to_all,
    binomial_scatter,
    bruck_all_gather,
    partners,
    reduce_scatter,
)
from gpipe_hpc.comm.collectives.group import (
    CollectiveHandle,
    PeerTensor,
    TrafficCounter,
    rank_names,
)
from gpipe_hpc.comm.collectives.orders import Ordering, SummationOrder, in_rank_order, in_ring_order
from gpipe_hpc.comm.collectives.plan import Plan, PlanPosition
from gpipe_hpc.comm.collectives.plan_executor import (
    Job,
    Parts,
    PlanExecutor,
    TrafficKind,
    copy_back,
    flattened,
)
from gpipe_hpc.comm.collectives.run_plan import Combine, plus, run_plan
from gpipe_hpc.comm.collectives.run_plan import Exchange as Swap
from gpipe_hpc.comm.collectives.shards import checked_counts
from gpipe_hpc.comm.collectives.torch_adapter import StartBroadcast
from gpipe_hpc.comm.collectives.tree import binomial_broadcast
from gpipe_hpc.comm.net.pickling import dumps, loads
from gpipe_hpc.comm.watchdog.wait_listener import WaitListener

T = TypeVar("T")

MESHED: Final = 32
"""Groups of up to this number of ranks are connected as a full mesh."""

StartExchange = Callable[
    [TrafficKind, Sequence[PeerTensor], Sequence[PeerTensor], WaitListener], CollectiveHandle
]
"""Starts sends and receives with connected world ranks."""

Connect = Callable[[Sequence[int]], None]
"""Connects this rank with the given positions, which call it too; existing connections are kept."""

Show = Callable[[StartBroadcast], dist.ProcessGroup | None]
"""Returns a torch process group whose broadcasts use the given function; None without torch."""


class SparseGroup:
    """A sparsely connected `Group` of many ranks.

    Args:
        ranks: world ranks of the group.
        position: index of this rank.
        start_exchange: starts point-to-point messages.
        connect: opens connections to other positions.
        listener: receives the ranks that a caller waits for.
        ordering: order of summation of `start_all_reduce`.
        show: returns the torch process group for libraries that need one.
    """

    def __init__(
        self,
        ranks: tuple[int, ...],
        position: int,
        start_exchange: StartExchange,
        connect: Connect,
        listener: WaitListener,
        *,
        ordering: Ordering = in_rank_order,
        show: Show = lambda start_broadcast: None,
    ) -> None:
        self.ranks, self.position = ranks, position
        self.size = self.width = len(ranks)
        self.sent = TrafficCounter()
        self._place = PlanPosition(self.size, position)
        self._start_exchange, self._connect = start_exchange, connect
        self._listener, self._ordering = listener, ordering
        self._show = show
        self._shown: dist.ProcessGroup | None = None
        self._carrier = PlanExecutor(ranks, position, self._swap, listener)
        self._connect(partners(self._place))

    @property
    def torch_group(self) -> dist.ProcessGroup | None:
        """Return a torch process group of these ranks that supports only broadcast."""
        if self._shown is None:
            self._shown = self._show(self.start_broadcast)
        return self._shown

    def start_all_reduce(self, tensor: torch.Tensor) -> CollectiveHandle:
        """Start summing `tensor` in place, bitwise equal to a full mesh."""
        return self._start_sum(tensor, self._ordering, plus, "all-reduce")

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum `tensor` in place."""
        self.start_all_reduce(tensor).wait()

    def all_reduce_hierarchical(self, tensor: torch.Tensor, between: Callable[[int], None]) -> None:
        """All-reduce `tensor` in place; there is only one level."""
        self.all_reduce(tensor)

    def all_reduce_max(self, tensor: torch.Tensor) -> None:
        """Replace each element by its maximum over all ranks."""
        self._start_sum(tensor, in_rank_order, _greater, "greatest").wait()

    def start_ordered_all_reduce(self, tensor: torch.Tensor) -> CollectiveHandle:
        """Start summing `tensor` in place, each element in rank order."""
        return self._start_sum(tensor, in_rank_order, plus, "all-reduce in the order of ranks")

    def start_ordered_reduce_scatter(self, whole: torch.Tensor) -> CollectiveHandle:
        """Start a reduce-scatter with equal shards that adds each element in rank order."""
        counts = checked_counts(whole, None, self.size)
        order = in_rank_order(len(whole), whole.element_size(), self.size)
        assert order.counts == counts, "shards must be as equal as possible"
        return self._start_shards(whole, order, "reduce-scatter in the order of ranks")

    def start_reduce_scatter(
        self, whole: torch.Tensor, counts: Sequence[int] | None = None
    ) -> CollectiveHandle:
        """Start a reduce-scatter, bitwise equal to that of a ring."""
        order = in_ring_order(checked_counts(whole, counts, self.size))
        return self._start_shards(whole, order, f"reduce-scatter, shards {order.counts}")

    def start_all_gather(
        self, whole: torch.Tensor, counts: Sequence[int] | None = None
    ) -> CollectiveHandle:
        """Start filling `whole` with the shards of all ranks."""
        sizes = checked_counts(whole, counts, self.size)
        plan = bruck_all_gather(self._place, sizes)
        return self._carrier.start(plan, whole, f"all-gather, shards {sizes}")

    def all_to_all(self, whole: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
        """Return this rank's shard of every rank's vector, forwarded by other ranks."""
        sizes = checked_counts(whole, counts, self.size)
        came = all_to_all(self._place, whole.cpu(), sizes, self._swap_now)
        return [shard.to(whole.device) for shard in came]

    def all_gather(self, whole: torch.Tensor, counts: Sequence[int]) -> None:
        """Fill `whole` with the shards of all ranks, forwarded by other ranks."""
        plan = bruck_all_gather(self._place, checked_counts(whole, counts, self.size))
        flat = flattened(whole)
        run_plan(plan, flat, self.position, self._swap_now)
        copy_back(flat, whole)

    def start_broadcast(self, tensor: torch.Tensor, root: int) -> CollectiveHandle:
        """Start overwriting `tensor` with that of world rank `root`, along a binomial tree."""
        plan = binomial_broadcast(self._place, self.ranks.index(root), tensor.numel())
        return self._carrier.start(plan, tensor, f"broadcast from rank {root}")

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Overwrite `tensor` with that of world rank `root`."""
        self.start_broadcast(tensor, root).wait()

    def start_exchange(
        self, sends: Sequence[PeerTensor], receives: Sequence[PeerTensor]
    ) -> CollectiveHandle:
        """Start an exchange; peers without a connection are connected first."""
        at = self.ranks.index
        self._connect(sorted({at(piece.rank) for piece in (*sends, *receives)}))
        return self._start(TrafficKind.CALLER, sends, receives, self._listener)

    def greet(self, sends: Sequence[PeerTensor], receives: Sequence[PeerTensor]) -> None:
        """Exchange the host messages that precede a plan; not counted as traffic."""
        at = self.ranks.index
        self._connect(sorted({at(piece.rank) for piece in (*sends, *receives)}))
        self._start(TrafficKind.GREETING, sends, receives, self._listener).wait()

    def start_plan(self, plan: Plan, tensor: torch.Tensor, what: str) -> CollectiveHandle:
        """Start a plan; peers without a connection are connected first, on all ranks."""
        moves = (move for step in plan for part in step for move in part)
        self._connect(sorted({move.peer for move in moves}))
        return self._carrier.start(plan, tensor, what)

    def merge_object(self, value: T, merge: Callable[[T, T], T]) -> T:
        """Reduce the objects of all ranks along a binomial tree and broadcast the result."""
        merged, distance = value, 1
        while distance < self.size:
            if self.position & distance:
                self._send_object(merged, self.position - distance)
                break
            if self.position + distance < self.size:
                merged = merge(merged, self._receive_object(self.position + distance))
            distance *= 2
        result: T = self.broadcast_object(merged, self.ranks[0])
        return result

    def _send_object(self, value: Any, position: int) -> None:
        """Send an object to a partner, which must call `_receive_object`."""
        what = f"a value for rank {self.ranks[position]}"
        told = torch.frombuffer(bytearray(dumps(value, what)), dtype=torch.uint8)
        self._swap_now([(position, torch.tensor([told.numel()]))], [])
        self._swap_now([(position, told)], [])

    def _receive_object(self, position: int) -> Any:
        """Receive the object that a partner sends with `_send_object`."""
        size = torch.zeros(1, dtype=torch.int64)
        self._swap_now([], [(position, size)])
        told = torch.empty(int(size), dtype=torch.uint8)
        self._swap_now([], [(position, told)])
        return loads(told.numpy().data, f"a value from rank {self.ranks[position]}")

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the values of all ranks in rank order; see `gpipe_hpc.comm.net.pickling`."""
        what = f"a collective of {rank_names(self.ranks)}"
        own = torch.frombuffer(bytearray(dumps(value, what)), dtype=torch.uint8)
        sizes = torch.zeros(self.size, dtype=torch.int64)
        sizes[self.position] = own.numel()
        self.start_all_gather(sizes).wait()
        counts = sizes.tolist()
        whole = torch.empty(sum(counts), dtype=torch.uint8)
        torch.split(whole, counts)[self.position].copy_(own)
        self.start_all_gather(whole, counts).wait()
        sources = zip(self.ranks, torch.split(whole, counts), strict=True)
        return [loads(part.numpy().data, f"{what}, from rank {r}") for r, part in sources]

    def gather_object(self, value: Any, root: int) -> list[Any] | None:
        """All-gather the values; return them on world rank `root`, None elsewhere."""
        values = self.all_gather_object(value)
        return values if self.ranks[self.position] == root else None

    def scatter_object(self, values: Sequence[Any] | None, root: int) -> Any:
        """Scatter objects along a binomial tree and return this rank's entry of `values`."""
        assert root == self.ranks[0], f"rank {root} is not the first of {self.size} ranks"
        what = f"values for {rank_names(self.ranks)}"
        parts = [dumps(value, what) for value in values or ()]
        sizes = torch.tensor([len(part) for part in parts] or [0] * self.size)
        self.broadcast(sizes, root)
        counts = sizes.tolist()
        whole = torch.empty(sum(counts), dtype=torch.uint8)
        if values is not None:
            whole.copy_(torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8))
        plan = binomial_scatter(self._place, counts)
        self._carrier.start(plan, whole, f"dealing, shards {counts}").wait()
        own = torch.split(whole, counts)[self.position]
        return loads(own.numpy().data, f"{what}, from rank {root}")

    def broadcast_object(self, value: Any, root: int) -> Any:
        """Return the value of world rank `root`."""
        what = f"a collective of {rank_names(self.ranks)}"
        is_root = self.ranks[self.position] == root
        told = torch.frombuffer(bytearray(dumps(value if is_root else 0, what)), dtype=torch.uint8)
        size = torch.tensor([told.numel()])
        self.broadcast(size, root)
        if not is_root:
            told = torch.empty(int(size), dtype=torch.uint8)
        self.broadcast(told, root)
        return value if is_root else loads(told.numpy().data, f"{what}, from rank {root}")

    def _start_sum(
        self, tensor: torch.Tensor, ordering: Ordering, combine: Combine, what: str
    ) -> CollectiveHandle:
        # Complex numbers are summed by their real and imaginary parts.
        parts = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        order = ordering(parts.numel(), parts.element_size(), self.size)

        def job(flat: torch.Tensor, swap: Swap) -> None:
            all_reduce(self._place, flat, order, swap, combine)

        return self._start_job(job, parts, what)

    def _start_shards(
        self, whole: torch.Tensor, order: SummationOrder, what: str
    ) -> CollectiveHandle:
        def job(flat: torch.Tensor, swap: Swap) -> None:
            reduce_scatter(self._place, flat, order, swap, plus)

        return self._start_job(job, whole, what)

    def _start_job(self, job: Job, tensor: torch.Tensor, what: str) -> CollectiveHandle:
        return self._carrier.start_job(job, tensor, f"{what}, relayed by other ranks")

    def _swap_now(self, sends: Parts, receives: Parts) -> None:
        self._swap(TrafficKind.CALLER, sends, receives, self._listener)

    def _swap(
        self, traffic: TrafficKind, sends: Parts, receives: Parts, note: WaitListener
    ) -> None:
        out, into = (
            [PeerTensor(self.ranks[i], t) for i, t in parts] for parts in (sends, receives)
        )
        self._start(traffic, out, into, note).wait()

    def _start(
        self,
        traffic: TrafficKind,
        sends: Sequence[PeerTensor],
        receives: Sequence[PeerTensor],
        note: WaitListener,
    ) -> CollectiveHandle:
        if traffic is not TrafficKind.GREETING:
            self.sent.count(sends)
        return self._start_exchange(traffic, sends, receives, note)


def _greater(own: torch.Tensor, other: torch.Tensor) -> None:
    torch.maximum(own, other, out=own)
