"""What a rank's optimizer holds of a parameter."""

from typing import NamedTuple

import torch
from torch import nn

from gpipe_hpc.engine.outer.division import Division


class Share(NamedTuple):
    """Elements of a parameter, in a row, that the copy of its stage at `position` has."""

    position: int
    start: int
    stop: int


class Row(NamedTuple):
    """Where a parameter lies in a row of elements that is divided over copies: from `first` on."""

    division: Division
    first: int


class Held(NamedTuple):
    """What this rank updates of a parameter: all of it, or some of its elements in a row.

    `parameter` is what an optimizer steps on and keeps state for: `whole` itself, or a
    one-dimensional view of its elements from `start` on. `row`: where others have theirs of it.
    """

    parameter: nn.Parameter
    whole: nn.Parameter
    start: int = 0
    row: Row | None = None

    @classmethod
    def all_of(cls, parameter: nn.Parameter) -> "Held":
        """Return that this rank updates a parameter as it is."""
        return cls(parameter, parameter)

    @property
    def stop(self) -> int:
        """Return where its elements end."""
        return self.start + self.parameter.numel()

    @property
    def is_view(self) -> bool:
        """Say whether `parameter` is a row of elements of `whole`, not `whole` itself."""
        return self.parameter is not self.whole

    @property
    def is_part(self) -> bool:
        """Say whether other ranks have some of the elements."""
        return self.parameter.numel() < self.whole.numel()

    @property
    def shares(self) -> list[Share]:
        """Return what each copy has of a parameter that is a part here, the first elements first.

        Every copy counts the same, and asks no other.
        """
        assert self.row is not None, "a parameter in one piece is not shared"
        division, first = self.row
        last = first + self.whole.numel()
        spans = ((each, division.span(each)) for each in division.holders(first, last))
        return [
            Share(position, max(begin, first) - first, min(end, last) - first)
            for position, (begin, end) in spans
        ]

    def goes_along(self, state: torch.Tensor) -> bool:
        """Say whether a tensor of an optimizer's state has a number for each element held."""
        return self.is_view and state.shape == self.parameter.shape

    def part_of(self, state: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a state of the whole parameter: a view where it can be."""
        if self.is_view and state.shape == self.whole.shape:
            return state.reshape(-1)[self.start : self.stop]
        return state
