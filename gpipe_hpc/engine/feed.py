"""What a run works on, cut into micro-batches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from gpipe_hpc.comm.nests import Nest
from gpipe_hpc.engine.loss import LossFunction
from gpipe_hpc.engine.microbatches import cut, num_samples_of, share_of
from gpipe_hpc.engine.state.keyed import LayerKey
from gpipe_hpc.models import microbatch_keys


@dataclass
class Feed:
    """What a run works on. Lists are by micro-batch; None where this rank needs none."""

    lane: str  # keeps apart what training and evaluation expect of a channel
    keys: Callable[[int], LayerKey]  # micro-batch of this replica -> key of each layer
    inputs: Sequence[Nest] | None = None
    num_samples: Sequence[int] | None = None
    targets: Sequence[Nest] | None = None
    target_samples: Sequence[int] | None = None
    seed: torch.Tensor | None = None  # the gradient that backward starts from, a scalar
    loss_fn: LossFunction | None = None  # None: the outputs themselves are wanted

    def give_inputs(self, inputs: Nest, num_microbatches: int) -> None:
        """Cut the inputs of this replica's share; DataError if they have no samples to cut."""
        self.inputs = cut(inputs, num_microbatches, "inputs")
        self.num_samples = _sizes(inputs, num_microbatches, "inputs")

    def give_targets(self, targets: Nest, num_microbatches: int) -> None:
        """Cut the targets of this replica's share."""
        self.targets = cut(targets, num_microbatches, "targets")
        self.target_samples = _sizes(targets, num_microbatches, "targets")


def random_keys(
    seed: int, step: int, microbatches: range, layers: Sequence[int]
) -> Callable[[int], LayerKey]:
    """Return the published keys of a step: of `layers`, for `microbatches` of the global batch."""
    keys = microbatch_keys(seed, step, microbatches, layers)
    return lambda microbatch: keys[microbatch].__getitem__


def _sizes(batch: Nest, num_microbatches: int, what: str) -> list[int]:
    total = num_samples_of(batch, what)
    slices = [share_of(total, num_microbatches, m, 1) for m in range(num_microbatches)]
    return [piece.stop - piece.start for piece in slices]
