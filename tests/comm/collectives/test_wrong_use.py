"""What a caller gets wrong, and what a failing rank means for those that wait in a plan."""

import pytest
import torch

from gpipe_hpc.comm.collectives.group import SoloGroup
from gpipe_hpc.comm.collectives.planned import (
    start_hierarchical_all_reduce,
    start_ordered_all_reduce,
    start_ring_all_reduce,
)
from gpipe_hpc.comm.world.threads import run_on_threads
from gpipe_hpc.comm.world.world import collective_errors
from gpipe_hpc.errors import ConfigError, PeerError

ALONE = SoloGroup(0)


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (
            lambda t: start_hierarchical_all_reduce(ALONE, t, []),
            "one host for each of 1 ranks, got 0",
        ),
        (lambda t: ALONE.start_reduce_scatter(t, [5]), "sum 6, got 1 with sum 5"),
        (lambda t: ALONE.start_all_gather(t, [3, 3]), "expected 1 non-negative counts.*got 2"),
        (lambda t: ALONE.start_all_gather(t, [7, -1]), "non-negative"),
        (lambda t: ALONE.start_reduce_scatter(t.view(2, 3)), r"flat.*got shape \(2, 3\)"),
        (lambda t: ALONE.start_reduce_scatter(t[::2]), "flat contiguous"),
    ],
)
def test_a_mistake_is_answered_before_anything_is_sent(start, message):
    with pytest.raises(ConfigError, match=message):
        start(torch.zeros(6))


def refused(size, body):
    """Run a body on threads; return what each rank raised."""
    told = {}

    def caught(world):
        try:
            with collective_errors(world, "a sum"):
                body(world)
        except (ConfigError, PeerError) as error:
            told[world.rank] = str(error)
            raise

    with pytest.raises((ConfigError, PeerError)):
        run_on_threads(size, caught, timeout_s=20)
    return told


@pytest.mark.parametrize(
    "start",
    [
        lambda group, odd: start_ring_all_reduce(group, torch.zeros(7 if odd else 6)),
        lambda group, odd: (start_ordered_all_reduce if odd else start_ring_all_reduce)(
            group, torch.zeros(6)
        ),
        lambda group, odd: start_ring_all_reduce(
            group, torch.zeros(6, dtype=torch.int32 if odd else torch.int64)
        ),
        lambda group, odd: group.start_all_gather(torch.zeros(6), [3, 3, 0] if odd else [2, 2, 2]),
        lambda group, odd: start_hierarchical_all_reduce(
            group, torch.zeros(6), [0, 0, 1] if odd else [0, 1, 1]
        ),
    ],
)
def test_ranks_that_start_different_things_all_hear_of_it(start):
    told = refused(3, lambda world: start(world.world_group, world.rank == 2).wait())
    assert told.keys() == {0, 1, 2}
    assert all("ranks call different collectives" in each for each in told.values()), told


def test_a_rank_that_fails_ends_the_plans_of_all():
    def body(world):
        start_ring_all_reduce(world.world_group, torch.zeros(6)).wait()
        if world.rank == 1:
            raise ConfigError("rank 1: the cause")
        start_ring_all_reduce(world.world_group, torch.zeros(6)).wait()

    told = refused(3, body)
    assert told.keys() == {0, 1, 2} and all("the cause" in each for each in told.values())


def test_after_a_failure_no_plan_behind_it_is_carried_out():
    def body(world):
        first = start_ring_all_reduce(world.world_group, torch.zeros(7 if world.rank else 6))
        behind = start_ring_all_reduce(world.world_group, torch.zeros(3))
        errors = []
        for pending in (first, behind):
            with pytest.raises((ConfigError, ConnectionError)) as caught:
                pending.wait()
            errors.append(caught.value)
        assert errors[0] is errors[1]
        return "same"

    assert run_on_threads(2, body, timeout_s=10) == ["same", "same"]
