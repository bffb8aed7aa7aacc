"""Interfaces of process groups: collectives over a fixed set of ranks."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist

from gpipe_hpc.comm.collectives.plan import Plan
from gpipe_hpc.comm.collectives.shards import checked_counts

T = TypeVar("T")


class CollectiveHandle(Protocol):
    """Handle of an asynchronous collective."""

    def wait(self) -> None:
        """Block until the result is available; on a device, until the current stream may use it."""

    def when_done(self, call: Callable[[], None]) -> None:
        """Call `call` once the collective is complete, possibly on another thread.

        Some groups cannot detect completion; they call it once `wait` was called.
        """


class CompletionCallbacks:
    """Callbacks to run when an operation completes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[Callable[[], None]] | None = []

    def add(self, call: Callable[[], None]) -> None:
        """Run `call` when the operation completes, or at once if it is already complete."""
        with self._lock:
            if self._waiting is not None:
                self._waiting.append(call)
                return
        call()

    def make(self) -> None:
        """Mark the operation as complete and run all callbacks."""
        with self._lock:
            waiting, self._waiting = self._waiting, None
        for call in waiting or ():
            call()


class PeerTensor(NamedTuple):
    """A contiguous tensor and the world rank to which it is sent or from which it is received."""

    rank: int
    tensor: torch.Tensor


class TrafficCounter:
    """Counter of the bytes and messages that this rank has sent within a group.

    It counts point-to-point exchanges, including those of plans, but not the traffic of the
    backend's own collectives.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.num_bytes = 0
        self.num_messages = 0

    def plus(self, other: "TrafficCounter") -> "TrafficCounter":
        """Return the sum of both traffic counters."""
        both = TrafficCounter()
        both.num_bytes = self.num_bytes + other.num_bytes
        both.num_messages = self.num_messages + other.num_messages
        return both

    def count(self, pieces: Sequence[PeerTensor]) -> None:
        """Add the pieces of one exchange to the counter."""
        num_bytes = sum(piece.tensor.nbytes for piece in pieces)
        with self._lock:  # plans run on another thread
            self.num_bytes += num_bytes
            self.num_messages += len(pieces)


class ControlGroup(Protocol):
    """A group of possibly thousands of ranks for small messages; all ranks make the same calls.

    The number of connections and messages of a rank grows with the logarithm of the group size,
    except for collectives that return a value of every rank.
    """

    @property
    def ranks(self) -> Sequence[int]:
        """Return the world ranks of the group, ascending."""

    @property
    def size(self) -> int:
        """Return the number of ranks."""

    @property
    def position(self) -> int:
        """Return the index of this rank in `ranks`."""

    @property
    def width(self) -> int:
        """Return the number of ranks summed by a single all-reduce: all, or those of a subgroup."""

    def start_all_reduce(self, tensor: torch.Tensor) -> CollectiveHandle:
        """Start summing `tensor` in place over all ranks, bitwise equal on all."""

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum `tensor` in place over all ranks, bitwise equal on all."""

    def all_reduce_hierarchical(self, tensor: torch.Tensor, between: Callable[[int], None]) -> None:
        """All-reduce `tensor` in place, level by level if the group is hierarchical.

        Before each level above the lowest, ``between(position)`` is called on the members of that
        level's group, where `position` is this rank's index in it. The callback may modify
        `tensor`, for elements that are not a plain sum over all ranks.
        """

    def all_reduce_max(self, tensor: torch.Tensor) -> None:
        """Replace each element of `tensor` by its maximum over all ranks."""

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Overwrite `tensor` with that of world rank `root`."""

    def merge_object(self, value: T, merge: Callable[[T, T], T]) -> T:
        """Reduce the objects of all ranks with `merge`, in rank order, on every rank.

        `merge` takes the merged values of lower and of higher ranks. It must be associative and
        must not modify its arguments. The values have the types allowed by `all_gather_object`.
        """

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order, on every rank; for few ranks or rare use.

        Allowed are plain values, tensors and registered records. Raises DataError on the sender,
        naming the type, for anything else.
        """

    def gather_object(self, value: Any, root: int) -> list[Any] | None:
        """Return the values of all ranks, in rank order, on world rank `root`; None elsewhere.

        The values have the types allowed by `all_gather_object`.
        """

    def scatter_object(self, values: Sequence[Any] | None, root: int) -> Any:
        """Scatter objects: return this rank's entry of `values`, which has one entry for each rank.

        `root` must be the first rank of the group; `values` of other ranks are ignored. A rank
        receives only its own entry and those that it forwards. The values have the types allowed by
        `all_gather_object`.
        """

    def broadcast_object(self, value: Any, root: int) -> Any:
        """Return the value of world rank `root` on every rank; values of other ranks are ignored.

        It is sent along a tree, once to each rank. The value has a type allowed by
        `all_gather_object`.
        """


class Group(ControlGroup, Protocol):
    """A process group for large tensors; all ranks call the same collectives in the same order.

    In a small group any two ranks may be connected directly.
    """

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the world ranks of the group, ascending."""

    @property
    def sent(self) -> TrafficCounter:
        """Return the traffic counter of this rank in this group."""

    @property
    def torch_group(self) -> dist.ProcessGroup | None:
        """Return the underlying torch process group; None for thread ranks or a single rank."""

    def start_broadcast(self, tensor: torch.Tensor, root: int) -> CollectiveHandle:
        """Start overwriting `tensor` with that of world rank `root`."""

    def start_exchange(
        self, sends: Sequence[PeerTensor], receives: Sequence[PeerTensor]
    ) -> CollectiveHandle:
        """Start all given sends and receives at once; their tensors must not overlap in memory.

        Messages between two ranks arrive in order and are separate from all other traffic. Sender
        and receiver must pass tensors of equal size. If one side is empty, the exchange is a plain
        send or receive.
        """

    def start_plan(self, plan: Plan, tensor: torch.Tensor, what: str) -> CollectiveHandle:
        """Start executing this rank's `plan` in place on the elements of `tensor`.

        Plans of a group run in the order in which they were started, concurrently with the calling
        thread, which must not use `tensor` before `wait`. `what` describes the collective in error
        messages and must be equal on all ranks. `wait` raises ConfigError if neighbouring ranks
        start a different collective.
        """

    def start_reduce_scatter(
        self, whole: torch.Tensor, counts: Sequence[int] | None = None
    ) -> CollectiveHandle:
        """Start an in-place reduce-scatter: each rank gets the sum of its shard of `whole`.

        `whole` is flat and consists of the shards of all ranks in rank order. `counts` gives the
        number of elements of each shard, which may differ and be 0; by default they are as equal as
        possible, see `shards`. Afterwards this rank's shard holds the sum and the rest of `whole`
        is undefined. A rank sends every shard but its own once. Raises ConfigError if the counts do
        not fit.
        """

    def start_ordered_all_reduce(self, tensor: torch.Tensor) -> CollectiveHandle:
        """Start summing `tensor` in place with each element added in rank order.

        The result ((x0 + x1) + x2) + ... does not depend on the position of an element in a buffer
        or on how the ranks are connected.
        """

    def start_ordered_reduce_scatter(self, whole: torch.Tensor) -> CollectiveHandle:
        """Start a reduce-scatter with equal shards that adds each element in rank order."""

    def all_to_all(self, whole: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
        """Return this rank's shard of every rank's flat `whole`, by position; blocks.

        `counts` gives the number of elements of each rank's shard and is equal on all ranks. The
        calling thread communicates itself, so no other thread may use the group meanwhile.
        """

    def all_gather(self, whole: torch.Tensor, counts: Sequence[int]) -> None:
        """Replace flat `whole`, of which each rank has its own shard, by all shards; blocks.

        As with `all_to_all`, no other thread may use the group meanwhile.
        """

    def start_all_gather(
        self, whole: torch.Tensor, counts: Sequence[int] | None = None
    ) -> CollectiveHandle:
        """Start filling `whole`, of which each rank has its own shard, with all shards.

        Shards are as in `start_reduce_scatter`. A rank sends all shards but one, once.
        """


class CompletedHandle:
    """Handle of a collective that was already complete when it was started."""

    def wait(self) -> None:
        """Return at once."""

    def when_done(self, call: Callable[[], None]) -> None:
        """Run `call` at once."""
        call()


class SoloGroup:
    """The group of a single rank: every collective is the identity."""

    def __init__(self, rank: int) -> None:
        self.ranks: tuple[int, ...] = (rank,)
        self.size = self.width = 1
        self.position = 0
        self.sent = TrafficCounter()
        self.torch_group: dist.ProcessGroup | None = None

    def start_all_reduce(self, tensor: torch.Tensor) -> CollectiveHandle:
        """Leave `tensor` unchanged."""
        return CompletedHandle()

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Leave `tensor` unchanged."""

    def all_reduce_hierarchical(self, tensor: torch.Tensor, between: Callable[[int], None]) -> None:
        """Leave `tensor` unchanged."""

    def all_reduce_max(self, tensor: torch.Tensor) -> None:
        """Leave `tensor` unchanged."""

    def start_broadcast(self, tensor: torch.Tensor, root: int) -> CollectiveHandle:
        """Leave `tensor` unchanged."""
        return CompletedHandle()

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Leave `tensor` unchanged."""

    def start_exchange(
        self, sends: Sequence[PeerTensor], receives: Sequence[PeerTensor]
    ) -> CollectiveHandle:
        """Do nothing; both lists must be empty."""
        assert not sends and not receives, f"rank {self.ranks[0]} is the only one of its group"
        return CompletedHandle()

    def start_plan(self, plan: Plan, tensor: torch.Tensor, what: str) -> CollectiveHandle:
        """Leave `tensor` unchanged; the plan must be empty."""
        assert not plan, f"{what}: a group of one rank has nothing to send"
        return CompletedHandle()

    def start_reduce_scatter(
        self, whole: torch.Tensor, counts: Sequence[int] | None = None
    ) -> CollectiveHandle:
        """Check the counts and leave `whole` unchanged."""
        checked_counts(whole, counts, 1)
        return CompletedHandle()

    def start_ordered_all_reduce(self, tensor: torch.Tensor) -> CollectiveHandle:
        """Leave `tensor` unchanged."""
        return CompletedHandle()

    def start_ordered_reduce_scatter(self, whole: torch.Tensor) -> CollectiveHandle:
        """Leave `whole` unchanged."""
        return CompletedHandle()

    def all_to_all(self, whole: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
        """Return `whole` as the only shard."""
        return [whole]

    def all_gather(self, whole: torch.Tensor, counts: Sequence[int]) -> None:
        """Leave `whole` unchanged."""

    def start_all_gather(
        self, whole: torch.Tensor, counts: Sequence[int] | None = None
    ) -> CollectiveHandle:
        """Check the counts and leave `whole` unchanged."""
        checked_counts(whole, counts, 1)
        return CompletedHandle()

    def merge_object(self, value: T, merge: Callable[[T, T], T]) -> T:
        """Return `value`."""
        return value

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return a list of this rank's value."""
        return [value]

    def gather_object(self, value: Any, root: int) -> list[Any] | None:
        """Return a list of this rank's value."""
        return [value]

    def scatter_object(self, values: Sequence[Any] | None, root: int) -> Any:
        """Return the only entry of `values`."""
        assert values is not None, "the only rank is the root and must pass values"
        return values[0]

    def broadcast_object(self, value: Any, root: int) -> Any:
        """Return `value`."""
        return value


def barrier(group: ControlGroup) -> None:
    """Block until every rank of the group has called this (a barrier)."""
    group.merge_object(0, max)


def rank_names(ranks: Sequence[int]) -> str:
    """Format ranks for a message: 'rank 3' or 'ranks 1, 2'."""
    text = ", ".join(str(rank) for rank in ranks)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"
