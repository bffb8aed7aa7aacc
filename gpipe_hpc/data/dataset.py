"""Interfaces of data sets: map-style datasets, and pairs of training and validation sets."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from gpipe_hpc.errors import DataError, UnfitDataError, words_of
from gpipe_hpc.pytree import Nest


class CorruptSampleError(DataError):
    """A sample whose bytes cannot be decoded; `sample` names the file and the sample."""

    def __init__(self, sample: str, message: str) -> None:
        super().__init__(message)
        self.sample = sample


class Dataset(Protocol):
    """Samples with indices from 0.

    Inputs and targets are read separately, since the first stage needs only inputs and the last
    only targets. A sample depends on its index and, with random augmentation, on the epoch, but not
    on the rest of the batch or on the reading rank. Several threads may read at the same time.
    """

    @property
    def num_samples(self) -> int:
        """Return the number of samples per epoch."""
        ...

    def read_inputs(self, indices: Sequence[int], epoch: int = 0) -> Nest:
        """Return the inputs of the given samples, stacked along dimension 0 in the given order.

        Raises CorruptSampleError if a sample cannot be decoded, DataError if a file cannot be read.
        """
        ...

    def read_targets(self, indices: Sequence[int], epoch: int = 0) -> Nest:
        """Return the targets of the given samples, stacked along dimension 0 in the given order."""
        ...

    def digest(self) -> str:
        """Return a short text that is equal on two ranks exactly if they have the same samples."""
        ...


@contextmanager
def samples_that_fit() -> Iterator[None]:
    """Context that converts out-of-memory errors while samples are read to UnfitDataError."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "can't allocate memory" not in str(error):
            raise
        raise UnfitDataError(
            f"data: samples do not fit into memory ({words_of(error)}); "
            f"lower data.seq_len, data.height or the like, or the batch size"
        ) from error


def read_both(dataset: Dataset, indices: Sequence[int], epoch: int) -> tuple[Nest, Nest]:
    """Return inputs and targets, in one pass if the dataset has a method `read_both`."""
    both = getattr(dataset, "read_both", None)
    if both is None:
        return dataset.read_inputs(indices, epoch), dataset.read_targets(indices, epoch)
    found: tuple[Nest, Nest] = both(indices, epoch)
    return found


def reads_in_processes(dataset: Dataset) -> bool:
    """Return whether the dataset should be read in worker processes, as threads share the GIL."""
    return bool(getattr(dataset, "reads_in_processes", False))


class DataSource(Protocol):
    """A training and a validation set, with loss, description and corrupt samples."""

    @property
    def train(self) -> Dataset:
        """Return the training set."""
        ...

    @property
    def validation(self) -> Dataset:
        """Return the validation set, which may be empty."""
        ...

    @property
    def corrupt(self) -> Mapping[str, str]:
        """Return error messages of samples found corrupt on opening and skipped, by name."""
        ...

    @property
    def loss(self) -> str | None:
        """Return the name of the default loss for `gpipe_hpc.models.loss_function`, or None."""
        ...

    @property
    def about(self) -> str:
        """Return a description of the data for the log; empty if the settings suffice."""
        ...

    def baseline(self) -> float | None:
        """Return the validation loss of a trivial prediction in nats; None if unknown.

        Reads the data.
        """
        ...


class DataFacts(NamedTuple):
    """Facts about the data that every rank needs, including ranks that open no dataset."""

    num_samples: int
    num_validation_samples: int
    digests: tuple[str, str]
    loss: str | None
    corrupt: Mapping[str, str]

    @classmethod
    def of(cls, source: DataSource) -> "DataFacts":
        """Collect the facts about opened data."""
        train, validation = source.train, source.validation
        digests = (train.digest(), validation.digest())
        return cls(train.num_samples, validation.num_samples, digests, source.loss, source.corrupt)
