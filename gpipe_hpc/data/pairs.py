"""Common parts of user data sets: the validation split, and the default loss for their targets."""

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

_SPLIT_KEY: Final = (2**64 - 1, 2**64 - 2)  # unlike any run's (seed, epoch) and validation's key
UNSHIFTED: Final = "unshifted"
SHIFTED: Final = "shifted"
_LOOKED_AT: Final = 8  # samples
# Losses by the number of dimensions of integer targets, including the batch dimension.
_OF_CLASSES: Final = {1: "classification", 2: "token_cross_entropy", 3: "segmentation"}


@dataclass(frozen=True)
class PairSource:
    """Training and validation sets of user data, with the default loss and a description."""

    train: Dataset
    validation: Dataset
    loss: str | None
    about: str
    corrupt: Mapping[str, str] = field(default_factory=dict)

    def baseline(self) -> float | None:
        """Return None: the loss of a trivial prediction is unknown."""
        return None


@dataclass(frozen=True)
class Subset:
    """A subset of a data set: a range of a fixed random permutation of its samples.

    The permutation depends only on the number of samples, so every run and rank uses the same
    subset. It is computed per index and needs no memory.
    """

    whole: Dataset
    first: int
    num_samples: int

    def read_inputs(self, indices: Sequence[int], epoch: int = 0) -> Nest:
        """Return the inputs of the given samples."""
        return self.whole.read_inputs(self._rows(indices), epoch)

    def read_targets(self, indices: Sequence[int], epoch: int = 0) -> Nest:
        """Return the targets of the given samples."""
        return self.whole.read_targets(self._rows(indices), epoch)

    def read_both(self, indices: Sequence[int], epoch: int = 0) -> tuple[Nest, Nest]:
        """Return the inputs and targets of the given samples."""
        return read_both(self.whole, self._rows(indices), epoch)

    @property
    def reads_in_processes(self) -> bool:
        """Return whether to read in worker processes instead of threads."""
        return reads_in_processes(self.whole)

    def digest(self) -> str:
        """Return a digest of the whole data set and the range."""
        return f"{self.whole.digest()}/{self.first}+{self.num_samples}"

    def _rows(self, indices: Sequence[int]) -> list[int]:
        places = np.asarray(indices, np.uint64) + np.uint64(self.first)
        return [int(row) for row in permute(places, self.whole.num_samples, _SPLIT_KEY)]


def split(whole: Dataset, fraction: float, what: str) -> tuple[Dataset, Dataset]:
    """Split a data set at random into training and validation samples.

    With a fraction above 0 at least one sample is for validation. Raises DataError if none is left
    for training.
    """
    total = whole.num_samples
    num_held = max(1, round(total * fraction)) if fraction else 0
    if total <= num_held:
        raise DataError(
            f"data: too few samples in {what}: expected at least {num_held + 1}, got {total}; add "
            f"samples, or use none for validation with data.validation_fraction=0"
        )
    return Subset(whole, num_held, total - num_held), Subset(whole, 0, num_held)


def check_fraction(fraction: float) -> None:
    """Raise ConfigError if data.validation_fraction is outside [0, 1)."""
    if not 0 <= fraction < 1:
        raise refuse("data.validation_fraction", "0 <= fraction < 1", fraction, "lower it")


def fitting_loss(targets: Nest) -> str | None:
    """Return the name of the default loss for a batch of targets; None if there is none.

    Floating-point targets use mean_squared_error. Integers are classes: per sample, per token of a
    sequence, or per pixel of an image.
    """
    if not isinstance(targets, Tensor):
        return None
    if targets.is_floating_point():
        return "mean_squared_error"
    whole = not targets.is_complex() and targets.dtype != torch.bool
    return _OF_CLASSES.get(targets.dim()) if whole else None


def loss_of_samples(whole: Dataset, targets: Nest) -> str | None:
    """Return the name of the default loss of a data set, given the targets of its first sample."""
    loss = fitting_loss(targets)
    if loss == "token_cross_entropy" and labels_are(whole) == UNSHIFTED:
        return "causal_lm"
    return loss


def labels_are(whole: Dataset) -> str | None:
    """Return whether labels of the first samples are UNSHIFTED or SHIFTED tokens; None if neither.

    UNSHIFTED: each label equals the token at its own position, as in transformers; SHIFTED: each
    label equals the next token. Labels of -100 and sequences of a single repeated token are
    ignored.
    """
    found: set[str | None] = set()
    for index in range(min(_LOOKED_AT, whole.num_samples)):
        try:
            inputs, labels = read_both(whole, [index], 0)
        except DataError:  # training raises it
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
    """Return whether all labels other than -100 equal the tokens; None if no tokens differ."""
    counted = labels != -100
    own = tokens[counted]
    if not own.numel() or bool((own == own[0]).all()):
        return None
    return torch.equal(own, labels[counted].to(own.dtype))
