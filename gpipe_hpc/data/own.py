"""A user's own map-style data set: any object with ``__len__`` and ``__getitem__``.

An item is a pair (input, target), which is read as a whole: the first stage of a pipeline discards
the targets, the last stage the inputs, and ranks between them read nothing. If a data set has the
methods `read_inputs(indices)` and `read_targets(indices)`, each rank reads only the part that it
needs.

The random generators of Python, NumPy and torch are seeded with (train.seed, epoch, item) for each
item. Random augmentations are therefore equal on both ranks and after a resume in another layout.
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

_STREAM: Final = 7  # random stream; the sampler, images and token masking use others
_COLLATE_REMEDY: Final = (
    "return tensors, arrays or numbers of equal shape, or collate the items with data.collate"
)
Collate = Callable[[list[Any]], Any]


@dataclass
class OwnDataConfig(DataConfig):
    """Settings for a user's function or class that creates the data set, with its arguments."""

    no_matter: ClassVar[frozenset[str]] = frozenset({"workers", "prefetch", "_target_"})

    target: str = ""
    """MODULE.FUNCTION or class, set as data._target_, that returns the data set or a pair
    (training, validation)."""

    keywords: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the function, set as data.KEYWORD=VALUE."""

    collate: Annotated[str | None, Level.EVERYDAY] = None
    """MODULE.FUNCTION that collates a list of items into a batch (inputs, targets). null: torch's
    default_collate."""

    validation_fraction: Annotated[float, Level.EVERYDAY] = 0.05
    """Fraction of the items for validation, if the function returns one data set."""

    @property
    def kind(self) -> str:
        """Return the name of the user's function or class."""
        return self.target

    def check(self) -> None:
        """Check the settings; raise ConfigError naming the one that is wrong."""
        super().check()
        check_fraction(self.validation_fraction)

    def written(self) -> Mapping[str, Any]:
        """Return the settings by name, as they are given on the command line."""
        ours = {name: getattr(self, name) for name in _OURS}
        return {"_target_": self.target, **self.keywords, **ours}

    def open(self, seed: int, spare: Path | None) -> PairSource:
        """Open the data set with `open_own`."""
        return open_own(self, seed)

    def shapes(self, num_samples: int) -> Shapes:
        """Return the shapes of a batch of `num_samples`, derived from the first item."""
        source = open_own(self, 0)
        inputs, targets = (source.train.read_inputs([0]), source.train.read_targets([0]))
        if not isinstance(inputs, torch.Tensor) or not isinstance(targets, torch.Tensor):
            return super().shapes(num_samples)
        if source.loss is None:
            return super().shapes(num_samples)
        return Shapes(_shape(inputs, num_samples), _shape(targets, num_samples), source.loss)


_OURS: Final = ("collate", "validation_fraction", "workers", "prefetch")


@runtime_checkable
class SeparateReads(Protocol):
    """Interface of data sets that can read inputs without targets and targets without inputs."""

    def __len__(self) -> int:
        """Return the number of items."""
        ...

    def read_inputs(self, indices: Sequence[int]) -> Any:
        """Return the inputs of the given items, stacked along dimension 0."""
        ...

    def read_targets(self, indices: Sequence[int]) -> Any:
        """Return the targets of the given items, stacked along dimension 0."""
        ...


@dataclass(frozen=True)
class OwnDataset:
    """A user's data set, together with the function that collates its items to batches."""

    items: Any
    collate: Collate
    seed: int
    name: str  # of the user's function or class

    reads_in_processes: ClassVar[bool] = True
    """Whether to read in worker processes: the user's Python code may hold the GIL."""

    @property
    def num_samples(self) -> int:
        """Return the number of items."""
        return len(self.items)

    def read_inputs(self, indices: Sequence[int], epoch: int = 0) -> Nest:
        """Return the inputs of the given items; raise DataError if the user's code fails."""
        if isinstance(self.items, SeparateReads):
            return self._read_separately(self.items.read_inputs, indices, epoch)
        return self.read_both(indices, epoch)[0]

    def read_targets(self, indices: Sequence[int], epoch: int = 0) -> Nest:
        """Return the targets of the given items; raise DataError if the user's code fails."""
        if isinstance(self.items, SeparateReads):
            return self._read_separately(self.items.read_targets, indices, epoch)
        return self.read_both(indices, epoch)[1]

    def read_both(self, indices: Sequence[int], epoch: int = 0) -> tuple[Nest, Nest]:
        """Return the inputs and targets of the given items, reading each item once."""
        if isinstance(self.items, SeparateReads):
            return self.read_inputs(indices, epoch), self.read_targets(indices, epoch)
        # An empty batch takes its shapes from item 0.
        wanted = list(indices) or [0]
        with _preserved_generators():
            found = [self._item(index, epoch) for index in wanted]
            batch = self._collate(wanted, found)
        pair = self._pair(batch)
        if indices:
            return pair
        inputs, targets = (without_samples(part, "data") for part in pair)
        return inputs, targets

    def digest(self) -> str:
        """Return a digest of the data set's name and length."""
        return f"{self.name}/{self.num_samples}"

    def _item(self, index: int, epoch: int) -> Any:
        _seed_generators(_key(self.seed, epoch, index))
        with own_call(f"data: reading item {index} of {self.name}", DataError):
            return self.items[index]

    def _collate(self, indices: Sequence[int], items: list[Any]) -> Any:
        """Collate items to a batch; an error names the first item of another type or shape."""
        try:
            return self.collate(items)
        except Exception:
            where = f"data: collating items {_indices_text(indices)} of {self.name}"
            first, *others = map(_shapes_text, items)
            for index, other in zip(indices[1:], others, strict=True):
                if other != first:
                    where += f" (item {indices[0]} is {first}, item {index} is {other})"
                    break
            with own_call(where, DataError, _COLLATE_REMEDY):
                raise

    def _read_separately(
        self, read: Callable[[Sequence[int]], Any], indices: Sequence[int], epoch: int
    ) -> Nest:
        wanted = list(indices) or [0]
        with _preserved_generators():
            _seed_generators(_key(self.seed, epoch, wanted[0]))
            with own_call(f"data: reading items of {self.name}", DataError):
                found = with_dicts(with_tensors(read(wanted), "data"))
        return found if indices else without_samples(found, "data")

    def _pair(self, batch: Any) -> tuple[Nest, Nest]:
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            got, pair = type(batch).__name__, "(input, target)"
            if isinstance(batch, tuple | list):
                got = f"a {got} of length {len(batch)}"
            elif isinstance(batch, Mapping) and len(batch) > 1:
                got = f"a {got} of {', '.join(map(str, batch))}"
                pair = "({}, {})".format(*(f"item[{name!r}]" for name in _guess_keys(batch)))
            raise DataError(
                f"data: a batch of {self.name} is not a pair (inputs, targets), but {got}; "
                f"return a pair from __getitem__, such as {pair}, or build pairs in data.collate"
            )
        inputs, targets = (with_tensors(part, f"data: {self.name}") for part in batch)
        return with_dicts(inputs), with_dicts(targets)


def open_own(config: OwnDataConfig, seed: int) -> PairSource:
    """Open the user's data set, or pair of training and validation sets, for training.

    Reads the first item to choose a loss. Raises ConfigError if ``data._target_`` cannot be called
    or fails, DataError if its result is not a data set.
    """
    made = build_target("data", {"_target_": config.target, **config.keywords})
    collate: Collate = default_collate
    if config.collate is not None:
        collate = locate("data.collate", config.collate)
    if isinstance(made, tuple) and len(made) == 2:
        if all(isinstance(each, np.ndarray | torch.Tensor) for each in made):
            raise UnfitDataError(
                f"data: data._target_={config.target} returned two arrays instead of a data set or "
                f"a pair of them for training and validation; return "
                f"torch.utils.data.TensorDataset(inputs, targets) of tensors"
            )
        train, validation = (_dataset(part, collate, seed, config) for part in made)
        whole: Dataset = train
        held: Dataset = validation
    else:
        train = _dataset(made, collate, seed, config)
        whole, held = split(train, config.validation_fraction, config.target)
    if not whole.num_samples:
        raise UnfitDataError(
            f"data: {config.target} has no items to train on; "
            f"add items, or lower data.validation_fraction"
        )
    loss = loss_of_samples(whole, _first_targets(whole))
    counts = f"{whole.num_samples} training items, {held.num_samples} validation items"
    about = f"{config.target}: {counts}"
    return PairSource(whole, held, loss, about)


def _first_targets(whole: Dataset) -> Nest:
    """Return the targets of the first item; raise UnfitDataError if items are not pairs."""
    try:
        return whole.read_targets([0])
    except DataError as error:
        if error.__cause__ is not None:  # the user's code failed
            raise
        raise UnfitDataError(str(error)) from None


def _dataset(made: Any, collate: Collate, seed: int, config: OwnDataConfig) -> OwnDataset:
    is_apart = isinstance(made, SeparateReads)
    if not hasattr(made, "__len__") or not (is_apart or hasattr(made, "__getitem__")):
        remedy = "return a map-style data set, indexed from 0"
        if isinstance(made, DataLoader):
            remedy = "return its data set: gpipe_hpc creates batches and their order itself"
        elif isinstance(made, IterableDataset):
            remedy = f"{remedy}, so that a resumed run can continue in the same order"
        raise UnfitDataError(
            f"data: data._target_={config.target} did not return a data set: expected an object "
            f"with __len__ and __getitem__ (or a pair, for training and validation), got "
            f"{type(made).__name__}; {remedy}"
        )
    return OwnDataset(made, collate, seed, config.target)


_TARGETS: Final = ("labels", "label", "targets", "target", "y")  # common names, by preference


def _guess_keys(batch: Mapping[Any, Any]) -> tuple[Any, Any]:
    """Guess the keys of inputs and targets: the target has a common label name or is the last."""
    names = list(batch)
    target = next((name for name in _TARGETS if name in batch), names[-1])
    return next(name for name in names if name != target), target


_MOST_NUMBERS: Final = 6  # indices listed in a message


def _indices_text(indices: Sequence[int]) -> str:
    """Format indices as a comma-separated list, shortened after the first few."""
    shown = ", ".join(map(str, indices[:_MOST_NUMBERS]))
    left = len(indices) - _MOST_NUMBERS
    return f"{shown} and {left} more" if left > 0 else shown


def _shapes_text(item: Any) -> str:
    """Return the dtypes and shapes of an item's arrays and the type names of its other leaves."""
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
    """Return a 64-bit seed for an item in an epoch."""
    return int(hash_words(_STREAM, seed, epoch, index)[0])


def _seed_generators(key: int) -> None:
    random.seed(key)
    np.random.seed(key % 2**32)
    torch.default_generator.manual_seed(key)


@contextmanager
def _preserved_generators() -> Iterator[None]:
    """Context that restores the random generators on exit; other threads must not use torch's."""
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
