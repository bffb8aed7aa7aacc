"""A model for exercise 15, one of whose ranks dies during the eighth step."""

import os
import signal
import time

import torch
from torch import nn

from gpipe_hpc import LayerSpec


class Mortal(nn.Module):
    """A linear layer that ends its process without a message on rank 1 of a launched run."""

    def __init__(self, width: int, dies_at_forward: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.forwards_left = dies_at_forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if os.environ.get("RANK") == "1":
            self.forwards_left -= 1
            if self.forwards_left == 0:
                print(f"rank 1 is killed at {time.time():.3f}", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
        return torch.relu(self.linear(x))


def build(width: int = 64, step: int = 8, microbatches: int = 4) -> list[LayerSpec]:
    """Return four layers; the third dies in the given step, at its first micro-batch."""
    dies_at = (step - 1) * microbatches + 1
    return [
        LayerSpec(nn.Linear, width, width),
        LayerSpec(nn.Linear, width, width),
        LayerSpec(Mortal, width, dies_at),
        LayerSpec(nn.Linear, width, 10),
    ]
