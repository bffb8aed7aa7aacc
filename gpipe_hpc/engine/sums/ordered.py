"""Sums from left to right, as a plain loop adds: the same bits on every device.

`torch.cumsum` has that order on a CPU. On an accelerator it has another one, and is refused under
`torch.use_deterministic_algorithms`.
"""

from collections.abc import Callable
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from gpipe_hpc.comm.device import Device

OrderedSum = Callable[[Tensor], Tensor]
"""Returns the sum over the first dimension, of at least one: float64[...] of float64[numbers, ...].

`...` is nothing, or one dimension.
"""

_NUM_PROBED: Final = 4099


def ordered_sum(device: Device) -> OrderedSum:
    """Return what sums on a device; looks once, and waits for it, whether one kernel can."""
    if not device.is_accelerator:
        return _by_prefixes
    generator = torch.Generator().manual_seed(0)
    spread = torch.randint(-20, 20, (_NUM_PROBED,), generator=generator).double().exp2()
    numbers = torch.randn(_NUM_PROBED, generator=generator, dtype=torch.float64) * spread
    columns = torch.stack([numbers, numbers.flip(0)], 1)
    try:
        found = [device.fetch(_by_bag(device.bring(each))) for each in (numbers, columns)]
    except RuntimeError:  # it has no such kernel
        return _one_by_one
    expected = [_by_prefixes(each) for each in (numbers, columns)]
    return _by_bag if all(map(torch.equal, found, expected)) else _one_by_one


def _by_prefixes(numbers: Tensor) -> Tensor:
    return numbers.cumsum(0)[-1]


def _by_bag(numbers: Tensor) -> Tensor:
    """Sum the rows of one bag: CUDA has a thread for each column, which adds row after row."""
    count = len(numbers)
    order = torch.arange(count, device=numbers.device).view(1, count)
    summed = F.embedding_bag(order, numbers.reshape(count, -1), mode="sum")
    return summed.view(numbers.shape[1:])


def _one_by_one(numbers: Tensor) -> Tensor:
    total, *others = numbers.unbind()
    for number in others:
        total = total + number
    return total
