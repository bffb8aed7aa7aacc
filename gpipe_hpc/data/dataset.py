"""What the training loop asks of data: numbered samples, inputs and targets read apart."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from gpipe_hpc.errors import DataError, UnfitDataError, words_of
from gpipe_hpc.pytree import Nest


class CorruptSampleError(DataError):
    """A sample whose bytes cannot be decoded; `sample` names file and sample."""

    def __init__(self, sample: str, message: str) -> None:
        super().__init__(message)
        self.sample = sample


class Dataset(Protocol):
    """Samples numbered from 0.

    Inputs and targets are read apart, since the first stage needs only the ones and the last only
    the others. A sample depends on its number and, where it is varied in training, on the epoch:
    not on what it is read together with, nor on who reads it. Several threads may read at once.
    """

    @property
    def num_samples(self) -> int:
        """Return how many samples an epoch has."""
        ...

    def read_inputs(self, indices: Sequence[int], epoch: int = 0) -> Nest:
        """Return the inputs of these samples, stacked along dimension 0, in this order.

        Raises CorruptSampleError for one that cannot be decoded, DataError for a file that cannot
        be read.
        """
        ...

    def read_targets(self, indices: Sequence[int], epoch: int = 0) -> Nest:
        """Return the targets of these samples, stacked along dimension 0, in this order."""
        ...

    def digest(self) -> str:
        """Return a short text that is equal on two ranks exactly if they see the same samples."""
        ...


@contextmanager
def samples_that_fit() -> Iterator[None]:
    """Return a block, before training, in which memory runs out only for samples too large."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "can't allocate memory" not in str(error):
            raise
        raise UnfitDataError(
            f"data: samples do not fit into memory, expected some that do, got {words_of(error)}; "
            f"make them smaller, as with data.seq_len or data.height, or take fewer at once"
        ) from error


def read_both(dataset: Dataset, indices: Sequence[int], epoch: int) -> tuple[Nest, Nest]:
    """Return inputs and targets, read once where a data set can only give both."""
    both = getattr(dataset, "read_both", None)
    if both is None:
        return dataset.read_inputs(indices, epoch), dataset.read_targets(indices, epoch)
    found: tuple[Nest, Nest] = both(indices, epoch)
    return found


def reads_in_processes(dataset: Dataset) -> bool:
    """Say whether threads that read would wait for one another, so that processes must read."""
    return bool(getattr(dataset, "reads_in_processes", False))


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
    def corrupt(self) -> Mapping[str, str]:
        """Return what was found corrupt on opening, and left out: its name, and what is wrong."""
        ...

    @property
    def loss(self) -> str | None:
        """Return the name of the loss that fits, for `gpipe_hpc.models.loss_function`.

        None where only the user knows.
        """
        ...

    @property
    def about(self) -> str:
        """Return what was found, for the log; empty where the settings say it all."""
        ...

    def baseline(self) -> float | None:
        """Return the validation loss of a guess without a model, in nats; None if unknown.

        Reads the data.
        """
        ...


class DataFacts(NamedTuple):
    """What every rank knows of the data, also one that opens none."""

    num_samples: int
    num_validation_samples: int
    digests: tuple[str, str]
    loss: str | None
    corrupt: Mapping[str, str]

    @classmethod
    def of(cls, source: DataSource) -> "DataFacts":
        """Return the facts of opened data."""
        train, validation = source.train, source.validation
        digests = (train.digest(), validation.digest())
        return cls(train.num_samples, validation.num_samples, digests, source.loss, source.corrupt)
