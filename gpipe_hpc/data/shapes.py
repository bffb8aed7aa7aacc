"""What a micro-batch of the settings looks like: nothing is read, so data need not be there."""

from typing import NamedTuple

import torch

from gpipe_hpc.planner.costs.meta import META
from gpipe_hpc.settings import Config, DataConfig, Shape


class Sample(NamedTuple):
    """A micro-batch without values, and the name of the loss that goes with it."""

    inputs: torch.Tensor
    targets: torch.Tensor
    loss: str


def samples_per_microbatch(config: Config) -> int:
    """Return how many samples the largest micro-batch has."""
    pipeline, train = config.pipeline, config.train
    return -(
        -train.batch_size // (pipeline.num_replicas * pipeline.microbatches * train.accumulation)
    )


def microbatch(data: DataConfig, num_samples: int) -> Sample:
    """Return a micro-batch of the shapes that this kind of data has."""
    inputs, targets, loss = data.shapes(num_samples)
    return Sample(_empty(inputs), _empty(targets), loss)


def _empty(shape: Shape) -> torch.Tensor:
    return torch.empty(shape.sizes, dtype=getattr(torch, shape.dtype), device=META)
