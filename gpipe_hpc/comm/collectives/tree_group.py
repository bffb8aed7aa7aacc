"""A hierarchy of small groups that together connect many ranks, for sums and objects.

Consecutive ranks form the groups of the lowest level; launchers usually place them on one host, and
the mesh into one pipeline. The first ranks of these groups form the groups of the next level, and
so on up to a single group. Each group is a full mesh, so a rank has at most (w - 1) log_w(n)
connections, and most ranks have w - 1.

    ranks 0 1 2 3 4 5 6 7 8 with w = 3:   level 0: 0 1 2 | 3 4 5 | 6 7 8     level 1: 0 3 6

Legend: n ranks, w the width of a group; positions count from 0 among the n.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from operator import add
from typing import Any, Final, TypeVar

import torch

from gpipe_hpc.comm.collectives.group import CollectiveHandle, CompletionCallbacks, ControlGroup

T = TypeVar("T")

WIDTH: Final = 8
"""Default size of a group, the usual number of accelerators of a host."""


def depth(num_ranks: int, width: int) -> int:
    """Return the number of levels, at least 1."""
    levels, reached = 1, width
    while reached < num_ranks:
        levels, reached = levels + 1, reached * width
    return levels


def own_tree_levels(num_ranks: int, position: int, width: int = WIDTH) -> list[range]:
    """Return the groups of which a position is a member, from the lowest level up, as positions.

    Only the first member of a group is also in a group of the next level. A group may have a single
    member.
    """
    assert width > 1, f"the width of a group must be at least 2, got {width}"
    found = []
    for level in range(depth(num_ranks, width)):
        stride = width**level
        if position % stride:
            break
        start = _subtree_start(position, level, width)
        found.append(range(start, min(start + stride * width, num_ranks), stride))
    return found


def _subtree_start(position: int, level: int, width: int) -> int:
    """Return the first position of the group of a level whose subtree contains a position."""
    stride: int = width ** (level + 1)
    return position - position % stride


class TreeGroup:
    """A `ControlGroup` built from the `groups` of `own_tree_levels`, the lowest level first.

    `below` lists the groups in which this rank receives results from the first member, the highest
    level first.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        position: int,
        groups: Sequence[ControlGroup],
        width: int = WIDTH,
    ) -> None:
        self.ranks = ranks
        self.size = len(ranks)
        self.position = position
        self.groups = tuple(groups)
        self.width = min(width, self.size)
        self._width = width
        has_highest = len(groups) == depth(self.size, width)
        # The group of the highest level needs no broadcast: all its members have the result.
        self.below = self.groups[: -1 if has_highest else None][::-1]

    def start_all_reduce(self, tensor: torch.Tensor) -> CollectiveHandle:
        """Start summing within the lowest group; `wait` sums over the higher levels."""
        return _HierarchicalAllReduce(self, tensor, self.groups[0].start_all_reduce(tensor))

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum level by level upwards and broadcast the result downwards."""
        self.all_reduce_hierarchical(tensor, lambda position: None)

    def all_reduce_hierarchical(self, tensor: torch.Tensor, between: Callable[[int], None]) -> None:
        """Sum level by level, calling `between` before each higher level; broadcast downwards."""
        for level, group in enumerate(self.groups):
            if level:
                between(group.position)
            group.all_reduce(tensor)
        self.broadcast_down(tensor)

    def all_reduce_max(self, tensor: torch.Tensor) -> None:
        """Compute the maximum level by level upwards and broadcast it downwards."""
        for group in self.groups:
            group.all_reduce_max(tensor)
        self.broadcast_down(tensor)

    def broadcast_down(self, tensor: torch.Tensor) -> None:
        """Broadcast `tensor` of the first rank to all ranks."""
        for group in self.below:
            group.broadcast(tensor, group.ranks[0])

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Broadcast a tensor from the root up the hierarchy and then down to all ranks."""
        for group, source in self._broadcast_path(root):
            group.broadcast(tensor, source)

    def broadcast_object(self, value: Any, root: int) -> Any:
        """Broadcast an object from the root up the hierarchy and then down to all ranks."""
        for group, source in self._broadcast_path(root):
            value = group.broadcast_object(value, source)
        return value

    def merge_object(self, value: T, merge: Callable[[T, T], T]) -> T:
        """Merge objects level by level upwards and broadcast the result downwards."""
        for group in self.groups:
            value = group.merge_object(value, merge)
        for group in self.below:
            value = group.broadcast_object(value, group.ranks[0])
        return value

    def all_gather_object(self, value: Any) -> list[Any]:
        """Concatenate the values of all ranks level by level and broadcast the list downwards."""
        return self.merge_object([value], add)

    def gather_object(self, value: Any, root: int) -> list[Any] | None:
        """Concatenate the values level by level and send the list from the top to the root."""
        values: list[Any] | None = [value]
        for group in self.groups:
            parts = group.gather_object(values, group.ranks[0])
            values = None if parts is None else reduce(add, parts)
            if values is None:
                break
        if root != self.ranks[0]:
            place = self.ranks.index(root)
            for level, group in reversed(list(enumerate(self.groups))):
                if self._is_above(level, place):
                    values = group.broadcast_object(values, group.ranks[0])
        return values if self.ranks[self.position] == root else None

    def scatter_object(self, values: Sequence[Any] | None, root: int) -> Any:
        """Scatter objects level by level; each group passes on the values of its subtrees."""
        assert root == self.ranks[0], f"rank {root} is not the first of {self.size} ranks"
        own: Sequence[Any] | None = values
        for level, group in reversed(list(enumerate(self.groups))):
            stride, parts = self._width**level, None
            if group.position == 0:
                assert own is not None, "the level above must have provided the values"
                parts = [own[start : start + stride] for start in range(0, len(own), stride)]
                # One part for each member's subtree.
                assert len(parts) == group.size, f"{len(parts)} parts for {group.size} ranks"
            own = group.scatter_object(parts, group.ranks[0])
        assert own is not None, "the lowest group must have provided a value"
        return own[0]

    def _broadcast_path(self, root: int) -> list[tuple[ControlGroup, int]]:
        """Return the groups, with their source ranks, in which this rank broadcasts from `root`.

        First, upwards, the groups whose subtree contains the root, then, downwards, all other
        groups.
        """
        place = self.ranks.index(root)
        first, then = [], []
        for level, group in enumerate(self.groups):
            if self._is_above(level, place):
                stride = self._width**level
                first.append((group, self.ranks[place - place % stride]))
            else:
                then.append((group, group.ranks[0]))
        return first + then[::-1]

    def _is_above(self, level: int, position: int) -> bool:
        """Return whether the subtree below this rank's group of a level contains `position`."""
        return _subtree_start(position, level, self._width) == _subtree_start(
            self.position, level, self._width
        )


class _HierarchicalAllReduce:
    """An all-reduce in progress, first within the lowest group."""

    def __init__(self, levels: TreeGroup, tensor: torch.Tensor, lowest: CollectiveHandle) -> None:
        self._levels, self._tensor, self._lowest = levels, tensor, lowest
        self._calls = CompletionCallbacks()

    def when_done(self, call: Callable[[], None]) -> None:
        """Run `call` once `wait` has completed."""
        self._calls.add(call)

    def wait(self) -> None:
        """Sum over the higher levels and broadcast the result downwards."""
        self._lowest.wait()
        for group in self._levels.groups[1:]:
            group.all_reduce(self._tensor)
        self._levels.broadcast_down(self._tensor)
        self._calls.make()
