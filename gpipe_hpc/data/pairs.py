"""What a user's own data have in common: a share held back, and a loss by what the targets are."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from torch import Tensor

from gpipe_hpc.data.dataset import Dataset, read_both, reads_in_processes
from gpipe_hpc.data.sampler import permute
from gpipe_hpc.errors import DataError
from gpipe_hpc.pytree import Nest
from gpipe_hpc.settings import refuse

_SPLIT_KEY: Final = (2**64 - 1, 2**64 - 2)  # no run's (seed, epoch), nor that of validation
# By the number of dimensions of targets that are classes, the samples' included.
UNSHIFTED: Final = "unshifted"
SHIFTED: Final = "shifted"
_LOOKED_AT: Final = 8  # samples
_OF_CLASSES: Final = {1: "classification", 2: "token_cross_entropy", 3: "segmentation"}


@dataclass(frozen=True)
class PairSource:
    """Training and validation samples of a user's own, and what was found."""

    train: Dataset
    validation: Dataset
    loss: str | None
    about: str
    corrupt: Mapping[str, str] = field(default_factory=dict)

    def baseline(self) -> float | None:
        """Return None: nobody knows what a guess would be."""
        return None


@dataclass(frozen=True)
class Part:
    """Some samples of a data set, from all over it, in the order of a fixed permutation.

    The permutation depends on the number of samples alone, so every run and rank holds back the
    same ones. Nothing is kept of it, however many there are.
    """

    whole: Dataset
    first: int
    num_samples: int

    def read_inputs(self, indices: Sequence[int], epoch: int = 0) -> Nest:
        """Return the inputs of these samples."""
        return self.whole.read_inputs(self._rows(indices), epoch)

    def read_targets(self, indices: Sequence[int], epoch: int = 0) -> Nest:
        """Return the targets of these samples."""
        return self.whole.read_targets(self._rows(indices), epoch)

    def read_both(self, indices: Sequence[int], epoch: int = 0) -> tuple[Nest, Nest]:
        """Return inputs and targets of these samples."""
        return read_both(self.whole, self._rows(indices), epoch)

    @property
    def reads_in_processes(self) -> bool:
        """Say whether threads that read would wait for one another."""
        return reads_in_processes(self.whole)

    def digest(self) -> str:
        """Return a short text that is equal where the samples are."""
        return f"{self.whole.digest()}/{self.first}+{self.num_samples}"

    def _rows(self, indices: Sequence[int]) -> list[int]:
        places = np.asarray(indices, np.uint64) + np.uint64(self.first)
        return [int(row) for row in permute(places, self.whole.num_samples, _SPLIT_KEY)]


def split(whole: Dataset, fraction: float, what: str) -> tuple[Dataset, Dataset]:
    """Return samples to train on and the share of them that is held back.

    With a fraction above 0 at least one is. Raises DataError where none is left to train on.
    """
    total = whole.num_samples
    num_held = max(1, round(total * fraction)) if fraction else 0
    if total <= num_held:
        raise DataError(
            f"data: too few samples in {what}, expected at least {num_held + 1}, got {total}; give "
            f"more, or hold none back with data.validation_fraction=0"
        )
    return Part(whole, num_held, total - num_held), Part(whole, 0, num_held)


def check_fraction(fraction: float) -> None:
    """Raise ConfigError for a share that cannot be."""
    if not 0 <= fraction < 1:
        raise refuse("data.validation_fraction", "0 <= fraction < 1", fraction, "lower it")


def fitting_loss(targets: Nest) -> str | None:
    """Return the name of the loss for a batch of targets; None where only the user knows.

    Numbers are approached (mean_squared_error); whole numbers are classes: one for each sample,
    each token of a sequence, or each pixel of an image.
    """
    if not isinstance(targets, Tensor):
        return None
    if targets.is_floating_point():
        return "mean_squared_error"
    whole = not targets.is_complex() and targets.dtype != torch.bool
    return _OF_CLASSES.get(targets.dim()) if whole else None


def loss_of_samples(whole: Dataset, targets: Nest) -> str | None:
    """Return the name of the loss that fits a data set, of which these targets are the first."""
    loss = fitting_loss(targets)
    if loss == "token_cross_entropy" and labels_are(whole) == UNSHIFTED:
        return "causal_lm"
    return loss


def labels_are(whole: Dataset) -> str | None:
    """Return how the labels of the first samples stand to their tokens; None for neither way.

    UNSHIFTED: each is its own token, as transformers takes labels; SHIFTED: each is the next one.
    Labels of -100 tell nothing, and neither do tokens that are all the same.
    """
    found: set[str | None] = set()
    for index in range(min(_LOOKED_AT, whole.num_samples)):
        try:
            inputs, labels = read_both(whole, [index], 0)
        except DataError:  # who reads it to train on raises it
            break
        tokens = inputs.get("input_ids") if isinstance(inputs, Mapping) else inputs
        if not isinstance(tokens, Tensor) or not isinstance(labels, Tensor):
            return None
        if tokens.shape != labels.shape or tokens.dim() != 2 or tokens.is_floating_point():
            return None
        is_same, is_next = _agree(tokens, labels), _agree(tokens[:, 1:], labels[:, :-1])
        if is_same or is_next:
            found.add(UNSHIFTED if is_same else SHIFTED)
        elif is_same is False or is_next is False:
            return None
    return found.pop() if len(found) == 1 else None


def _agree(tokens: Tensor, labels: Tensor) -> bool | None:
    """Say whether labels that count are the tokens; None where there is nothing to tell by."""
    counted = labels != -100
    own = tokens[counted]
    if not own.numel() or bool((own == own[0]).all()):
        return None
    return torch.equal(own, labels[counted].to(own.dtype))
