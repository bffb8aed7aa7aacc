"""What a run writes of its layers for the next plan."""

import pytest

from gpipe_hpc.planner.costs.cost_models import LayerTimes
from gpipe_hpc.trainer.calibrating import _of_the_largest


def test_times_are_those_of_the_largest_micro_batch():
    """Of micro-batches of 2 and of 1 sample they were those of 1.5, and were scaled as of 2."""
    mean = LayerTimes(1.5, 3.0, 1.5, 1.5, 0.75)
    (found,) = _of_the_largest([mean], [1.0, 1.0, 0.5, 0.5, 0.0])
    assert found == pytest.approx((2.0, 4.0, 2.0, 2.0, 1.0))
    assert _of_the_largest([mean], [1.0, 1.0]) == (mean,)
