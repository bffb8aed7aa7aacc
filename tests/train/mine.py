"""A user's model: the layer of one stage fails in a chosen way at its n-th call."""

import ctypes
import os
import re
import signal
import time
from pathlib import Path

import torch
from torch import nn

from gpipe_hpc import LayerSpec

# Arguments that train this model.
MINE = (
    "model=mlp",
    "model._target_=mine.build",
    "data=synthetic_vectors",
    "data.width=8",
    "data.num_classes=8",
    "train.batch_size=8",
    "train.steps=6",
    "train.validate_every=0",
    "pipeline.microbatches=4",
    "pipeline.partition=uniform",
    "pipeline.recompute=never",
    "run.dir=run",
)


class Fault(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("what the user got wrong")


def fork_and_die(seconds):
    """Fork a process that survives, and kill this one."""
    child = os.fork()
    if child == 0:
        time.sleep(seconds)
        os._exit(0)
    Path("child").write_text(str(child))
    os.kill(os.getpid(), signal.SIGKILL)


class Layer(nn.Module):
    def __init__(self, kind, at, seconds):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.kind, self.at, self.seconds, self.num_calls = kind, at, seconds, 0

    def forward(self, x):
        self.num_calls += self.training
        y = self.linear(x)
        if self.num_calls != self.at:
            return y
        match self.kind:
            case "poison":
                return y * float("nan")
            case "forward":
                raise ValueError("what the user got wrong")
            case "backward":
                return Fault.apply(y)
            case "sleep":
                time.sleep(self.seconds)
            case "lock":
                ctypes.PyDLL(None).sleep(int(self.seconds))  # does not release the GIL
            case "regex":
                re.fullmatch("(a+)+b", "a" * 100)  # does not release the GIL and never ends
            case "orphan":
                fork_and_die(self.seconds)
        return y


def build(kind="none", stage=0, at=7, seconds=3600.0):
    return [LayerSpec(Layer, kind if i == stage else "none", at, seconds) for i in range(4)]


def fail(**kwargs):
    raise RuntimeError("no model today")
