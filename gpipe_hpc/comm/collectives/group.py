"""Collectives over a fixed set of ranks."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist

from gpipe_hpc.comm.collectives.plan import Plan
from gpipe_hpc.comm.collectives.shards import checked_counts

T = TypeVar("T")


class Pending(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Return when the result is there; of a device, when the current stream may use it."""

    def when_done(self, call: Callable[[], None]) -> None:
        """Call this once when it is done, maybe on another thread; else once it was waited for."""


class Calls:
    """What is to be called once something is done: at once where it is done already."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[Callable[[], None]] | None = []

    def add(self, call: Callable[[], None]) -> None:
        """Call this when it is done."""
        with self._lock:
            if self._waiting is not None:
                self._waiting.append(call)
                return
        call()

    def make(self) -> None:
        """Call all: it is done."""
        with self._lock:
            waiting, self._waiting = self._waiting, None
        for call in waiting or ():
            call()


class Piece(NamedTuple):
    """A tensor that goes to, or comes from, a world rank; contiguous in memory."""

    rank: int
    tensor: torch.Tensor


class Sent:
    """What this rank has sent within a group by exchanges, those of plans among them.

    What a backend's own collectives send is not known here.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.num_bytes = 0
        self.num_messages = 0

    def plus(self, other: "Sent") -> "Sent":
        """Return what both have sent."""
        both = Sent()
        both.num_bytes = self.num_bytes + other.num_bytes
        both.num_messages = self.num_messages + other.num_messages
        return both

    def count(self, pieces: Sequence[Piece]) -> None:
        """Count pieces that leave."""
        num_bytes = sum(piece.tensor.nbytes for piece in pieces)
        with self._lock:  # plans are carried out beside the main thread
            self.num_bytes += num_bytes
            self.num_messages += len(pieces)


class Gathering(Protocol):
    """A set of world ranks, maybe thousands, that tell one another little: the same calls on each.

    What a rank keeps open for it and sends grows with the logarithm of the ranks, except where
    each is to learn something of every other.
    """

    @property
    def ranks(self) -> Sequence[int]:
        """Return the world ranks, ascending."""

    @property
    def size(self) -> int:
        """Return the number of ranks."""

    @property
    def position(self) -> int:
        """Return where this rank stands in `ranks`."""

    @property
    def width(self) -> int:
        """Return the most ranks that add up at once: all, or those of a group of a level."""

    def start_all_reduce(self, tensor: torch.Tensor) -> Pending:
        """Start summing `tensor` in place over the ranks; the same bits on all."""

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum `tensor` in place over the ranks; the same bits on all."""

    def climb(self, tensor: torch.Tensor, between: Callable[[int], None]) -> None:
        """Sum `tensor` in place over the ranks, maybe group by group; the same bits on all.

        ``between(position)`` is called ahead of each further group on its members, to change what
        is no plain sum of all ranks; `position` is that of this rank in that group.
        """

    def all_reduce_max(self, tensor: torch.Tensor) -> None:
        """Put the greatest value of each element over the ranks in its place."""

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Fill `tensor` with world rank `root`'s."""

    def merge_object(self, value: T, merge: Callable[[T, T], T]) -> T:
        """Return on every rank what `merge` makes of all ranks' values, taken in rank order.

        `merge` takes the value of some ranks and that of those behind them; it is associative, and
        changes neither. No more travels than it returns. Values as for `all_gather_object`.
        """

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order: to each rank, so for few ranks or rare use.

        Plain values, tensors and records alone; others raise DataError, by type, on who sends.
        """

    def gather_object(self, value: Any, root: int) -> list[Any] | None:
        """Return every rank's value, in rank order, on world rank `root`; None elsewhere.

        Values as for `all_gather_object`.
        """

    def deal_object(self, values: Sequence[Any] | None, root: int) -> Any:
        """Return this rank's of the values that the root has, one for each rank in rank order.

        `root` is the first of the ranks; what others give is passed over. No rank gets more than
        its own and those that it hands on. Values as for `all_gather_object`.
        """

    def broadcast_object(self, value: Any, root: int) -> Any:
        """Return world rank `root`'s value on every rank; what others give is passed over.

        It travels once to each rank, along a tree. Values as for `all_gather_object`.
        """


class Group(Gathering, Protocol):
    """A set of world ranks that call the same collectives in the same order.

    Where they are few, any two of them may be connected, so that large tensors go the shortest way.
    """

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the world ranks of the group, ascending."""

    @property
    def sent(self) -> Sent:
        """Return what this rank has sent within the group so far."""

    @property
    def torch_group(self) -> dist.ProcessGroup | None:
        """Return the torch process group behind it, None where ranks are threads or one."""

    def start_broadcast(self, tensor: torch.Tensor, root: int) -> Pending:
        """Start filling `tensor` with world rank `root`'s."""

    def start_exchange(self, sends: Sequence[Piece], receives: Sequence[Piece]) -> Pending:
        """Start sending and receiving pieces, all at once; they must not overlap in memory.

        Messages between two ranks keep their order, and never meet other traffic. Each has the
        size that its receiver expects. An exchange with one side empty is a send or a receive.
        """

    def start_plan(self, plan: Plan, tensor: torch.Tensor, what: str) -> Pending:
        """Start carrying out this rank's `plan` over the elements of `tensor`, in place.

        Plans of a group follow one another in the order in which they are started, beside what the
        calling thread does, which leaves `tensor` alone until `wait`. `what`: the same words on
        every rank, for messages. Raises ConfigError, at `wait`, if the neighbours start something
        else.
        """

    def start_reduce_scatter(
        self, whole: torch.Tensor, counts: Sequence[int] | None = None
    ) -> Pending:
        """Start summing over the group so that each rank gets its shard of the sum, in place.

        `whole` is flat and holds the shards of all ranks one behind the other, `counts` elements
        each, which may differ and be 0; None: as even as can be, see `shards`. At the end this
        rank's shard of `whole` is summed and the rest of it means nothing. A rank sends all shards
        except its own, once. Raises ConfigError if the counts do not fit.
        """

    def start_ordered_all_reduce(self, tensor: torch.Tensor) -> Pending:
        """Start summing `tensor` in place, each element as ((x0 + x1) + x2) + ... over the ranks.

        So the bits depend neither on where in a tensor an element lies, nor on how ranks are
        connected.
        """

    def start_ordered_reduce_scatter(self, whole: torch.Tensor) -> Pending:
        """Start as `start_reduce_scatter` with even shards, summing in the order of ranks."""

    def all_to_all(self, whole: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
        """Return this rank's shard of every rank's flat `whole`, by position; waits.

        `counts`: elements of each rank's shard, the same on all. The calling thread exchanges, so
        no other one may do so in this group meanwhile.
        """

    def all_gather(self, whole: torch.Tensor, counts: Sequence[int]) -> None:
        """Fill flat `whole`, of which each rank has its shard, with all shards; as `all_to_all`."""

    def start_all_gather(self, whole: torch.Tensor, counts: Sequence[int] | None = None) -> Pending:
        """Start filling `whole`, of which each rank has its own shard, with all ranks' shards.

        Shards as for `start_reduce_scatter`. A rank sends all shards except one, once.
        """


class Done:
    """A collective that needed no waiting."""

    def wait(self) -> None:
        """Return at once."""

    def when_done(self, call: Callable[[], None]) -> None:
        """Call it at once."""
        call()


class SoloGroup:
    """The group of one rank: every collective is the identity."""

    def __init__(self, rank: int) -> None:
        self.ranks: tuple[int, ...] = (rank,)
        self.size = self.width = 1
        self.position = 0
        self.sent = Sent()
        self.torch_group: dist.ProcessGroup | None = None

    def start_all_reduce(self, tensor: torch.Tensor) -> Pending:
        """Leave `tensor` as it is."""
        return Done()

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Leave `tensor` as it is."""

    def climb(self, tensor: torch.Tensor, between: Callable[[int], None]) -> None:
        """Leave `tensor` as it is."""

    def all_reduce_max(self, tensor: torch.Tensor) -> None:
        """Leave `tensor` as it is."""

    def start_broadcast(self, tensor: torch.Tensor, root: int) -> Pending:
        """Leave `tensor` as it is."""
        return Done()

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Leave `tensor` as it is."""

    def start_exchange(self, sends: Sequence[Piece], receives: Sequence[Piece]) -> Pending:
        """Exchange nothing: there is nobody else."""
        assert not sends and not receives, f"rank {self.ranks[0]} is alone in its group"
        return Done()

    def start_plan(self, plan: Plan, tensor: torch.Tensor, what: str) -> Pending:
        """Leave `tensor` as it is."""
        assert not plan, f"{what}: a rank that is alone in its group has nothing to send"
        return Done()

    def start_reduce_scatter(
        self, whole: torch.Tensor, counts: Sequence[int] | None = None
    ) -> Pending:
        """Leave `whole` as it is."""
        checked_counts(whole, counts, 1)
        return Done()

    def start_ordered_all_reduce(self, tensor: torch.Tensor) -> Pending:
        """Leave `tensor` as it is."""
        return Done()

    def start_ordered_reduce_scatter(self, whole: torch.Tensor) -> Pending:
        """Leave `whole` as it is."""
        return Done()

    def all_to_all(self, whole: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
        """Return the one shard."""
        return [whole]

    def all_gather(self, whole: torch.Tensor, counts: Sequence[int]) -> None:
        """Leave `whole` as it is."""

    def start_all_gather(self, whole: torch.Tensor, counts: Sequence[int] | None = None) -> Pending:
        """Leave `whole` as it is."""
        checked_counts(whole, counts, 1)
        return Done()

    def merge_object(self, value: T, merge: Callable[[T, T], T]) -> T:
        """Return the one value."""
        return value

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the one value."""
        return [value]

    def gather_object(self, value: Any, root: int) -> list[Any] | None:
        """Return the one value."""
        return [value]

    def deal_object(self, values: Sequence[Any] | None, root: int) -> Any:
        """Return the one value."""
        assert values is not None, "the one rank is the root"
        return values[0]

    def broadcast_object(self, value: Any, root: int) -> Any:
        """Return the one value."""
        return value


def meet(group: Gathering) -> None:
    """Return once every rank of the group has come here."""
    group.merge_object(0, max)


def rank_names(ranks: Sequence[int]) -> str:
    """Return ranks for a message: 'rank 3' or 'ranks 1, 2'."""
    text = ", ".join(str(rank) for rank in ranks)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"
