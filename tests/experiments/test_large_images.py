"""Large images: which schedules fit, and what the cuts and times stand on."""

import pytest

from experiments.large_images.planned import (
    CONTESTANTS,
    balances,
    counted,
    fullest_bytes,
    largest_side,
    step_in_forwards,
)
from gpipe_hpc.schedule import build

BY_NAME = {each.name: each for each in CONTESTANTS}
GEMS = BY_NAME["gems, one image a pass (MASTER)"]
ALONE = BY_NAME["no pipeline: one image at a time"]


def test_only_gems_overlaps_with_one_image_kept():
    """At 1,568 pixels and 16 GiB: gems, and what runs one image at a time, which is slower."""
    limit = 16 * 2**30
    for recompute in ("never", "always"):
        fit = {
            name
            for name, each in BY_NAME.items()
            if fullest_bytes(1568, each, 4, 8, recompute)[0] <= limit
        }
        assert fit == {GEMS.name, ALONE.name}
    assert step_in_forwards(ALONE, 4, 8, "never") == 8 * 4 * 3
    assert step_in_forwards(GEMS, 4, 8, "never") == 75


def test_memory_goes_with_the_live_images():
    held = {name: fullest_bytes(256, each, 4, 8, "never")[0] for name, each in BY_NAME.items()}
    assert held["gpipe"] > 6 * held[ALONE.name]
    assert held[ALONE.name] < 1.1 * held[GEMS.name]
    assert held[ALONE.name] < held["one_f_one_b"] / 1.5 < held["gpipe"]


def test_a_cut_for_1f1b_gives_ranks_that_keep_more_images_fewer_layers():
    table = build("one_f_one_b", ranks=4, microbatches=8)
    even, by_live = balances(counted(256), table)
    assert sum(even) == sum(by_live) == len(counted(256).layers)
    assert by_live[0] < even[0] and by_live[-1] > even[-1]


@pytest.mark.parametrize("most", [0, 32, 96])
def test_the_largest_side_is_found(most):
    assert largest_side(lambda side: side <= most) == most
