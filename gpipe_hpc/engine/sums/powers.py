"""Powers of two, exact on every device: made of their bits.

`torch.ldexp` multiplies by `torch.pow(2, n)` in float32, which a device may round.
"""

from typing import Final

import torch

_BIAS: Final = 1023  # of float64's exponent, which is that of 2 ** (n - 1) for n
_FRACTION_BITS: Final = 52
_EXPONENT: Final = 0x7FF << _FRACTION_BITS
_MIRROR: Final = (2 * _BIAS - 1) << _FRACTION_BITS


def power_near_inverse(number: torch.Tensor) -> torch.Tensor:
    """Return the power of two that brings a number to at least 1/2 and below 1, float64.

    Numbers are float64, positive and finite.
    """
    return (_MIRROR - (number.view(torch.int64) & _EXPONENT)).view(torch.float64)


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """Return 2 ** exponent, float64, for whole numbers from -1022 to 1023."""
    return ((exponent.to(torch.int64) + _BIAS) << _FRACTION_BITS).view(torch.float64)
