"""Run a model where it asks for values that are not there, as it would run with them."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gpipe_hpc.models.huggingface.library import transformers_part
from gpipe_hpc.torch_compat import FakeTensor

# One thread at a time may tell transformers what to take for tracing.
_TOLD: Final = threading.Lock()

# What multiplies the rows of each expert with its own weights, in new and old versions of torch.
_GROUPED: Final = tuple(
    getattr(owner, name)
    for owner, name in ((torch.nn.functional, "grouped_mm"), (torch, "_grouped_mm"))
    if hasattr(owner, name)
)


class SayYes(TorchFunctionMode):
    """Answer yes where a model asks whether something holds of tensors without values.

    transformers asks whether all tokens count, and whether all positions are of one sequence, to
    leave out masks that mask nothing. Products of experts have no kernel without values but for
    some shapes in bfloat16: one product of all rows takes their place.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one function of torch."""
        if func is Tensor.__bool__ and is_valueless(args[0]) and args[0].dtype == torch.bool:
            return True
        if func in _GROUPED and is_valueless(args[0]):
            rows, weights = args[:2]
            return rows @ weights[0]
        return func(*args, **(kwargs or {}))


def is_valueless(tensor: Tensor) -> bool:
    """Say whether a tensor has a shape alone: on the meta device, or it claims another one."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


@contextmanager
def run_as_with_values(given: Tensor) -> Iterator[None]:
    """Let a model take the way that it takes with values, if what it is given has none.

    transformers takes a FakeTensor for a sign that a graph is traced which must hold for all
    values. It then makes every mask, where an eager run leaves out those that mask nothing.
    """
    if not is_valueless(given):
        yield
    elif given.is_meta:
        with SayYes():
            yield
    else:
        utilities = transformers_part("utils.import_utils")
        with _TOLD, SayYes():
            looks_traced = utilities.is_fake_tensor
            utilities.is_fake_tensor = _is_no_sign_of_tracing
            try:
                yield
            finally:
                utilities.is_fake_tensor = looks_traced


def _is_no_sign_of_tracing(tensor: object) -> bool:
    return False
