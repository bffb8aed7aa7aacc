"""Compress to float16: half the bytes of float32, with 11 bits of precision.

Its range is small: 6e-8 to 65504. So each message is multiplied by a power of two, which travels
with it and brings its largest number near the top: nothing overflows, and what is too small beside
the largest is lost to the residual.
"""

from typing import Final

import torch

from gpipe_hpc.comm.transport.wire import as_bytes
from gpipe_hpc.engine.sums.powers import power_of_two

_SCALE_BYTES: Final = 4
_TOP: Final = 15  # the largest number is at least 2 ** 14 and below 2 ** 15
# Powers of two that the numbers' own dtype can hold, as can their inverses.
_MOST: Final = 120
_MOST_OF_DOUBLE: Final = 1000


class Float16:
    """Numbers rounded to float16, behind the exponent of their common scale."""

    def num_bytes(self, count: int) -> int:
        """Return two bytes a number, and four for the exponent."""
        return 2 * count + _SCALE_BYTES if count else 0

    def encode(self, numbers: torch.Tensor, key: int) -> torch.Tensor:
        """Return the exponent and the scaled numbers, rounded to the nearest.

        Infinities and NaN arrive as such.
        """
        if not numbers.numel():
            return numbers.new_empty(0, dtype=torch.uint8)
        largest = numbers.abs().amax()
        _, exponent = torch.frexp(largest)
        has_scale = torch.isfinite(largest) & (largest > 0)
        most = _MOST_OF_DOUBLE if numbers.dtype == torch.float64 else _MOST
        shift = torch.where(has_scale, (_TOP - exponent).clamp(-most, most), 0).int()
        scaled = _times_two_to(numbers, shift).to(torch.float16)
        return torch.cat([as_bytes(shift), as_bytes(scaled)])

    def decode(self, code: torch.Tensor, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the rounded numbers, scaled back."""
        if not count:
            return code.new_empty(0, dtype=dtype)
        shift = code[:_SCALE_BYTES].view(torch.int32)
        return _times_two_to(code[_SCALE_BYTES:].view(torch.float16).to(dtype), -shift)


def _times_two_to(numbers: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    # Not `ldexp`, which takes the power of two in float32, whatever the numbers are.
    return numbers * power_of_two(exponent).to(numbers.dtype)
