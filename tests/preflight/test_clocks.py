"""How far apart clocks are, by what ranks know of one meeting."""

import time
from functools import partial

import pytest

from gpipe_hpc.comm.world.threads import run_on_threads
from gpipe_hpc.preflight.clocks import merge_clock_bounds, timed_barrier


def met(offsets, late=()):
    """Return what all ranks know where each clock is ahead by an offset; some come late."""

    def task(world):
        clock = partial(lambda ahead_s: time.time() + ahead_s, offsets[world.rank])
        if world.rank in late:
            time.sleep(0.3)
        own = timed_barrier(world.world_group, world.rank, f"host{world.rank}", clock)
        return world.world_group.merge_object(own, merge_clock_bounds)

    found = run_on_threads(len(offsets), task)
    assert len(set(found)) == 1
    return found[0]


@pytest.mark.parametrize("late", [(), (0,), (3,)])
def test_clocks_that_agree_are_never_said_to_differ(late):
    assert met([0.0] * 5, late).skew_s == 0


@pytest.mark.parametrize("late", [(), (0,), (2,)])
def test_a_clock_that_is_ahead_is_found_with_its_host_and_by_how_much(late):
    found = met([0.0, 0.0, 100.0, 0.0, 0.0], late)
    assert str(found.entry) == "rank 2 on host2"
    assert found.exit.rank != 2
    assert 95 < found.skew_s <= 100


def test_a_clock_that_is_behind_is_found():
    found = met([0.0, -50.0, 0.0])
    assert str(found.exit) == "rank 1 on host1"
    assert 45 < found.skew_s <= 50
