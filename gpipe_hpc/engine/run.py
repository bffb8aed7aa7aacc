"""What one run of a table works on; frozen, and handed to each action."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from gpipe_hpc.comm.nests import Nest
from gpipe_hpc.comm.transport.base import Message
from gpipe_hpc.engine.batch.cutting import Pieces
from gpipe_hpc.engine.batch.intake import Intake
from gpipe_hpc.engine.state.keyed import LayerKey
from gpipe_hpc.engine.sums.loss import LossFunction
from gpipe_hpc.errors import DataError
from gpipe_hpc.models import microbatch_keys


@dataclass(frozen=True)
class Run:
    """What a run works on; None where this rank needs none.

    `lane` keeps apart what training and evaluation expect of a channel. `keys` gives, for a
    micro-batch of this replica, the key of each layer. `inputs`, `targets`: by micro-batch.
    `num_layers`: of the whole model; behind them the loss has a key, too. `loss_fn`: None if the
    outputs themselves are wanted. `seed`: the gradient that backward starts from, a scalar; None
    for 1. `step`: how many were done before. `digests`: of what the caller has given, if due.
    `is_cut`: a batch is trained on in several pieces.
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

    def input(self, microbatch: int, intake: Intake) -> Message:
        """Return what the first stage is given of a micro-batch."""
        assert self.inputs is not None, "checked before the run"
        nests, sizes = self.inputs
        return Message(intake.bring(nests[microbatch]), sizes[microbatch])

    def target(self, microbatch: int, num_samples: int, intake: Intake) -> Nest:
        """Return what the loss of a micro-batch is given; DataError if it is of another size."""
        if self.targets is None:
            return None
        nests, sizes = self.targets
        if sizes[microbatch] != num_samples:
            known = f" ({sum(self.inputs[1])} inputs against {sum(sizes)})" if self.inputs else ""
            raise DataError(
                f"targets: expected {num_samples} samples in micro-batch {microbatch}, as its "
                f"inputs have, got {sizes[microbatch]}{known}; give as many targets as inputs, of "
                f"the same slice of the batch on every rank (a list of tensors counts as several "
                f"of all samples: stack them, or mark each of them, [gpipe_hpc.whole(x) for ...])"
            )
        return intake.bring(nests[microbatch])

    def gradient_of(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the gradient that a backward starts from at a loss.

        A new one each time: a loss of the user's may write into what its backward is given.
        """
        if self.seed is None:
            return torch.ones_like(loss)
        return self.seed.to(loss.dtype, copy=True)


def random_keys(
    seed: int, step: int, microbatches: range, layers: Sequence[int]
) -> Callable[[int], LayerKey]:
    """Return the published keys of a step: of `layers`, for `microbatches` of the global batch."""
    keys = microbatch_keys(seed, step, microbatches, layers)
    return lambda microbatch: keys[microbatch].__getitem__
