"""Running of models on tensors without values, along the same code path as with values."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gpipe_hpc.models.huggingface.library import transformers_part
from gpipe_hpc.torch_compat import FakeTensor

# Serialises changes of transformers' detection of tracing.
_TRACING_LOCK: Final = threading.Lock()

# The grouped matmul of experts, in new and old versions of torch.
_GROUPED: Final = tuple(
    getattr(owner, name)
    for owner, name in ((torch.nn.functional, "grouped_mm"), (torch, "_grouped_mm"))
    if hasattr(owner, name)
)


class TrueConditions(TorchFunctionMode):
    """Torch function mode in which boolean conditions on tensors without values are true.

    transformers checks whether all tokens are unmasked, and whether all positions belong to one
    sequence, to omit masks that mask nothing. Grouped matmuls of experts have a meta kernel only
    for some shapes in bfloat16, so they are replaced by a single matmul of all rows.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one torch function."""
        if func is Tensor.__bool__ and is_valueless(args[0]) and args[0].dtype == torch.bool:
            return True
        if func in _GROUPED and is_valueless(args[0]):
            rows, weights = args[:2]
            return rows @ weights[0]
        return func(*args, **(kwargs or {}))


def is_valueless(tensor: Tensor) -> bool:
    """Return whether a tensor has no values: it is on the meta device or a FakeTensor."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


@contextmanager
def run_without_values(given: Tensor) -> Iterator[None]:
    """Context in which a model takes the code path of an eager run, if `given` has no values.

    transformers treats a FakeTensor as a sign that a graph is traced for all values. It then builds
    every mask, while an eager run omits masks that mask nothing.
    """
    if not is_valueless(given):
        yield
    elif given.is_meta:
        with TrueConditions():
            yield
    else:
        utilities = transformers_part("utils.import_utils")
        with _TRACING_LOCK, TrueConditions():
            looks_traced = utilities.is_fake_tensor
            utilities.is_fake_tensor = _is_no_sign_of_tracing
            try:
                yield
            finally:
                utilities.is_fake_tensor = looks_traced


def _is_no_sign_of_tracing(tensor: object) -> bool:
    return False
