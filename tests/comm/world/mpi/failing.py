"""A script whose rank 2 fails in its fourth step, in the way that its argument names."""

import os
import signal
import sys

import torch
from torch import nn

from gpipe_hpc import LayerSpec, Pipeline
from gpipe_hpc.comm.world.start import start_world
from tests.support import mean_square

world = start_world(backend="mpi", shares_memory=False, timeout_s=90)
layers = [LayerSpec(nn.Linear, 4, 4) for _ in range(8)]
pipe = Pipeline(layers, mean_square, stages=world.size, microbatches=4, world=world)
for step in range(1, 200):
    if step == 4 and world.rank == 2:
        if sys.argv[1] == "raises":
            raise ValueError("a mistake of the user")
        if sys.argv[1] == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        sys.exit(3)
    pipe.step(torch.ones(8, 4), torch.ones(8, 4))
