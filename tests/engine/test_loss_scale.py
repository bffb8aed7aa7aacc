"""The loss scale: changes, limits, stored state and detection of overflows."""

import json
import math

import pytest
import torch

from gpipe_hpc.device.device import HostDevice
from gpipe_hpc.engine.precision import LossScale, count_overflows
from gpipe_hpc.errors import NonFiniteError

CPU = HostDevice()


def test_scale_halves_on_overflow_and_doubles_after_the_interval():
    scale = LossScale(growth_interval=3)
    start, seen = scale.value, []
    for overflowed in (False, True, False, False, False, True, True, False, False, False, False):
        scale.update(overflowed=overflowed)
        seen.append(scale.value / start)
    assert seen == [1, 0.5, 0.5, 0.5, 1, 0.5, 0.25, 0.25, 0.25, 0.5, 0.5]
    assert scale.num_skipped == 3
    assert math.frexp(scale.value)[0] == 0.5  # a power of two


def test_restored_scale_continues_identically():
    one, other = LossScale(3), LossScale(3)
    for overflowed in (True, False, False):
        one.update(overflowed=overflowed)
    other.restore(json.loads(json.dumps(one.state())))
    one.update(overflowed=False)
    other.update(overflowed=False)
    assert one.state() == other.state()
    assert one.value == 2 * 2.0**15


def test_scale_stays_within_limits():
    scale = LossScale(growth_interval=1)
    for _ in range(40):
        scale.update(overflowed=False)
    assert scale.value == 2.0**24
    with pytest.raises(NonFiniteError, match="loss scale: gradients are not finite"):
        for _ in range(60):
            scale.update(overflowed=True)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_non_finite_gradient_counts_as_overflow(bad):
    # The sum of these values overflows float32, but each of them is finite.
    good = [torch.full((5,), 1e38), torch.zeros(0), torch.ones(2, dtype=torch.float64) * 1e300]
    assert count_overflows(good, CPU) == 0
    assert count_overflows([], CPU) == 0
    good[0][3] = bad
    assert count_overflows(good, CPU) == 1
