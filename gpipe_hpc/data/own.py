"""A user's own data set: anything with ``__len__`` and ``__getitem__``, such as a torch Dataset.

An item is a pair (input, target), which is read whole: the first rank of a pipeline drops the
targets, the last one the inputs, and ranks between read nothing. A data set that has
`read_inputs(indices)` and `read_targets(indices)` is asked for what a rank needs alone.

Random numbers of Python, NumPy and torch that an item is varied by follow from (train.seed, epoch,
item): both ranks see the same item, and so does a run that goes on in another layout.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Protocol, runtime_checkable

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from gpipe_hpc.batches import with_tensors, without_samples
from gpipe_hpc.config import build_target, locate, own_call
from gpipe_hpc.data.dataset import Dataset
from gpipe_hpc.data.hashing import hash_words
from gpipe_hpc.data.pairs import PairSource, check_fraction, loss_of_samples, split
from gpipe_hpc.errors import DataError, UnfitDataError
from gpipe_hpc.models import GENERATOR_LOCK
from gpipe_hpc.pytree import Nest, flatten, with_dicts
from gpipe_hpc.settings import DataConfig, Level, Shape, Shapes

_STREAM: Final = 7  # apart from those of the sampler, of images, of hidden tokens
_TOGETHER: Final = (
    "let items be tensors, arrays or numbers of one shape, or put them together in data.collate"
)
Collate = Callable[[list[Any]], Any]


@dataclass
class OwnDataConfig(DataConfig):
    """A function or class of the user's, and its keywords."""

    no_matter: ClassVar[frozenset[str]] = frozenset({"workers", "prefetch", "_target_"})

    target: str = ""
    """MODULE.FUNCTION or class, set as data._target_, that returns the data set or a pair
    (training, validation)."""

    keywords: dict[str, Any] = field(default_factory=dict)
    """Keywords of it, set as data.KEYWORD=VALUE."""

    collate: Annotated[str | None, Level.EVERYDAY] = None
    """MODULE.FUNCTION that makes a batch (inputs, targets) of a list of items. null: torch's
    default_collate."""

    validation_fraction: Annotated[float, Level.EVERYDAY] = 0.05
    """Fraction of the items for validation, if the function returns one data set."""

    @property
    def kind(self) -> str:
        """Return the user's name for it."""
        return self.target

    def check(self) -> None:
        """Refuse settings that cannot work; raises ConfigError that names one."""
        super().check()
        check_fraction(self.validation_fraction)

    def written(self) -> Mapping[str, Any]:
        """Return the settings as they are given on the command line."""
        ours = {name: getattr(self, name) for name in _OURS}
        return {"_target_": self.target, **self.keywords, **ours}

    def open(self, seed: int, spare: Path | None) -> PairSource:
        """Return what `open_own` does."""
        return open_own(self, seed)

    def shapes(self, num_samples: int) -> Shapes:
        """Return the shapes of a batch, by the first item."""
        source = open_own(self, 0)
        inputs, targets = (source.train.read_inputs([0]), source.train.read_targets([0]))
        if not isinstance(inputs, torch.Tensor) or not isinstance(targets, torch.Tensor):
            return super().shapes(num_samples)
        if source.loss is None:
            return super().shapes(num_samples)
        return Shapes(_shape(inputs, num_samples), _shape(targets, num_samples), source.loss)


_OURS: Final = ("collate", "validation_fraction", "workers", "prefetch")


@runtime_checkable
class ReadsApart(Protocol):
    """A data set of the user's that reads inputs and targets apart."""

    def __len__(self) -> int:
        """Return how many items there are."""
        ...

    def read_inputs(self, indices: Sequence[int]) -> Any:
        """Return the inputs of these items, stacked along dimension 0."""
        ...

    def read_targets(self, indices: Sequence[int]) -> Any:
        """Return the targets of these items, stacked along dimension 0."""
        ...


@dataclass(frozen=True)
class OwnDataset:
    """Items of a user's data set, put together as he says."""

    items: Any
    collate: Collate
    seed: int
    name: str  # what the user calls it

    reads_in_processes: ClassVar[bool] = True
    """Python code of the user's holds the interpreter: threads would wait for one another."""

    @property
    def num_samples(self) -> int:
        """Return how many items there are."""
        return len(self.items)

    def read_inputs(self, indices: Sequence[int], epoch: int = 0) -> Nest:
        """Return the inputs of these items; raise DataError where the user's code fails."""
        if isinstance(self.items, ReadsApart):
            return self._apart(self.items.read_inputs, indices, epoch)
        return self.read_both(indices, epoch)[0]

    def read_targets(self, indices: Sequence[int], epoch: int = 0) -> Nest:
        """Return the targets of these items; raise DataError where the user's code fails."""
        if isinstance(self.items, ReadsApart):
            return self._apart(self.items.read_targets, indices, epoch)
        return self.read_both(indices, epoch)[1]

    def read_both(self, indices: Sequence[int], epoch: int = 0) -> tuple[Nest, Nest]:
        """Return inputs and targets of these items, each read once."""
        if isinstance(self.items, ReadsApart):
            return self.read_inputs(indices, epoch), self.read_targets(indices, epoch)
        # A share of no samples has the shapes of one, none of which it holds.
        wanted = list(indices) or [0]
        with _kept_generators():
            found = [self._item(index, epoch) for index in wanted]
            batch = self._together(wanted, found)
        pair = self._pair(batch)
        if indices:
            return pair
        inputs, targets = (without_samples(part, "data") for part in pair)
        return inputs, targets

    def digest(self) -> str:
        """Return a short text of what it is called and how long it is."""
        return f"{self.name}/{self.num_samples}"

    def _item(self, index: int, epoch: int) -> Any:
        _seed_generators(_key(self.seed, epoch, index))
        with own_call(f"data: reading item {index} of {self.name}", DataError):
            return self.items[index]

    def _together(self, indices: Sequence[int], items: list[Any]) -> Any:
        """Put items together; where that fails say which one is unlike the first."""
        try:
            return self.collate(items)
        except Exception:
            where = f"data: putting items {_numbers(indices)} of {self.name} together"
            first, *others = map(_described, items)
            for index, other in zip(indices[1:], others, strict=True):
                if other != first:
                    where += f" (item {indices[0]} is {first}, item {index} is {other})"
                    break
            with own_call(where, DataError, _TOGETHER):
                raise

    def _apart(
        self, read: Callable[[Sequence[int]], Any], indices: Sequence[int], epoch: int
    ) -> Nest:
        wanted = list(indices) or [0]
        with _kept_generators():
            _seed_generators(_key(self.seed, epoch, wanted[0]))
            with own_call(f"data: reading items of {self.name}", DataError):
                found = with_dicts(with_tensors(read(wanted), "data"))
        return found if indices else without_samples(found, "data")

    def _pair(self, batch: Any) -> tuple[Nest, Nest]:
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            got, pair = type(batch).__name__, "(input, target)"
            if isinstance(batch, tuple | list):
                got = f"{len(batch)} of them"
            elif isinstance(batch, Mapping) and len(batch) > 1:
                got = f"a {got} of {', '.join(map(str, batch))}"
                pair = "({}, {})".format(*(f"item[{name!r}]" for name in _pair_of(batch)))
            raise DataError(
                f"data: a batch of {self.name} is no pair, expected (inputs, targets), got {got}; "
                f"let __getitem__ return a pair, as {pair}, or make pairs in data.collate"
            )
        inputs, targets = (with_tensors(part, f"data: {self.name}") for part in batch)
        return with_dicts(inputs), with_dicts(targets)


def open_own(config: OwnDataConfig, seed: int) -> PairSource:
    """Return the user's data set, or the two that he returns, as data to train on.

    Reads the first item, to see which loss fits. Raises ConfigError where what ``data._target_``
    names cannot be called or fails, DataError where what it returns is no data set.
    """
    made = build_target("data", {"_target_": config.target, **config.keywords})
    collate: Collate = default_collate
    if config.collate is not None:
        collate = locate("data.collate", config.collate)
    if isinstance(made, tuple) and len(made) == 2:
        if all(isinstance(each, np.ndarray | torch.Tensor) for each in made):
            raise UnfitDataError(
                f"data: data._target_={config.target} returned two arrays, expected a data set, or "
                f"two for training and validation; return torch.utils.data.TensorDataset(inputs, "
                f"targets), of tensors"
            )
        train, validation = (_dataset(part, collate, seed, config) for part in made)
        whole: Dataset = train
        held: Dataset = validation
    else:
        train = _dataset(made, collate, seed, config)
        whole, held = split(train, config.validation_fraction, config.target)
    if not whole.num_samples:
        raise UnfitDataError(
            f"data: {config.target} is empty, expected items to train on, got none; "
            f"let it hold some, or lower data.validation_fraction"
        )
    loss = loss_of_samples(whole, _first_targets(whole))
    counts = f"{whole.num_samples} items to train on, {held.num_samples} held back"
    about = f"{config.target}: {counts}"
    return PairSource(whole, held, loss, about)


def _first_targets(whole: Dataset) -> Nest:
    """Return the targets of the first item; UnfitDataError if items are no pairs."""
    try:
        return whole.read_targets([0])
    except DataError as error:
        if error.__cause__ is not None:  # it was the user's code that failed
            raise
        raise UnfitDataError(str(error)) from None


def _dataset(made: Any, collate: Collate, seed: int, config: OwnDataConfig) -> OwnDataset:
    is_apart = isinstance(made, ReadsApart)
    if not hasattr(made, "__len__") or not (is_apart or hasattr(made, "__getitem__")):
        remedy = "return one whose items have numbers from 0 on"
        if isinstance(made, DataLoader):
            remedy = "return its data set: batches and their order are made here"
        elif isinstance(made, IterableDataset):
            remedy = f"{remedy}, as items are drawn in an order that a run can go on in"
        raise UnfitDataError(
            f"data: data._target_={config.target} returned no data set, expected something with "
            f"__len__ and __getitem__ (or a pair of them, for training and validation), got "
            f"{type(made).__name__}; {remedy}"
        )
    return OwnDataset(made, collate, seed, config.target)


_TARGETS: Final = ("labels", "label", "targets", "target", "y")  # as data sets call them


def _pair_of(batch: Mapping[Any, Any]) -> tuple[Any, Any]:
    """Return the likely names of inputs and targets: labels by their name, else the last one."""
    names = list(batch)
    target = next((name for name in _TARGETS if name in batch), names[-1])
    return next(name for name in names if name != target), target


_MOST_NUMBERS: Final = 6  # in a message


def _numbers(indices: Sequence[int]) -> str:
    """Return numbers as a list, which need not follow one another: the first few of many."""
    shown = ", ".join(map(str, indices[:_MOST_NUMBERS]))
    left = len(indices) - _MOST_NUMBERS
    return f"{shown} and {left} more" if left > 0 else shown


def _described(item: Any) -> str:
    """Return the dtypes and shapes of the arrays of an item, and the types of all else."""
    shown = [
        f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
        if isinstance(leaf, torch.Tensor | np.ndarray)
        else type(leaf).__name__
        for leaf in flatten(item)[0]
    ]
    return f"({', '.join(shown)})"


def _shape(batch: torch.Tensor, num_samples: int) -> Shape:
    return Shape(str(batch.dtype).removeprefix("torch."), (num_samples, *batch.shape[1:]))


def _key(seed: int, epoch: int, index: int) -> int:
    """Return 64 bits for an item in an epoch."""
    return int(hash_words(_STREAM, seed, epoch, index)[0])


def _seed_generators(key: int) -> None:
    random.seed(key)
    np.random.seed(key % 2**32)
    torch.default_generator.manual_seed(key)


@contextmanager
def _kept_generators() -> Iterator[None]:
    """Leave the process's generators as they were, and keep other threads from torch's."""
    with GENERATOR_LOCK:
        python, numpy, torchs = (
            random.getstate(),
            np.random.get_state(),
            torch.default_generator.get_state(),
        )
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
            torch.default_generator.set_state(torchs)
