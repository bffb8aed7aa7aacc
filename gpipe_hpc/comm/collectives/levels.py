"""Many ranks as levels of small groups, for sums and objects.

Ranks that follow one another, which launchers put on one host and our mesh into one pipeline, are a
group of the lowest level; the first ranks of these groups are groups of the next; and so on up to
one group. Each is a full mesh of few, so of n ranks one has at most (w - 1) log_w(n) connections,
and most have w - 1.

    ranks 0 1 2 3 4 5 6 7 8 with w = 3:   level 0: 0 1 2 | 3 4 5 | 6 7 8     level 1: 0 3 6

Legend: n ranks, w the width of a group; positions count from 0 among the n.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from operator import add
from typing import Any, Final, TypeVar

import torch

from gpipe_hpc.comm.collectives.group import Calls, Gathering, Pending

T = TypeVar("T")

WIDTH: Final = 8
"""The usual ranks of a group: the accelerators of a host. No more ranks than that are one group."""


def depth(num_ranks: int, width: int) -> int:
    """Return the number of levels, 1 at least."""
    levels, reached = 1, width
    while reached < num_ranks:
        levels, reached = levels + 1, reached * width
    return levels


def own_levels(num_ranks: int, position: int, width: int = WIDTH) -> list[range]:
    """Return the groups that a position is in, from the lowest level up, as positions.

    The first of a group is in one of the next level too, and nobody else is. A group may have one
    member alone.
    """
    assert width > 1, f"groups of {width} never become one"
    found = []
    for level in range(depth(num_ranks, width)):
        stride = width**level
        if position % stride:
            break
        start = _block(position, level, width)
        found.append(range(start, min(start + stride * width, num_ranks), stride))
    return found


def _block(position: int, level: int, width: int) -> int:
    """Return the first position of the group of a level that looks after a position."""
    stride: int = width ** (level + 1)
    return position - position % stride


class Levels:
    """A `Gathering` of ranks by way of `groups`, those of `own_levels`, the lowest first.

    `below`: those in which this rank learns from the first what all know, the highest first.
    """

    def __init__(
        self, ranks: Sequence[int], position: int, groups: Sequence[Gathering], width: int = WIDTH
    ) -> None:
        self.ranks = ranks
        self.size = len(ranks)
        self.position = position
        self.groups = tuple(groups)
        self.width = min(width, self.size)
        self._width = width
        has_highest = len(groups) == depth(self.size, width)
        # In the group of the highest level all learn the whole together.
        self.below = self.groups[: -1 if has_highest else None][::-1]

    def start_all_reduce(self, tensor: torch.Tensor) -> Pending:
        """Start summing within the lowest group; `wait` does the rest."""
        return _Climb(self, tensor, self.groups[0].start_all_reduce(tensor))

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum within each group upwards, and bring the sum down again."""
        self.start_all_reduce(tensor).wait()

    def climb(self, tensor: torch.Tensor, between: Callable[[int], None]) -> None:
        """Sum within each group upwards, `between` in between, and bring the sum down again."""
        for level, group in enumerate(self.groups):
            if level:
                between(group.position)
            group.all_reduce(tensor)
        self.hand_down(tensor)

    def all_reduce_max(self, tensor: torch.Tensor) -> None:
        """Find the greatest within each group upwards, and bring it down again."""
        for group in self.groups:
            group.all_reduce_max(tensor)
        self.hand_down(tensor)

    def hand_down(self, tensor: torch.Tensor) -> None:
        """Fill `tensor` with what the first of the ranks has."""
        for group in self.below:
            group.broadcast(tensor, group.ranks[0])

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Bring a tensor from the root upwards, and from there down to all."""
        for group, source in self._way_from(root):
            group.broadcast(tensor, source)

    def broadcast_object(self, value: Any, root: int) -> Any:
        """Bring an object from the root upwards, and from there down to all."""
        for group, source in self._way_from(root):
            value = group.broadcast_object(value, source)
        return value

    def merge_object(self, value: T, merge: Callable[[T, T], T]) -> T:
        """Merge within each group upwards, and bring the result down again."""
        for group in self.groups:
            value = group.merge_object(value, merge)
        for group in self.below:
            value = group.broadcast_object(value, group.ranks[0])
        return value

    def all_gather_object(self, value: Any) -> list[Any]:
        """Put all values one behind the other upwards, and bring them down again."""
        return self.merge_object([value], add)

    def gather_object(self, value: Any, root: int) -> list[Any] | None:
        """Put all values one behind the other upwards; from the top they go to the root."""
        values: list[Any] | None = [value]
        for group in self.groups:
            parts = group.gather_object(values, group.ranks[0])
            values = None if parts is None else reduce(add, parts)
            if values is None:
                break
        if root != self.ranks[0]:
            place = self.ranks.index(root)
            for level, group in reversed(list(enumerate(self.groups))):
                if self._looks_after(level, place):
                    values = group.broadcast_object(values, group.ranks[0])
        return values if self.ranks[self.position] == root else None

    def deal_object(self, values: Sequence[Any] | None, root: int) -> Any:
        """Deal what each group looks after to its members, from the highest level down."""
        assert root == self.ranks[0], f"rank {root} is not the first of {self.size} ranks"
        own: Sequence[Any] | None = values
        for level, group in reversed(list(enumerate(self.groups))):
            stride, parts = self._width**level, None
            if group.position == 0:
                assert own is not None, "it came from the level above"
                parts = [own[start : start + stride] for start in range(0, len(own), stride)]
                # A group of a level looks after as many ranks as its first has values for.
                assert len(parts) == group.size, f"{len(parts)} parts for {group.size} ranks"
            own = group.deal_object(parts, group.ranks[0])
        assert own is not None, "the lowest group has dealt"
        return own[0]

    def _way_from(self, root: int) -> list[tuple[Gathering, int]]:
        """Return in which groups, in order, and from which rank what the root has reaches all.

        First upwards in the groups that look after the root, then down in all others.
        """
        place = self.ranks.index(root)
        first, then = [], []
        for level, group in enumerate(self.groups):
            if self._looks_after(level, place):
                stride = self._width**level
                first.append((group, self.ranks[place - place % stride]))
            else:
                then.append((group, group.ranks[0]))
        return first + then[::-1]

    def _looks_after(self, level: int, position: int) -> bool:
        """Say whether this rank's group of a level is the one above a position."""
        return _block(position, level, self._width) == _block(self.position, level, self._width)


class _Climb:
    """A sum under way: within the lowest group at first."""

    def __init__(self, levels: Levels, tensor: torch.Tensor, lowest: Pending) -> None:
        self._levels, self._tensor, self._lowest = levels, tensor, lowest
        self._calls = Calls()

    def when_done(self, call: Callable[[], None]) -> None:
        """Call this once it was waited for."""
        self._calls.add(call)

    def wait(self) -> None:
        """Sum over the higher levels, and bring the sum down."""
        self._lowest.wait()
        for group in self._levels.groups[1:]:
            group.all_reduce(self._tensor)
        self._levels.hand_down(self._tensor)
        self._calls.make()
