"""A user's model for `model._target_`: layers with state that their forward changes."""

import random

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gpipe_hpc import LayerSpec


class Averaged(nn.Module):
    """Subtract a moving average of the inputs, which is a buffer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.mean.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)
        return torch.tanh(self.linear(x - self.mean))


class Counting(nn.Module):
    """Scale by the number of calls, a plain attribute that checkpoints do not contain."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return torch.tanh(self.linear(x) * (1 + 0.1 * self.count))


class InnerNorm(nn.Module):
    """BatchNorm within the layer's own activation checkpointing."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


class Dropped(nn.Module):
    """Dropout, which draws from torch's generator."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.dropout(torch.relu(self.linear(x)), 0.3, self.training)


class Remembering(nn.Module):
    """Layer whose extra state is a number."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.seen = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen = 7
        return torch.relu(self.linear(x))


class Plain(nn.Module):
    """A linear layer with ReLU and no state."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


class Drawing(nn.Module):
    """Draw from Python's and NumPy's generators and from a generator in an attribute."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.generator = torch.Generator()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(x.shape, generator=self.generator)
        return torch.relu(self.linear(x) * (random.random() + np.random.rand()) + 0.1 * noise)


class Masking(nn.Module):
    """Pass on a mask without gradient; scale by whether the received mask requires grad."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, given: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        x, mask = given if isinstance(given, tuple) else (given, (given.detach() > 0).float())
        scale = 2.0 if mask.requires_grad else 1.0
        return torch.tanh(self.linear(x)) * scale + mask.mean(), mask.detach()


class Scratch(nn.Module):
    """Return the same memory in each forward without gradient, overwritten in place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.memory: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(x))
        if not self.training or y.requires_grad:
            return y
        if self.memory is None or self.memory.shape != y.shape:
            self.memory = torch.empty_like(y)
        return self.memory.copy_(y)


class First(nn.Module):
    """Return the first element of a tuple."""

    def forward(self, given: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
        return given[0] if isinstance(given, tuple) else given


def spectral(width: int) -> nn.Module:
    """Return a linear layer with spectral norm, whose forward updates buffers."""
    return nn.utils.parametrizations.spectral_norm(nn.Linear(width, width))


KINDS = {
    "averaged": Averaged,
    "counting": Counting,
    "inner_norm": InnerNorm,
    "dropped": Dropped,
    "remembering": Remembering,
    "plain": Plain,
    "spectral": spectral,
    "drawing": Drawing,
    "masking": Masking,
    "scratch": Scratch,
}


def build(kind: str = "plain", width: int = 16, depth: int = 4) -> list[LayerSpec]:
    """Return `depth` layers of a kind between two linear layers."""
    inner = [LayerSpec(KINDS[kind], width) for _ in range(depth)]
    ends = [LayerSpec(First), LayerSpec(nn.Linear, width, 4)]
    return [LayerSpec(nn.Linear, 16, width), *inner, *ends]
