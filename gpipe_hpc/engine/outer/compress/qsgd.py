"""QSGD: numbers rounded by chance to a few levels (Alistarh et al., 2017, arXiv 1610.02132).

Legend: d numbers of a group, s levels, u drawn evenly from [0, 1).

A group's numbers x become ``sign(x) floor(|x| / m * s + u)`` of -s to s, where m, the largest of
the group, travels beside. (The paper divides by the group's 2-norm, or by m, with which less is
lost.) The mean of what arrives is x. One group loses at most ``sqrt(d) / (2 s) - 1/2`` of its
squared norm: below 1, so what error feedback adds up stays bounded, for d = 256 from s = 7 on.

The largest number travels as float32. One of float64 that float32 cannot hold travels as the next
power of two: the negative of its exponent, moved by 2048.
"""

from typing import Final

import torch

from gpipe_hpc.comm.transport.wire import as_bytes
from gpipe_hpc.errors import ConfigError

GROUP: Final = 256
LEAST_LEVELS: Final = 7
MOST_LEVELS: Final = 127
_MOVED: Final = 2048  # more than any exponent of float64
_MOST_EXPONENT: Final = 1023  # of a power of two that float64 can hold
_LEAST, _MOST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


class QSGD:
    """Numbers rounded by chance to one of 2 s + 1 levels, in 4 bits up to s = 7, else in 8."""

    def __init__(self, levels: int) -> None:
        if not LEAST_LEVELS <= levels <= MOST_LEVELS:
            raise ConfigError(
                f"outer.qsgd_levels: expected {LEAST_LEVELS} (4 bits a number) to {MOST_LEVELS} "
                f"(8 bits), got {levels}; with fewer what is lost would add up without bound"
            )
        self._levels = levels
        self._per_byte = 2 if levels <= LEAST_LEVELS else 1

    def num_bytes(self, count: int) -> int:
        """Return 4 or 8 bits a number, in whole groups, and four bytes a group."""
        num_groups = -(-count // GROUP)
        return num_groups * (GROUP // self._per_byte + 4)

    def encode(self, numbers: torch.Tensor, key: int) -> torch.Tensor:
        """Return the largest number of each group, then the levels."""
        count, device = numbers.numel(), numbers.device
        num_groups = -(-count // GROUP)
        padded = numbers.new_zeros(num_groups * GROUP)
        padded[:count] = numbers
        groups = padded.view(num_groups, GROUP)
        told = _told(groups.abs().amax(1, keepdim=True) if count else groups[:, :1])
        largest = _meant(told, numbers.dtype)
        generator = torch.Generator(device).manual_seed(key)
        chance = torch.rand(groups.shape, generator=generator, device=device)
        # Below s + 1 also where u is nearly 1; the largest of a group is exact.
        share = (groups / torch.where(largest > 0, largest, 1)).abs_().mul_(self._levels)
        level = share.add_(chance).floor_().clamp_(max=self._levels).copysign_(groups)
        shifted = level.add_(self._levels).to(torch.uint8).view(-1)
        if self._per_byte == 2:
            shifted = shifted[0::2] | shifted[1::2] << 4
        return torch.cat([as_bytes(told), shifted])

    def decode(self, code: torch.Tensor, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the levels as numbers."""
        num_groups = -(-count // GROUP)
        largest = _meant(code[: 4 * num_groups].view(torch.float32).view(-1, 1), dtype)
        shifted = code[4 * num_groups :]
        if self._per_byte == 2:
            shifted = torch.stack([shifted & 15, shifted >> 4], 1)
        level = shifted.view(num_groups, GROUP).to(dtype).sub_(self._levels)
        return level.mul_(largest / self._levels).view(-1)[:count].contiguous()


def _told(largest: torch.Tensor) -> torch.Tensor:
    """Return the largest number of each group, float32[groups, 1], as it travels."""
    _, exponent = torch.frexp(largest)
    exponent = exponent.clamp(max=_MOST_EXPONENT)
    is_held = (largest == 0) | ((largest >= _LEAST) & (largest <= _MOST))
    fits = is_held | ~torch.isfinite(largest)
    told = torch.where(fits, largest.to(torch.float32), -(exponent + _MOVED).to(torch.float32))
    return told.contiguous()


def _meant(told: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return what was the largest of each group, or the power of two behind it."""
    wide = told.to(dtype)
    return torch.where(told < 0, torch.exp2(-wide - _MOVED), wide)
