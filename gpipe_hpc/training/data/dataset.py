"""What the training loop asks of data: numbered samples, inputs and targets read apart."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Dataset(Protocol):
    """Samples numbered from 0.

    Inputs and targets are read apart, since the first stage needs only the ones and the last only
    the others. Nothing is opened before the first read; `num_samples` and `digest` look at names
    and sizes alone, so any rank may ask.
    """

    @property
    def num_samples(self) -> int:
        """Return how many samples an epoch has."""
        ...

    def read_inputs(self, indices: Sequence[int]) -> Tensor:
        """Return the inputs of these samples, stacked along dimension 0, in this order."""
        ...

    def read_targets(self, indices: Sequence[int]) -> Tensor:
        """Return the targets of these samples, stacked along dimension 0, in this order."""
        ...

    def digest(self) -> str:
        """Return a short text that is equal on two ranks exactly if they see the same samples."""
        ...


class DataSource(Protocol):
    """A training and a validation set, and what goes with both."""

    @property
    def train(self) -> Dataset:
        """Return the samples to learn from."""
        ...

    @property
    def validation(self) -> Dataset:
        """Return the samples held back; it may have none."""
        ...

    @property
    def loss(self) -> str:
        """Return the name of the loss that fits, for `gpipe_hpc.models.loss_function`."""
        ...

    def baseline(self) -> float | None:
        """Return the validation loss of a guess without a model, in nats; None if unknown.

        Reads the data.
        """
        ...
