"""Collectives over a fixed set of ranks."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist


class Pending(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Return when the result is in place (on CUDA: when the current stream may use it)."""


class Group(Protocol):
    """A set of world ranks that call the same collectives in the same order."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the world ranks of the group, ascending."""

    @property
    def size(self) -> int:
        """Return the number of ranks."""

    @property
    def torch_group(self) -> dist.ProcessGroup | None:
        """Return the torch process group behind it, None where ranks are threads or one."""

    def start_all_reduce(self, tensor: torch.Tensor) -> Pending:
        """Start summing `tensor` in place over the group."""

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum `tensor` in place over the group."""

    def all_reduce_max(self, tensor: torch.Tensor) -> None:
        """Put the greatest value of each element over the group in its place."""

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Fill `tensor` with world rank `root`'s."""

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order.

        Plain values, tensors and records alone; others raise DataError, by type, on who sends.
        """

    def gather_object(self, value: Any, root: int) -> list[Any] | None:
        """Return every rank's value, in rank order, on world rank `root`; None elsewhere.

        Each rank sends its own value alone. Values as for `all_gather_object`.
        """

    def broadcast_object(self, value: Any, root: int) -> Any:
        """Return world rank `root`'s value on every rank; what others give is passed over.

        It travels once to each rank, along a tree. Values as for `all_gather_object`.
        """


class Done:
    """A collective that needed no waiting."""

    def wait(self) -> None:
        """Return at once."""


class SoloGroup:
    """The group of one rank: every collective is the identity."""

    def __init__(self, rank: int) -> None:
        self.ranks: tuple[int, ...] = (rank,)
        self.size = 1
        self.torch_group: dist.ProcessGroup | None = None

    def start_all_reduce(self, tensor: torch.Tensor) -> Pending:
        """Leave `tensor` as it is."""
        return Done()

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Leave `tensor` as it is."""

    def all_reduce_max(self, tensor: torch.Tensor) -> None:
        """Leave `tensor` as it is."""

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Leave `tensor` as it is."""

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the one value."""
        return [value]

    def gather_object(self, value: Any, root: int) -> list[Any] | None:
        """Return the one value."""
        return [value]

    def broadcast_object(self, value: Any, root: int) -> Any:
        """Return the one value."""
        return value


def broadcast_object(group: Group, value: Any, root: int) -> Any:
    """Return world rank `root`'s value on every rank of the group."""
    return group.broadcast_object(value, root)


def rank_names(ranks: Sequence[int]) -> str:
    """Return ranks for a message: 'rank 3' or 'ranks 1, 2'."""
    text = ", ".join(str(rank) for rank in ranks)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"
