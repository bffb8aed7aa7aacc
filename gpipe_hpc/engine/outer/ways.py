"""The ways to sum a bucket of gradients over the copies of a stage."""

from collections.abc import Sequence
from typing import Protocol

import torch

from gpipe_hpc.comm.group import Group, Pending
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


def choose_way(outer: Outer, group: Group) -> Way:
    """Return the way that the settings ask for."""
    return AllReduce(group)
