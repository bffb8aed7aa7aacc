"""What the sums of gradients are divided by: the same bits on every device, by few kernels."""

from collections.abc import Iterator, Sequence
from typing import Final, TypeVar

import torch
from torch import Tensor

from gpipe_hpc.comm.device import Device

_LOW: Final = (torch.bfloat16, torch.float16)
_SMALL: Final = 2**18  # elements: a kernel of its own takes no longer to start than to run
PACK: Final = 2**22
"""Elements of tensors that are worked on together, of which there is a copy at a time."""

T = TypeVar("T", bound=Tensor)


class Divisor:
    """One number, float64[] on a device, that gradients of any dtypes are divided by.

    They are divided in their own precision, those in 16 bits in float32. A CPU divides these by the
    number as it is; a device would round it to 16 bits as well, so they are made wide there.
    """

    def __init__(self, value: Tensor, device: Device) -> None:
        self.value = value
        self._device = device
        self._known: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def divide(self, tensors: Sequence[Tensor]) -> None:
        """Divide tensors in place."""
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in tensors:
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        for (dtype, where), kind in kinds.items():
            is_low = dtype in _LOW
            number = self._number(torch.float32 if is_low else dtype, where)
            if is_low and self._device.is_accelerator:
                _divide_wide(kind, number)
            else:
                torch._foreach_div_(kind, number)

    def _number(self, dtype: torch.dtype, where: torch.device) -> Tensor:
        # Of the tensors' own dtype, or torch divides them one by one.
        known = self._known.get((dtype, where))
        if known is None:
            is_there = where == self.value.device
            number = self.value if is_there else self._device.fetch(self.value)
            known = self._known[dtype, where] = number.to(dtype)
        return known


def _divide_wide(tensors: Sequence[Tensor], divisor: Tensor) -> None:
    small = [tensor for tensor in tensors if tensor.numel() <= _SMALL]
    for pack in packs(small, PACK):
        wide = [torch.empty_like(tensor, dtype=torch.float32) for tensor in pack]
        torch._foreach_copy_(wide, pack)
        torch._foreach_div_(wide, divisor)
        torch._foreach_copy_(pack, wide)
    for tensor in tensors:
        if tensor.numel() > _SMALL:
            tensor.div_(divisor.view(1))  # which, unlike a scalar, makes the quotient wide


def packs(tensors: Sequence[T], most: int) -> Iterator[list[T]]:
    """Yield tensors that follow one another, with at most so many elements together, or one."""
    pack: list[T] = []
    num_elements = 0
    for tensor in tensors:
        if num_elements + tensor.numel() > most and pack:
            yield pack
            pack, num_elements = [], 0
        pack.append(tensor)
        num_elements += tensor.numel()
    if pack:
        yield pack
