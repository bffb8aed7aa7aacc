"""NumPy's arrays as torch's tensors: what a user hands over need not be converted first."""

from collections import UserDict
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gpipe_hpc.engine.batch.cutting import Whole
from gpipe_hpc.errors import DataError
from gpipe_hpc.pytree import Nest, flatten, unflatten


def as_tensor(array: npt.NDArray[Any], what: str) -> torch.Tensor:
    """Return the numbers of an array as a tensor, on the same memory where torch can work there.

    Numbers in another byte order, or in memory that may only be read, are copied. Raises DataError
    for an array of anything but numbers and truth values; `what` names it.
    """
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()
    try:
        return torch.from_numpy(array)
    except TypeError as error:
        raise DataError(
            f"{what}: expected an array of numbers that torch has too, got one of dtype "
            f"{array.dtype}; convert it, as array.astype('float32')"
        ) from error


def with_tensors(nest: Nest, what: str) -> Nest:
    """Return a nest whose arrays have become tensors; one without arrays as it is."""
    if isinstance(nest, torch.Tensor):
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
    if isinstance(leaf, dict | UserDict):  # without tensors, as far as it was looked at
        found = with_tensors(dict(leaf), what)
        changed = any(found[key] is not value for key, value in leaf.items())
        return type(leaf)(found) if changed else leaf
    return leaf
