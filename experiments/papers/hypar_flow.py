"""Awan et al., HyPar-Flow, ISC 2020 (arXiv 1911.05146)."""

from typing import Final

import torch

from experiments.papers.table import Figure, Paper, Table, counted
from gpipe_hpc.models import count_parameters
from gpipe_hpc.models.zoo.names import build_model
from gpipe_hpc.planner.costs.counted import count_model

_GB: Final = 1e9
# Memory of ResNet-1k at batch 1 by the side of the image, in GB.
MEMORY_GB: Final = {224: 16.8, 720: 153.0}


def parameters() -> Table:
    """Size of the model."""
    number = count_parameters(build_model("resnet1001_v2"))
    return Table(
        "Parameters of ResNet-1001",
        "30 million",
        "the model of Keras' example, with biases",
        (counted("ResNet-1001-v2, millions", "30", number, 1e6),),
    )


def memory() -> Table:
    """Memory of a single image."""
    held: dict[int, float] = {}
    for side in MEMORY_GB:
        images = torch.empty((1, 3, side, side), device="meta")
        model = count_model(build_model("resnet1001_v2", num_classes=1000), images)
        held[side] = sum(each.activation_bytes for each in model.layers) / _GB
        weights = 3 * 4 * model.parameters / _GB
    small, large = MEMORY_GB
    factor = (MEMORY_GB[small] - weights) / held[small]
    ours = factor * held[large] + weights
    return Table(
        "ResNet-1k at batch 1: memory",
        "the images' sides, 224 and 720 pixels, and the memory at 224",
        f"12 bytes per parameter; TensorFlow keeps {factor:.2f} times the activations that we "
        f"count, derived from the figure at 224 pixels, which is therefore not compared",
        (Figure("720 x 720, GB", MEMORY_GB[large], ours),),
        "activations are proportional to the pixels, 10.3 times as many; the paper's figures grow "
        "9.1 times, so a part of the first is not activations. For its speedups (110 times on 128 "
        "nodes, 481 times on 512), the times of layers and links are not given",
    )


PAPER: Final = Paper(
    "hypar_flow",
    "HyPar-Flow: Awan et al., ISC 2020",
    counts=(parameters,),
    simulated=(memory,),
)
