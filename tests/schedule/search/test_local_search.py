"""Local search follows all that holds an action up, and moves what belongs together."""

from dataclasses import replace

import pytest

from gpipe_hpc.schedule import (
    Costs,
    Link,
    Memory,
    add_offload,
    add_recompute,
    build,
    check,
    from_text,
    lower,
    peak_memory,
    simulate,
)
from gpipe_hpc.schedule.search.local_search import improve


def anything(schedule):
    return True


def improved(schedule, costs, fits=anything, trials=500):
    """Return a table after local search, which must run and hold the same actions."""
    found = improve(schedule, costs, fits, trials)
    check(found)
    check(lower(found))
    assert [sorted(row) for row in found.ranks] == [sorted(row) for row in schedule.ranks]
    return found


def test_fetches_move_ahead_where_backwards_wait_for_them():
    """The path broke off at a copy, which ends later than what the rank computes beside it."""
    table = add_offload(build("gpipe", ranks=1, microbatches=4))
    costs = Costs(forward=1.0, backward=2.0, offload=0.5, fetch=3.0)
    assert simulate(table, costs).makespan == 14
    # No rank that computes for 12 is over sooner.
    assert simulate(improved(table, costs), costs).makespan == 12


def test_the_path_leads_over_the_skip_that_comes_late():
    """It went to the neighbour, which had long been done, and on among early actions: 25."""
    table = from_text("0F0,0F1,0F2\n1F1,1F0,1F2\n2F2,2F0,2F1\n3F1,3F2,3F0\nskips,0>3\n", "skipping")
    costs = Costs(forward=[1, 2, 3, 3], skip_bytes={(0, 3): 5.0}, link=Link(bandwidth=1.0))
    assert simulate(table, costs).makespan == 26
    assert simulate(improved(table, costs), costs).makespan == 19


def test_recomputation_moves_with_its_backward_where_memory_allows_no_more():
    """Each R was swapped alone, which keeps two micro-batches in full: nothing was found."""
    table = from_text("0F1,0F2,0F0,0R1,0B1,0R2,0B2,0R0,0B0\n1F1,1F2,1F0,1R0,1B0,1R2,1B2,1R1,1B1\n")
    costs = Costs(forward=1, backward=2, recompute=1, send=0.5)
    memory = Memory(forward=10.0, boundary=1.0)
    most = 3 * 1 + 9

    def fits(schedule):
        return max(peak_memory(schedule, memory)) <= most

    assert fits(table)
    assert simulate(table, costs).makespan == 22
    found = improved(table, costs, fits)
    assert fits(found)
    assert simulate(found, costs).makespan == 19


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b", "zb_h1", "interleaved", "zb_v"])
def test_what_comes_out_runs_and_is_no_slower(name):
    bare = build(name, ranks=2, microbatches=4)
    if bare.num_stages >= 3:
        bare = replace(bare, skips=((0, bare.num_stages - 1),))
    table = add_offload(add_recompute(bare, "except_last"))
    costs = Costs(
        forward=1.0,
        backward=2.2,
        input_gradient=1.1,
        weight_gradient=1.2,
        recompute=0.9,
        send=0.3,
        offload=1.0,
        fetch=2.0,
    )
    found = improved(table, costs, trials=60)
    assert simulate(found, costs).makespan <= simulate(table, costs).makespan
