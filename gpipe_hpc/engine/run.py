"""One run of a table: the batch, the random keys and the loss that it uses, and its outcome."""

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
    """One run of a table: a step, or an evaluation. None for what this rank does not need.

    Args:
        lane: "training" or "evaluation", which expect other tensors of a channel.
        keys: Returns, for a micro-batch of this replica, the random key of each layer.
        num_layers: Of the whole model; the key after them is that of the loss.
        inputs, targets: By micro-batch.
        loss_fn: None if the outputs themselves are wanted.
        seed: The gradient that backward starts from, a scalar; None for 1.
        step: How many steps were done before.
        digests: Of the caller's data, if ranks compare them in this step.
        is_cut: The batch is trained on in several pieces.
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
    """Results of a run of a table on this rank, by micro-batch of this replica; without graphs.

    `losses` and `outputs` come from the last stage. `noted`: reports of layers, and of the loss as
    the layer after the last. `samples`: the number that passed each stage of this rank.
    """

    losses: dict[int, LossTerm] = field(default_factory=dict)
    outputs: dict[int, Output] = field(default_factory=dict)
    noted: dict[int, list[LayerReports]] = field(default_factory=lambda: defaultdict(list))
    samples: dict[int, int] = field(default_factory=lambda: defaultdict(int))


def random_keys(
    seed: int, step: int, microbatches: range, layers: Sequence[int]
) -> Callable[[int], LayerKey]:
    """Return the published keys of a step: of `layers`, for `microbatches` of the global batch."""
    keys = microbatch_keys(seed, step, microbatches, layers)
    return [of_layer.__getitem__ for of_layer in keys].__getitem__
