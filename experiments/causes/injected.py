"""A model and data with known sleep times, independent of other load on the machine."""

import os
import time
from typing import Any

import torch
from torch import nn

from gpipe_hpc import LayerSpec

WIDTH = 8


class _Pause(torch.autograd.Function):
    """Identity function whose backward sleeps."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None


class Sleeper(nn.Module):
    """A linear layer that sleeps `forward_s` in its forward and `backward_s` in its backward.

    On world rank `slow_rank` both times are multiplied by `factor`. `saving_s` is the time to
    return its state for a checkpoint.
    """

    def __init__(
        self,
        forward_s: float,
        backward_s: float,
        slow_rank: int | None = None,
        factor: float = 1.0,
        saving_s: float = 0.0,
    ) -> None:
        super().__init__()
        self._linear = nn.Linear(WIDTH, WIDTH)
        times = factor if int(os.environ.get("RANK", "0")) == slow_rank else 1.0
        self._forward_s, self._backward_s = times * forward_s, times * backward_s
        self._saving_s = saving_s

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Sleep, then apply the linear layer."""
        time.sleep(self._forward_s)
        paused: torch.Tensor = _Pause.apply(self._linear(value), self._backward_s)
        return paused

    def get_extra_state(self) -> torch.Tensor:
        """Return a state after a delay, like a slow disk."""
        time.sleep(self._saving_s)
        return torch.zeros(1)

    def set_extra_state(self, state: torch.Tensor) -> None:
        """Ignore the state."""


def build(
    num_layers: int = 8,
    forward_s: float = 0.025,
    backward_s: float = 0.05,
    slow_layer: int | None = None,
    more_s: float = 0.0,
    slow_rank: int | None = None,
    factor: float = 1.0,
    saving_s: float = 0.0,
) -> list[LayerSpec]:
    """Return the model; layer `slow_layer` sleeps `more_s` longer in its forward."""
    return [
        LayerSpec(
            Sleeper,
            forward_s + (more_s if index == slow_layer else 0.0),
            backward_s,
            slow_rank,
            factor,
            saving_s if index == 0 else 0.0,
        )
        for index in range(num_layers)
    ]


class SlowItems:
    """A dataset whose items take `sleep_s` each to read."""

    def __init__(self, num_items: int = 2000, sleep_s: float = 0.0) -> None:
        self._num_items, self._sleep_s = num_items, sleep_s

    def __len__(self) -> int:
        """Return the number of items."""
        return self._num_items

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return an input vector and its target."""
        time.sleep(self._sleep_s)
        return torch.full((WIDTH,), index / self._num_items), torch.zeros(WIDTH)


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the mean squared error."""
    return nn.functional.mse_loss(output, target)
