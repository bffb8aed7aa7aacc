"""gpipe_hpc from launch to the end of the first step; started by torchrun, timed by startup.py."""

import sys
from pathlib import Path

import torch
from torch import nn

from gpipe_hpc import Pipeline

WIDTH, BATCH, MICROBATCHES = 512, 64, 4


def main() -> None:
    layers = [part for _ in range(8) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    pipe = Pipeline(
        layers, nn.functional.mse_loss, stages=2, microbatches=MICROBATCHES, recompute="never"
    )
    optimizer = torch.optim.SGD(pipe.parameters(), lr=1e-3)
    pipe.step(torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH))
    optimizer.step()
    Path(f"{sys.argv[1]}.{pipe.world.rank}").touch()


if __name__ == "__main__":
    main()
