"""The loss scale of float16: one for all stages and replicas, which all know after each step.

Source: Micikevicius et al., Mixed precision training, 2018, section 3.2. It is a power of two, so
that it changes no bit of gradients that neither overflow nor underflow.
"""

from collections.abc import Iterable, Mapping
from typing import Final

import torch

from gpipe_hpc.device.device import Device
from gpipe_hpc.engine.sums.norms import stacked
from gpipe_hpc.errors import NonFiniteError

_INITIAL: Final = 2.0**16
_LEAST: Final = 2.0**-16
_MOST: Final = 2.0**24


class LossScale:
    """The factor of the loss that keeps small gradients from underflowing in float16.

    Halved when a gradient overflowed, doubled after `growth_interval` consecutive steps without
    overflow.
    """

    def __init__(self, growth_interval: int = 2000) -> None:
        self.value = _INITIAL
        self.num_skipped = 0  # steps, since the run began
        self._growth_interval = growth_interval
        self._num_good = 0

    def update(self, *, overflowed: bool) -> None:
        """Adapt the scale after a step; raise NonFiniteError if no scale avoids overflow."""
        if not overflowed:
            self._num_good += 1
            if self._num_good >= self._growth_interval:
                self.value, self._num_good = min(_MOST, self.value * 2), 0
            return
        self.num_skipped += 1
        self._num_good = 0
        if self.value <= _LEAST:
            raise NonFiniteError(
                f"loss scale: expected finite gradients at one of {_INITIAL:g} down to {_LEAST:g}, "
                f"got none that are; lower optimizer.lr, look at the data of this step, or use "
                f"train.precision=bfloat16"
            )
        self.value /= 2

    def state(self) -> dict[str, float]:
        """Return what a checkpoint keeps."""
        return {
            "value": self.value,
            "num_good": self._num_good,
            "num_skipped": self.num_skipped,
        }

    def restore(self, state: Mapping[str, float]) -> None:
        """Continue with what a checkpoint kept."""
        self.value = float(state["value"])
        self._num_good = int(state["num_good"])
        self.num_skipped = int(state["num_skipped"])


def count_overflows(gradients: Iterable[torch.Tensor], device: Device) -> torch.Tensor:
    """Return how many gradients have an infinity or NaN, float64[], without waiting for the device.

    Gradients are summed, and not yet divided by the scale.
    """
    present = [gradient for gradient in gradients if gradient.numel()]
    if not present:
        return torch.zeros((), dtype=torch.float64, device=device.torch)
    peaks = stacked(torch._foreach_norm(present, torch.inf))
    return torch.isfinite(peaks).logical_not_().sum().double()
