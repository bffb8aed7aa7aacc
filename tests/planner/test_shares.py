"""How large micro-batches are, and what that does to the time and the memory of a step."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpipe_hpc.planner.shares import microbatch_shares
from gpipe_hpc.schedule import Costs, Memory, ScheduleError, build, lower, peak_memory, simulate

COSTS = Costs(forward=1.0, backward=2.0, recompute=1.0, boundary_bytes=1.0)


@given(st.integers(0, 40), st.integers(1, 3), st.integers(1, 7))
def test_shares_are_those_of_tensor_split(samples, replicas, microbatches):
    pieces = torch.arange(samples).tensor_split(replicas * microbatches)
    sizes = [len(piece) for piece in pieces]
    for replica in range(replicas):
        which = range(replica * microbatches, (replica + 1) * microbatches)
        own = sizes[which.start : which.stop]
        shares = microbatch_shares(samples, replicas * microbatches, which)
        if samples and set(own) != {sizes[0]}:
            assert [round(share * sizes[0]) for share in shares] == own
        else:
            assert shares == ()


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b", "zb_h1"])
def test_empty_micro_batches_take_no_time_and_no_memory(name):
    """A table of eight of which five are empty is as fast as one of three, and holds as much."""
    costs = replace(COSTS, backward=None, input_gradient=1.0, weight_gradient=1.0)
    costs = replace(costs, boundary_bytes=0.0)
    three, eight = (build(name, ranks=2, microbatches=n, recompute="always") for n in (3, 8))
    shares = (1.0,) * 3 + (0.0,) * 5
    few, many = simulate(three, costs), simulate(eight, replace(costs, shares=shares))
    assert sum(many.busy) == pytest.approx(sum(few.busy))
    assert many.makespan == pytest.approx(few.makespan)
    memory = Memory(forward=5.0, boundary=1.0, shares=shares)
    assert peak_memory(eight, memory) == peak_memory(three, replace(memory, shares=()))


def test_a_smaller_micro_batch_takes_its_share():
    table = lower(build("gpipe", ranks=2, microbatches=2, recompute="never"))
    shares = (1.0, 0.5)
    timeline = simulate(table, replace(COSTS, shares=shares))
    assert timeline.busy == pytest.approx((4.5, 4.5))
    times = {str(e.action): e.duration_s for row in timeline.events for e in row}
    assert times["0F1"] == 0.5 and times["1B1"] == 1.0
    assert peak_memory(table, Memory(forward=4.0, shares=shares)) == (6.0, 6.0)


@pytest.mark.parametrize("shares", [(1.0,), (1.0, 2.0), (1.0, -1.0)])
def test_shares_that_cannot_be_are_refused(shares):
    table = build("gpipe", ranks=1, microbatches=2)
    with pytest.raises(ScheduleError, match="shares needs a number from 0 to 1 for each of"):
        simulate(table, replace(COSTS, shares=shares))
