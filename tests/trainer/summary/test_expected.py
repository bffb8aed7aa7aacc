"""The step that a run expects, by the layers that it measured."""

import pytest

from gpipe_hpc.schedule import Cluster, Link
from gpipe_hpc.trainer.machines import slow_once

FREE = Link()


@pytest.mark.parametrize(("paces", "expected"), [((), {1: 2.0}), ((1.0, 2.0), {0: 1.0, 1: 1.0})])
def test_a_rank_is_slow_once_where_the_cut_knows_it(paces, expected):
    """Measured paces and a links file that tells the same made it four times as slow."""
    told = Cluster((2,), FREE, FREE, paces={1: 2.0})
    assert slow_once(told, paces).paces == expected
    assert slow_once(told, paces, 3.0).paces == {
        rank: pace * 3 if paces else pace for rank, pace in expected.items()
    }
