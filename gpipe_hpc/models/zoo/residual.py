"""Shortcuts around a few layers: one layer stashes, a later one pops and adds."""

from torch import Tensor, nn


class Stash(nn.Module):
    """Hand the input on and stash it for a later layer: x -> (x, x)."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input twice."""
        return x, x


class Add(nn.Module):
    """End a shortcut: add what was stashed, of the same shape."""

    def forward(self, x: Tensor, shortcut: Tensor) -> Tensor:
        """Return the sum."""
        return x + shortcut


class ProjectedAdd(nn.Module):
    """End a shortcut that changes shape: add what was stashed, once `projection` has mapped it."""

    def __init__(self, projection: nn.Module) -> None:
        super().__init__()
        self.projection = projection

    def forward(self, x: Tensor, shortcut: Tensor) -> Tensor:
        """Return the sum."""
        projected: Tensor = self.projection(shortcut)
        return x + projected
