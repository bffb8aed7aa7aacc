"""The ways to sum a bucket of gradients over the copies of a stage."""

from collections.abc import Sequence
from typing import Protocol

import torch

from gpipe_hpc.comm.group import Group, Pending
from gpipe_hpc.engine.outer.hierarchical import hierarchical
from gpipe_hpc.engine.outer.items import Item
from gpipe_hpc.engine.outer.settings import Outer


class Way(Protocol):
    """Sums flat tensors over the copies of a stage; all copies start the same ones in one order."""

    def start(self, flat: torch.Tensor, items: Sequence[Item] = ()) -> Pending:
        """Start summing in place; the sum is there when what is returned has been waited for.

        `items`: what lies in the buffer.
        """


class AllReduce:
    """The backend's own allreduce: the same bits on all copies, in an order of its choice."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def start(self, flat: torch.Tensor, items: Sequence[Item] = ()) -> Pending:
        """Start summing over the group, in place."""
        return self._group.start_all_reduce(flat)


class InRankOrder:
    """Each element is summed in the order of ranks, wherever it lies."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def start(self, flat: torch.Tensor, items: Sequence[Item] = ()) -> Pending:
        """Start summing over the group, in place."""
        return self._group.start_ordered_all_reduce(flat)


class ReduceScatter:
    """Each copy gets its equal part of the sum alone; the rest of the buffer means nothing then.

    `in_rank_order`: each element is added in the order of ranks, as with `order` in `Outer`.
    """

    def __init__(self, group: Group, *, in_rank_order: bool) -> None:
        self._group, self._in_rank_order = group, in_rank_order

    def start(self, flat: torch.Tensor, items: Sequence[Item] = ()) -> Pending:
        """Start summing this copy's part, in place; the buffer divides evenly."""
        if not self._in_rank_order:
            return self._group.start_reduce_scatter(flat)
        return self._group.start_ordered_reduce_scatter(flat)


def way_of_tie(outer: Outer, group: Group) -> Way | None:
    """Return the way for a tied parameter, whose copies lie on several stages; None for one copy.

    One parameter at a time: of the settings only the order of summing counts.
    """
    if group.size == 1:
        return None
    return InRankOrder(group) if outer.order == "rank" else AllReduce(group)


def choose_way(outer: Outer, group: Group) -> Way:
    """Return the way that the settings ask for; the same call on all copies.

    Raises ConfigError for a hierarchy that does not fit the number of copies.
    """
    if outer.shard == "flat":
        return ReduceScatter(group, in_rank_order=outer.order == "rank")
    if outer.hierarchy != "none":
        outer.check_copies(group.size)
        return hierarchical(group, outer.hierarchy)
    return InRankOrder(group) if outer.order == "rank" else AllReduce(group)
