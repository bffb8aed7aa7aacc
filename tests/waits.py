"""What would make the host wait for a device; meta tensors stand for those of a device."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_READS = (
    Tensor.item,
    Tensor.tolist,
    Tensor.cpu,
    Tensor.numpy,
    Tensor.nonzero,
    torch.nonzero,
    torch.equal,
    torch.allclose,
    Tensor.__bool__,
    Tensor.__float__,
    Tensor.__int__,
    Tensor.__index__,
)
_FROM_LISTS = (torch.tensor, torch.as_tensor, Tensor.new_tensor)


class _Waits(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = [each for each in args if isinstance(each, Tensor)]
        name = getattr(func, "__name__", str(func))
        if func in _READS and any(each.is_meta for each in given):
            self.found.append(name)
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.is_meta:
            is_copy = given and not given[0].is_meta and func is Tensor.to
            if func in _FROM_LISTS or (is_copy and not (kwargs or {}).get("non_blocking")):
                self.found.append(name)
        return made


@contextmanager
def waits() -> Iterator[list[str]]:
    """List the calls within the block that make the host wait for meta tensors' device.

    Reads raise errors of torch, as there is nothing to read.
    """
    mode = _Waits()
    with mode:
        yield mode.found
