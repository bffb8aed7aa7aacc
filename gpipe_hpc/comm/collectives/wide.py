"""A group of many ranks, each connected with few: those 1, 2, 4, 8, ... places away, both ways.

Over Gloo a group is a full mesh: of 4,096 copies of a stage each rank would keep 4,095 connections
open. Here it keeps 23. Sums have the same bits as those of a full mesh: the terms of an element
come together on one rank, by way of others, and are added there in the order in which the mesh
adds them. That takes 2 log2(n) rounds, where Gloo's ring takes 2 (n - 1), and sends
(log2(n) / 2 + 1) times the vector, where the ring sends it twice.
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
from gpipe_hpc.comm.collectives.carrier import (
    Carrier,
    Job,
    Parts,
    Traffic,
    flattened,
    give_back,
)
from gpipe_hpc.comm.collectives.carrying import Combine, carry_out, plus
from gpipe_hpc.comm.collectives.carrying import Exchange as Swap
from gpipe_hpc.comm.collectives.group import Pending, Piece, Sent, rank_names
from gpipe_hpc.comm.collectives.orders import Order, Ordering, in_rank_order, in_ring_order
from gpipe_hpc.comm.collectives.plan import Place, Plan
from gpipe_hpc.comm.collectives.shards import checked_counts
from gpipe_hpc.comm.collectives.torch_face import StartBroadcast
from gpipe_hpc.comm.collectives.tree import binomial_broadcast
from gpipe_hpc.comm.net.pickling import dumps, loads
from gpipe_hpc.comm.watchdog.noting import Note

T = TypeVar("T")

MESHED: Final = 32
"""Up to so many ranks are connected each with each."""

StartExchange = Callable[[Traffic, Sequence[Piece], Sequence[Piece], Note], Pending]
"""Starts sending and receiving, with world ranks that are connected."""

Connect = Callable[[Sequence[int]], None]
"""Connects this rank with some positions, which call it too; those it has are passed over."""

Show = Callable[[StartBroadcast], dist.ProcessGroup | None]
"""Returns a group of torch's that broadcasts so; None where torch has none."""


class WideGroup:
    """A `Group` of many ranks over connections of one rank with another.

    `start_exchange` and `connect`: what there is between two ranks. `ordering`: that of sums for
    which nobody asks for another. `show`: returns what torch is to see of it, which starts its
    broadcasts here. `listener` hears for whom a caller waits.
    """

    def __init__(
        self,
        ranks: tuple[int, ...],
        position: int,
        start_exchange: StartExchange,
        connect: Connect,
        listener: Note,
        *,
        ordering: Ordering = in_rank_order,
        show: Show = lambda start_broadcast: None,
    ) -> None:
        self.ranks, self.position = ranks, position
        self.size = self.width = len(ranks)
        self.sent = Sent()
        self._place = Place(self.size, position)
        self._start_exchange, self._connect = start_exchange, connect
        self._listener, self._ordering = listener, ordering
        self._show = show
        self._shown: dist.ProcessGroup | None = None
        self._carrier = Carrier(ranks, position, self._swap, listener)
        self._connect(partners(self._place))

    @property
    def torch_group(self) -> dist.ProcessGroup | None:
        """Return what torch sees of it, which can broadcast and nothing else."""
        if self._shown is None:
            self._shown = self._show(self.start_broadcast)
        return self._shown

    def start_all_reduce(self, tensor: torch.Tensor) -> Pending:
        """Start summing `tensor` in place, with the bits that a full mesh gives."""
        return self._start_sum(tensor, self._ordering, plus, "all-reduce")

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum `tensor` in place."""
        self.start_all_reduce(tensor).wait()

    def climb(self, tensor: torch.Tensor, between: Callable[[int], None]) -> None:
        """Sum `tensor` in place: all ranks are one group."""
        self.all_reduce(tensor)

    def all_reduce_max(self, tensor: torch.Tensor) -> None:
        """Put the greatest of each element in its place."""
        self._start_sum(tensor, in_rank_order, _greater, "greatest").wait()

    def start_ordered_all_reduce(self, tensor: torch.Tensor) -> Pending:
        """Start summing `tensor` in place, each element in the order of ranks."""
        return self._start_sum(tensor, in_rank_order, plus, "all-reduce in the order of ranks")

    def start_ordered_reduce_scatter(self, whole: torch.Tensor) -> Pending:
        """Start summing even shards, each element in the order of ranks."""
        counts = checked_counts(whole, None, self.size)
        order = in_rank_order(len(whole), whole.element_size(), self.size)
        assert order.counts == counts, "shards are as even as can be"
        return self._start_shards(whole, order, "reduce-scatter in the order of ranks")

    def start_reduce_scatter(
        self, whole: torch.Tensor, counts: Sequence[int] | None = None
    ) -> Pending:
        """Start summing shards, with the bits that a ring gives."""
        order = in_ring_order(checked_counts(whole, counts, self.size))
        return self._start_shards(whole, order, f"reduce-scatter, shards {order.counts}")

    def start_all_gather(self, whole: torch.Tensor, counts: Sequence[int] | None = None) -> Pending:
        """Start filling `whole` with all ranks' shards."""
        sizes = checked_counts(whole, counts, self.size)
        plan = bruck_all_gather(self._place, sizes)
        return self._carrier.start(plan, whole, f"all-gather, shards {sizes}")

    def all_to_all(self, whole: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
        """Return this rank's shard of every rank's vector, which came by way of others."""
        sizes = checked_counts(whole, counts, self.size)
        came = all_to_all(self._place, whole.cpu(), sizes, self._swap_now)
        return [shard.to(whole.device) for shard in came]

    def all_gather(self, whole: torch.Tensor, counts: Sequence[int]) -> None:
        """Fill `whole` with all ranks' shards, which came by way of others."""
        plan = bruck_all_gather(self._place, checked_counts(whole, counts, self.size))
        flat = flattened(whole)
        carry_out(plan, flat, self.position, self._swap_now)
        give_back(flat, whole)

    def start_broadcast(self, tensor: torch.Tensor, root: int) -> Pending:
        """Start filling `tensor` with world rank `root`'s, along a binomial tree."""
        plan = binomial_broadcast(self._place, self.ranks.index(root), tensor.numel())
        return self._carrier.start(plan, tensor, f"broadcast from rank {root}")

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Fill `tensor` with world rank `root`'s."""
        self.start_broadcast(tensor, root).wait()

    def start_exchange(self, sends: Sequence[Piece], receives: Sequence[Piece]) -> Pending:
        """Start an exchange; who has not met before is connected first."""
        at = self.ranks.index
        self._connect(sorted({at(piece.rank) for piece in (*sends, *receives)}))
        return self._start(Traffic.CALLER, sends, receives, self._listener)

    def greet(self, sends: Sequence[Piece], receives: Sequence[Piece]) -> None:
        """Exchange what the two halves of a group tell ahead of a plan: no part of what is sent."""
        at = self.ranks.index
        self._connect(sorted({at(piece.rank) for piece in (*sends, *receives)}))
        self._start(Traffic.GREETING, sends, receives, self._listener).wait()

    def start_plan(self, plan: Plan, tensor: torch.Tensor, what: str) -> Pending:
        """Start a plan; whom it needs and has not met is connected first, on all ranks."""
        moves = (move for step in plan for part in step for move in part)
        self._connect(sorted({move.peer for move in moves}))
        return self._carrier.start(plan, tensor, what)

    def merge_object(self, value: T, merge: Callable[[T, T], T]) -> T:
        """Return what `merge` makes of all values: along a binomial tree, and down again."""
        merged, distance = value, 1
        while distance < self.size:
            if self.position & distance:
                self._give(merged, self.position - distance)
                break
            if self.position + distance < self.size:
                merged = merge(merged, self._take(self.position + distance))
            distance *= 2
        result: T = self.broadcast_object(merged, self.ranks[0])
        return result

    def _give(self, value: Any, position: int) -> None:
        """Send a value to a partner, which takes it."""
        what = f"a value for rank {self.ranks[position]}"
        told = torch.frombuffer(bytearray(dumps(value, what)), dtype=torch.uint8)
        self._swap_now([(position, torch.tensor([told.numel()]))], [])
        self._swap_now([(position, told)], [])

    def _take(self, position: int) -> Any:
        """Return the value that a partner gives; read as those below."""
        size = torch.zeros(1, dtype=torch.int64)
        self._swap_now([], [(position, size)])
        told = torch.empty(int(size), dtype=torch.uint8)
        self._swap_now([], [(position, told)])
        return loads(told.numpy().data, f"a value from rank {self.ranks[position]}")

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every rank's value in rank order; read as `gpipe_hpc.comm.net.pickling` allows."""
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
        """Return every rank's value on world rank `root`, None elsewhere; they travel to all."""
        values = self.all_gather_object(value)
        return values if self.ranks[self.position] == root else None

    def deal_object(self, values: Sequence[Any] | None, root: int) -> Any:
        """Send each rank its value along a binomial tree."""
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
        """Return world rank `root`'s value; read as those above."""
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
    ) -> Pending:
        # Sums of complex numbers are those of their parts.
        parts = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        order = ordering(parts.numel(), parts.element_size(), self.size)

        def job(flat: torch.Tensor, swap: Swap) -> None:
            all_reduce(self._place, flat, order, swap, combine)

        return self._start_job(job, parts, what)

    def _start_shards(self, whole: torch.Tensor, order: Order, what: str) -> Pending:
        def job(flat: torch.Tensor, swap: Swap) -> None:
            reduce_scatter(self._place, flat, order, swap, plus)

        return self._start_job(job, whole, what)

    def _start_job(self, job: Job, tensor: torch.Tensor, what: str) -> Pending:
        return self._carrier.start_job(job, tensor, f"{what}, by way of others")

    def _swap_now(self, sends: Parts, receives: Parts) -> None:
        self._swap(Traffic.CALLER, sends, receives, self._listener)

    def _swap(self, traffic: Traffic, sends: Parts, receives: Parts, note: Note) -> None:
        out, into = ([Piece(self.ranks[i], t) for i, t in parts] for parts in (sends, receives))
        self._start(traffic, out, into, note).wait()

    def _start(
        self, traffic: Traffic, sends: Sequence[Piece], receives: Sequence[Piece], note: Note
    ) -> Pending:
        if traffic is not Traffic.GREETING:
            self.sent.count(sends)
        return self._start_exchange(traffic, sends, receives, note)


def _greater(own: torch.Tensor, other: torch.Tensor) -> None:
    torch.maximum(own, other, out=own)
