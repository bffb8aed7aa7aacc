"""The loss scale of float16: one for all stages and replicas, agreed on once a step.

Micikevicius et al., Mixed precision training, 2018, section 3.2. A power of two: where nothing
over- or underflows it changes no bit of the gradients.
"""

from collections.abc import Iterable, Mapping
from typing import Final

import torch

from gpipe_hpc.comm.device import Device
from gpipe_hpc.engine.sums.norms import stacked
from gpipe_hpc.errors import NonFiniteError

_INITIAL: Final = 2.0**16
_LEAST: Final = 2.0**-16
_MOST: Final = 2.0**24


class LossScale:
    """What backward is multiplied by, so that small gradients do not vanish in float16.

    Halved when a gradient overflowed, doubled after `growth_interval` steps in a row without.
    """

    def __init__(self, growth_interval: int = 2000) -> None:
        self.value = _INITIAL
        self.num_skipped = 0  # steps, since the run began
        self._growth_interval = growth_interval
        self._num_good = 0

    def update(self, *, overflowed: bool) -> None:
        """Take note of a step; NonFiniteError where no scale helps."""
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
    """Return how many gradients hold an infinity or NaN, float64[]; the device is not waited for.

    They are looked at as they were summed, before the scale is taken out of them.
    """
    present = [gradient for gradient in gradients if gradient.numel()]
    if not present:
        return torch.zeros((), dtype=torch.float64, device=device.torch)
    peaks = stacked(torch._foreach_norm(present, torch.inf))
    return torch.isfinite(peaks).logical_not_().sum().double()
