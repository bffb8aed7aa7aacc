"""Shapes and dtypes of a micro-batch, derived from the settings without reading data."""

from typing import NamedTuple

import torch

from gpipe_hpc.planner.costs.meta import META
from gpipe_hpc.settings import Config, DataConfig, Shape


class Sample(NamedTuple):
    """A micro-batch of tensors on the meta device, and the name of its loss."""

    inputs: torch.Tensor
    targets: torch.Tensor
    loss: str


def samples_per_microbatch(config: Config) -> int:
    """Return the number of samples of the largest micro-batch that the settings lead to."""
    pipeline, train = config.pipeline, config.train
    return -(
        -train.batch_size // (pipeline.num_replicas * pipeline.microbatches * train.accumulation)
    )


def microbatch(data: DataConfig, num_samples: int) -> Sample:
    """Return a micro-batch of `num_samples` meta tensors with the shapes of the data."""
    inputs, targets, loss = data.shapes(num_samples)
    return Sample(_empty(inputs), _empty(targets), loss)


def _empty(shape: Shape) -> torch.Tensor:
    return torch.empty(shape.sizes, dtype=getattr(torch, shape.dtype), device=META)
