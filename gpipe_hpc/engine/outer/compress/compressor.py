"""What a compressor is."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch

from gpipe_hpc.comm.group import Group
from gpipe_hpc.engine.outer.items import Item


class Task(NamedTuple):
    """What a compressor is to sum over `group`: the items of a bucket.

    `key`: of all randomness, another one for each copy, step and bucket (0 <= key < 2**63).
    """

    group: Group
    items: tuple[Item, ...]
    key: int


class Compressor(Protocol):
    """Sums flat tensors over the copies of a stage in fewer bytes."""

    def sum(self, own: torch.Tensor, task: Task) -> torch.Tensor:
        """Return about the sum of every copy's `own`, float32[n] or float64[n]: a new tensor.

        All copies get the same bits. Leaves in `own` what of it, or of the sum, is not in the
        result: what all copies are left with and the result together are what they came with.
        Called by all copies at the same turn, maybe on a thread beside the main one.
        """

    def state(self) -> Mapping[str, torch.Tensor]:
        """Return what it keeps from step to step, the same on all copies, by parameter."""

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on with what a checkpoint kept."""


class Stateless:
    """A compressor that keeps nothing from step to step."""

    def state(self) -> Mapping[str, torch.Tensor]:
        """Return nothing."""
        return {}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take nothing."""
