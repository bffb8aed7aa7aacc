"""Layers for residual shortcuts: one layer stashes its input, and a later one pops and adds it."""

from torch import Tensor, nn


class Stash(nn.Module):
    """Layer that returns its input and also stashes it for a later layer: x -> (x, x)."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input twice."""
        return x, x


class Add(nn.Module):
    """Layer that adds a stashed tensor of the same shape."""

    def forward(self, x: Tensor, shortcut: Tensor) -> Tensor:
        """Return the sum."""
        return x + shortcut


class ProjectedAdd(nn.Module):
    """Layer that adds a stashed tensor after `projection` has changed its shape."""

    def __init__(self, projection: nn.Module) -> None:
        super().__init__()
        self.projection = projection

    def forward(self, x: Tensor, shortcut: Tensor) -> Tensor:
        """Return the input plus the projected shortcut."""
        projected: Tensor = self.projection(shortcut)
        return x + projected
