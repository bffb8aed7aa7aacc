"""Split a batch into micro-batches, and join their outputs.

One rule determines the samples in every nest of inputs, targets or outputs. The nest's first tensor
gives the number of samples B. Samples are: tensors whose first dimension is B; lists and tuples of
B values that are not tensors (texts, numbers, dicts); and lists and tuples of B values with tensors
whose first dimensions are not all B. All other lists, tuples and dicts are several inputs. Every
micro-batch gets unchanged: tensors without a dimension or with a first dimension of 1, values that
are not tensors, and values marked by `whole`. A tensor with another first dimension is an error.
NumPy arrays are converted to tensors.
"""

import logging
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from gpipe_hpc.errors import DataError, ModelError
from gpipe_hpc.pytree import LEAF, Nest, flatten, tensors_of, unflatten

log = logging.getLogger("gpipe_hpc.pipeline")


class Whole:
    """A part of a batch that is passed unchanged to every micro-batch."""

    __slots__ = ("value",)

    def __init__(self, value: Nest) -> None:
        self.value = value

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the value."""
        return Whole, (self.value,)

    def __repr__(self) -> str:
        """Return the call of `whole` that creates this object."""
        return f"whole({self.value!r})"


def whole(value: Nest) -> Whole:
    """Mark a part of a batch that every micro-batch gets unchanged, such as a common mask.

    In a list with one dict of tensors for each sample, mark each dict: then the list is split.
    """
    return Whole(value)


def unwrapped(nest: Nest) -> Nest:
    """Return a nest with each `Whole` replaced by its value."""
    if isinstance(nest, Tensor):
        return nest
    leaves, tree = flatten(nest)
    if not any(isinstance(leaf, Whole) for leaf in leaves):
        return nest
    found = [unwrapped(leaf.value) if isinstance(leaf, Whole) else leaf for leaf in leaves]
    return unflatten(found, tree)


def as_tensor(array: npt.NDArray[Any], what: str) -> Tensor:
    """Return an array as a tensor that shares its memory if torch supports that.

    Arrays in another byte order, with negative strides or in read-only memory are copied. Raises
    DataError for dtypes that torch does not have; `what` names the array in the message.
    """
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()
    try:
        return torch.from_numpy(array)
    except TypeError as error:
        raise DataError(
            f"{what}: torch has no dtype for this array's {array.dtype}; convert the array, for "
            f"example with array.astype('float32')"
        ) from error


def with_tensors(nest: Nest, what: str) -> Nest:
    """Return a nest with NumPy arrays converted to tensors; without arrays, the nest itself."""
    if isinstance(nest, Tensor):
        return nest
    leaves, tree = flatten(nest)
    if not any(isinstance(leaf, np.ndarray | dict | UserDict | Whole) for leaf in leaves):
        return nest
    made: dict[int, Any] = {}
    for leaf in leaves:
        if id(leaf) not in made:
            made[id(leaf)] = _converted(leaf, what)
    return unflatten([made[id(leaf)] for leaf in leaves], tree)


def _converted(leaf: Any, what: str) -> Any:
    if isinstance(leaf, np.ndarray):
        return as_tensor(leaf, what)
    if isinstance(leaf, Whole):
        return Whole(with_tensors(leaf.value, what))
    if isinstance(leaf, dict | UserDict):  # contains no tensors, but maybe arrays
        found = with_tensors(dict(leaf), what)
        changed = any(found[key] is not value for key, value in leaf.items())
        return type(leaf)(found) if changed else leaf
    return leaf


class Pieces(NamedTuple):
    """A batch split into micro-batches, and the number of samples of each."""

    nests: list[Nest]
    sizes: list[int]


class BatchSplitter:
    """Splits batches by this module's rule; warns once of each part that the rule may misjudge."""

    def __init__(self) -> None:
        self._settled: set[str] = set()  # parts that were warned of or are unambiguous

    def split(self, batch: Nest, num_microbatches: int, what: str) -> Pieces:
        """Split this replica's share of a batch; raise DataError if it has no samples."""
        rule = _Rule(batch, what)
        slices = [share_of(rule.total, num_microbatches, m, 1) for m in range(num_microbatches)]
        leaves, tree = rule.leaves()
        if num_microbatches > 1 and tree is not LEAF:
            for place, text in rule.doubts(leaves):
                if text and place not in self._settled:
                    log.warning("%s: %s", place, text)
                self._settled.add(place)
        columns = rule.columns(leaves, slices)
        nests = [unflatten(column, tree) for column in zip(*columns, strict=True)]
        return Pieces(nests, [each.stop - each.start for each in slices])

    def warn_of_gradients(self, batch: Nest, what: str) -> None:
        """Warn, once, if a tensor of a training batch requires a gradient."""
        for tensor in tensors_of(unwrapped(batch)):
            if tensor.requires_grad and f"{what}: gradient" not in self._settled:
                self._settled.add(f"{what}: gradient")
                way = _way(batch, tensor) or []
                log.warning(
                    "%s: requires a gradient, but backwards end at the batch, so the module that "
                    "computed this tensor is not trained. Make that module a layer of the "
                    "pipeline, or pass %s.detach()",
                    *[what + "".join(key for _, key in way)] * 2,
                )


def num_samples_of(batch: Nest, what: str) -> int:
    """Return the number of samples in a nest; raise DataError if it cannot be determined."""
    return _Rule(batch, what).total


def cut(batch: Nest, num_microbatches: int, what: str) -> list[Nest]:
    """Split a nest into micro-batches, without warnings."""
    rule = _Rule(batch, what)
    slices = [share_of(rule.total, num_microbatches, m, 1) for m in range(num_microbatches)]
    leaves, tree = rule.leaves()
    return [unflatten(each, tree) for each in zip(*rule.columns(leaves, slices), strict=True)]


def without_samples(batch: Nest, what: str) -> Nest:
    """Return a batch of the same structure with no samples; `Whole` parts are kept."""
    rule = _Rule(batch, what)
    leaves, tree = rule.leaves()
    columns = rule.columns(leaves, [slice(0, 0)])
    kept = (
        leaf if isinstance(leaf, Whole) else c[0] for leaf, c in zip(leaves, columns, strict=True)
    )
    return unflatten(kept, tree)


def put_together(batches: Sequence[Nest], what: str) -> Nest:
    """Return one batch with the samples of several batches of the same structure.

    Parts that are common to all samples are taken from the first batch. Raises ValueError if
    structures differ.
    """
    rules = [_Rule(batch, what) for batch in batches]
    flat = [rule.leaves() for rule in rules]

    def joined(column: Sequence[Any]) -> Any:
        first = column[0]
        if type(first) in (list, tuple):
            return type(first)(unwrapped(value) for leaf in column for value in leaf)
        if isinstance(first, Tensor) and first.dim() and len_of(first) == rules[0].total:
            return torch.cat(list(column))
        return unwrapped(first)

    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return unflatten([joined(column) for column in columns], flat[0][1])


def share_of(num_samples: int, pieces: int, first: int, count: int) -> slice:
    """Return the slice of samples in `count` pieces from piece `first` on, of `pieces` pieces.

    As in `torch.tensor_split`, the first num_samples % pieces have one sample more.
    """
    size, extra = divmod(num_samples, pieces)
    last = first + count
    return slice(first * size + min(first, extra), last * size + min(last, extra))


class _Rule:
    """Which parts of one batch are samples; the part `_source` gives their number, `total`."""

    def __init__(self, batch: Nest, what: str) -> None:
        self._batch, self._what = batch, what
        self.total, self._source = _count(batch, what)
        way = _way(batch, self._source) or []
        self._around = {id(container) for container, _ in way}
        self._ambiguous: list[Any] = []  # lists that may be samples or several inputs

    def leaves(self) -> tuple[list[Any], Any]:
        """Return the parts of the batch and the structure around them."""
        if isinstance(self._batch, Tensor):
            return [self._batch], LEAF
        return flatten(self._batch, self._is_list_of_samples)

    def columns(self, leaves: Sequence[Any], slices: Sequence[slice]) -> list[list[Any]]:
        """Return the pieces of each part; a part that occurs twice is split once."""
        known: dict[int, list[Any]] = {}
        for leaf in leaves:
            if id(leaf) not in known:
                known[id(leaf)] = self._pieces(leaf, slices)
        return [known[id(leaf)] for leaf in leaves]

    def _pieces(self, leaf: Any, slices: Sequence[slice]) -> list[Any]:
        if isinstance(leaf, Whole):
            return [unwrapped(leaf.value) for _ in slices]
        if type(leaf) in (list, tuple):  # lists that are leaves consist of samples
            return [type(leaf)(map(unwrapped, leaf[each])) for each in slices]
        if not isinstance(leaf, Tensor) or not leaf.dim():
            return [leaf for _ in slices]
        size = leaf.shape[0]
        if size == self.total:
            return [leaf[each] for each in slices] if not leaf.is_nested else _unbound(leaf, slices)
        if size == 1:
            return [leaf for _ in slices]
        place, source = self._place(leaf), self._place(self._source)
        raise DataError(
            f"{place}: expected {self.total} samples in its first dimension, as {source} has, got "
            f"shape {list(leaf.shape)} (first dimensions {sorted({self.total, size})}); put the "
            f"samples first in every tensor, or pass gpipe_hpc.whole(...) if {place} applies to "
            f"all samples"
        )

    def _is_list_of_samples(self, nest: Any) -> bool:
        """Return whether a container is a list of samples; otherwise it is several inputs."""
        if type(nest) not in (list, tuple) or len(nest) != self.total:
            return False
        if nest is self._source or not nest:
            return True
        if id(nest) in self._around:
            return False
        sizes = {len_of(tensor) for tensor in _sized(nest)}
        if not sizes:
            is_square = all(type(e) in (list, tuple) and len(e) == self.total for e in nest)
            is_mixed = self.total <= _FEW and len(set(map(type, nest))) > 1
            if is_mixed or (is_square and type(nest) is tuple):
                return False
            if is_square or (self.total <= _FEW and all(isinstance(e, _SCALARS) for e in nest)):
                self._ambiguous.append(nest)
            return True
        if sizes == {self.total}:
            if self.total > 1 and _are_alike(nest):
                self._ambiguous.append(nest)
            return False
        if sizes <= {self.total, 1}:
            raise DataError(
                f"{self._place(nest)}: a list of {self.total} entries in a batch of {self.total} "
                f"samples, with tensors whose first dimensions are {sorted(sizes)}: it may have "
                f"one entry for each sample, or be {self.total} inputs; {_LIST_REMEDY}"
            )
        return True

    def doubts(self, leaves: Sequence[Any]) -> Iterator[tuple[str, str]]:
        """Yield (place, reason) for parts to which the rule may not apply; '' if it is clear."""
        total = self.total
        ambiguous = {id(nest) for nest in self._ambiguous}
        for leaf in leaves:
            if type(leaf) in (list, tuple) and id(leaf) not in ambiguous:
                yield self._place(leaf), ""
            if isinstance(leaf, Tensor):
                is_square = tuple(leaf.shape[:2]) == (total, total)
                if is_square and total > 1 and leaf is not self._source:
                    yield (
                        self._place(leaf),
                        f"its shape {list(leaf.shape)} begins with the number of samples twice, "
                        f"and it is split along the first dimension, like samples. If it applies "
                        f"to all samples, like a causal mask, pass gpipe_hpc.whole(...)",
                    )
            elif _is_sequence(leaf) and len(leaf) == total > 1:
                yield (
                    self._place(leaf),
                    f"a {type(leaf).__name__} of {total} values in a batch of {total} samples; "
                    f"every micro-batch gets all of it, because it is not a list, tuple or tensor. "
                    f"Pass a list if it has one value for each sample, or gpipe_hpc.whole(...)",
                )
        for nest in self._ambiguous:
            reads = "samples" if any(nest is leaf for leaf in leaves) else "several inputs"
            yield (
                self._place(nest),
                f"a {type(nest).__name__} of {total} entries in a batch of {total} samples is "
                f"treated as {reads}; {_LIST_REMEDY}",
            )

    def _place(self, part: Any) -> str:
        """Return the expression for a part of the batch, such as inputs['mask'][0]."""
        way = _way(self._batch, part)
        return self._what + "".join(key for _, key in way or [])


_FEW: Final = 3  # so few numbers may be a size, such as (height, width)
_SCALARS: Final = (bool, int, float, str)
_LIST_REMEDY: Final = (
    "if every micro-batch needs all of it, pass gpipe_hpc.whole(...); if it has one entry for each "
    "sample, pass a tensor, or a list in which each entry is marked: "
    "[gpipe_hpc.whole(entry) for entry in ...]"
)


def len_of(tensor: Tensor) -> int:
    """Return the first dimension of a tensor, as an int."""
    return int(tensor.shape[0])


def _count(batch: Nest, what: str) -> tuple[int, Any]:
    """Return the number of samples, and the part of the batch that gives it."""
    tensors = _sized(batch)
    if tensors:
        total = len_of(tensors[0])
        fits = all(len_of(tensor) in (total, 1) for tensor in tensors)
        # A list of dicts, one for each sample, with tensors of any sizes.
        if not fits and type(batch) in (list, tuple) and _are_alike(batch, needs_containers=True):
            return len(batch), batch
        return total, tensors[0]
    lists = list(_lists(batch))
    if not lists:
        raise DataError(
            f"{what}: no samples found, expected at least one tensor of shape (samples, ...), or "
            f"lists with one value per sample in a tuple or dict, got {type(batch).__name__}; put "
            f"the samples in the first dimension"
        )
    found = next((each for each in lists if each), lists[0])
    return len(found), found


def _lists(nest: Nest) -> Iterator[Any]:
    """Yield the lists of samples in a nest without tensors.

    A list of lists is a list of samples if the inner lengths differ; otherwise it may be several
    inputs.
    """
    if isinstance(nest, Mapping):
        for each in nest.values():
            yield from _lists(each)
    if type(nest) not in (list, tuple) or nest == ():
        return
    inner = [each for each in nest if type(each) in (list, tuple)]
    if not inner or (type(nest) is list and len(set(map(len, inner))) > 1):
        yield nest
    elif type(nest) is tuple:
        for each in inner:
            yield from _lists(each)


def _sized(nest: Nest) -> list[Tensor]:
    return [tensor for tensor in tensors_of(nest) if tensor.dim() > 0]


def _are_alike(nest: Sequence[Any], *, needs_containers: bool = False) -> bool:
    """Return whether all entries of a list have the same structure; tensors may differ in size.

    Entries that are tensors must have the same shape, as several inputs seldom have.
    """
    flat = [flatten(each) for each in nest]
    if any(tree != flat[0][1] for _, tree in flat):
        return False
    if flat[0][1] is LEAF:
        return not needs_containers and len({(x.shape, x.dtype) for x in nest}) == 1
    return True


def _is_sequence(leaf: Any) -> bool:
    """Return whether a value is a sequence other than a string, list or tuple."""
    if isinstance(leaf, str | bytes | Whole | torch.Size) or type(leaf) in (list, tuple):
        return False
    return hasattr(type(leaf), "__len__") and hasattr(type(leaf), "__getitem__")


def _way(nest: Nest, part: Any) -> list[tuple[Any, str]] | None:
    """Return the path to a part of a nest as (container, key) pairs; None if it is not found.

    Containers that are registered with torch's pytree are not searched.
    """
    if nest is part:
        return []
    keys: Sequence[str]
    if isinstance(nest, Mapping):
        keys = [f'["{key}"]' if isinstance(key, str) else f"[{key!r}]" for key in nest]
        children: Sequence[Any] = list(nest.values())
    elif isinstance(nest, list | tuple) and not isinstance(nest, torch.Size):
        names = getattr(nest, "_fields", None)
        keys = [f".{x}" for x in names] if names else [f"[{n}]" for n in range(len(nest))]
        children = nest
    else:
        return None
    for key, child in zip(keys, children, strict=True):
        way = _way(child, part)
        if way is not None:
            return [(nest, key), *way]
    return None


def _unbound(tensor: Tensor, slices: Sequence[slice]) -> list[Any]:
    """Return pieces of a nested tensor, which cannot be sliced; None if a piece is empty."""
    parts = tensor.unbind()
    return [
        torch.nested.as_nested_tensor(list(parts[each]), layout=tensor.layout)
        if each.stop > each.start
        else None
        for each in slices
    ]


class Output(NamedTuple):
    """Output of the last layer for one micro-batch, and its number of samples."""

    nest: Nest
    num_samples: int


def join(outputs: Mapping[int, Output], where: str) -> Nest:
    """Join the outputs of micro-batches along the first dimension, in order of micro-batch.

    Lists with a value for each sample become one list. Zero-dimensional tensors are stacked; values
    that are not tensors become a list with one value for each micro-batch, unless all are None.
    `where` names the layer in errors. Raises ModelError if the first dimension of a tensor is not
    the number of samples of its micro-batch, or if outputs differ in anything else.
    """
    if not outputs:
        return None
    order = sorted(outputs)
    flat = [flatten(outputs[m].nest, lists_of(outputs[m].num_samples)) for m in order]
    tree = flat[0][1]
    for m, (_, other) in zip(order, flat, strict=True):
        if other != tree:
            raise ModelError(
                f"{where}: the outputs of micro-batches {order[0]} and {m} differ in their tuples, "
                f"lists or dicts, so they cannot be joined; predict with microbatches=1, or let "
                f"the layer return the same structure for all inputs"
            )
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    joined = []
    for number, column in enumerate(columns):
        if len(order) > 1:
            _check_column(column, {m: outputs[m].num_samples for m in order}, where, number)
        joined.append(_join_leaf(list(column)))
    return unflatten(joined, tree)


def square_output(
    outputs: Mapping[int, Output], layers: Sequence[nn.Module], inputs: Nest
) -> list[int] | None:
    """Return the shape of an output [b, b] of micro-batches of b samples; None if there is none.

    The second dimension of such an output may count samples too. Returns None if a dimension
    of the inputs, or of a weight of the last layer with weights, equals b, or if the stage has only
    torch modules without weights.

    Args:
        outputs: Outputs by micro-batch.
        layers: Layers of the last stage.
        inputs: Inputs of one micro-batch, None if this rank does not have them.
    """
    parts = [part for part in outputs.values() if part.num_samples]
    if len(parts) < 2:
        return None
    sizes = {part.num_samples for part in parts}
    weights = next(filter(None, (list(layer.parameters()) for layer in reversed(layers))), [])
    if not weights and all(type(layer).__module__.startswith("torch.nn.") for layer in layers):
        return None  # an earlier stage has the weights
    known = {size for tensor in tensors_of(inputs) for size in tensor.shape[1:]}
    known |= {size for weight in weights for size in weight.shape}
    for tensor in tensors_of(parts[0].nest):
        shape = list(tensor.shape)
        if len(shape) == 2 and {shape[1]} == sizes and shape[1] > 1 and shape[1] not in known:
            return shape
    return None


def lists_of(num_samples: int) -> Callable[[Any], bool]:
    """Return a predicate for lists of `num_samples` values without tensors."""

    def is_leaf(nest: Any) -> bool:
        is_list = type(nest) in (list, tuple) and len(nest) == num_samples
        return is_list and not tensors_of(nest)

    return is_leaf


def _check_column(column: Sequence[Any], sizes: Mapping[int, int], where: str, number: int) -> None:
    """Raise ModelError for tensors that cannot be joined along the first dimension."""
    if not all(isinstance(leaf, Tensor) for leaf in column):
        return
    if not any(tensor.dim() for tensor in column):
        return
    rest = column[0].shape[1:]
    for (m, size), tensor in zip(sizes.items(), column, strict=True):
        shape = list(tensor.shape)
        if not shape or shape[0] != size:
            raise ModelError(
                f"{where}: output {number} of micro-batch {m} has shape {shape}, expected its "
                f"{size} samples in the first dimension, along which predict joins micro-batches; "
                f"let the layer return the samples first (x.transpose(0, 1)), or predict with "
                f"microbatches=1"
            )
        if tensor.shape[1:] != rest:
            raise ModelError(
                f"{where}: output {number} has shape {shape} in micro-batch {m}, but "
                f"{list(column[0].shape)} in micro-batch {min(sizes)}; predict joins outputs along "
                f"the first dimension, so only this may differ; let the layer pad to one length, "
                f"or predict with microbatches=1"
            )


def _join_leaf(column: list[Any]) -> Any:
    if all(isinstance(leaf, Tensor) for leaf in column):
        return torch.stack(column) if column[0].dim() == 0 else torch.cat(column)
    if all(type(leaf) in (list, tuple) for leaf in column):
        return type(column[0])(value for leaf in column for value in leaf)
    return None if all(leaf is None for leaf in column) else column
