"""One run of a table: the batch, the random keys and the loss function, and its results."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from gpipe_hpc.batches import Output, Pieces, Whole
from gpipe_hpc.comm.net.pickling import register_boundary_type
from gpipe_hpc.engine.layer_runner import LayerKey
from gpipe_hpc.engine.loss import LayerReports, LossTerm
from gpipe_hpc.models import LossFunction, microbatch_keys

register_boundary_type(Whole)


@dataclass(frozen=True)
class Run:
    """One run of a table: a training step, an evaluation or a prediction.

    Args:
        lane: ``training``, ``evaluation`` or ``prediction``; a channel remembers the structure of
            its tensors for each.
        keys: Returns a function for each micro-batch of this replica, which returns the random key
            of each layer.
        num_layers: The number of layers of the model, which is the layer index of the loss.
        inputs, targets: The data of each micro-batch; None if this rank does not use it.
        loss_fn: The loss function; None to return outputs instead of a loss.
        seed: The gradient that a backward starts from, a scalar; None for 1.
        step: The number of earlier steps.
        digests: Digests of the caller's data, if ranks compare them in this step.
        is_cut: The batch is divided into several micro-batches.
    """

    lane: str
    keys: Callable[[int], LayerKey]
    num_layers: int
    inputs: Pieces | None = None
    targets: Pieces | None = None
    loss_fn: LossFunction | None = None
    seed: torch.Tensor | None = None
    step: int = 0
    digests: Sequence[torch.Tensor | float] = ()
    is_cut: bool = False


@dataclass
class Outcome:
    """Results of a run of a table on this rank, without graphs.

    Attributes:
        losses, outputs: Results of the last stage, by micro-batch of this replica.
        noted: Losses and metrics that layers and the loss function added, by micro-batch.
        samples: The number of samples that passed each stage of this rank.
    """

    losses: dict[int, LossTerm] = field(default_factory=dict)
    outputs: dict[int, Output] = field(default_factory=dict)
    noted: dict[int, list[LayerReports]] = field(default_factory=lambda: defaultdict(list))
    samples: dict[int, int] = field(default_factory=lambda: defaultdict(int))


def random_keys(
    seed: int, step: int, microbatches: range, layers: Sequence[int]
) -> Callable[[int], LayerKey]:
    """Return the random keys of a step (see `docs/reference/random-keys.md`).

    The result maps a position in `microbatches`, a range of the global batch, to a function that
    maps a global layer index to its key.
    """
    keys = microbatch_keys(seed, step, microbatches, layers)
    return [of_layer.__getitem__ for of_layer in keys].__getitem__
