import pytest

from gpipe_hpc.schedule import (
    Costs,
    Memory,
    Op,
    ScheduleError,
    add_offload,
    add_recompute,
    build,
    check,
    lower,
    memory_over_time,
    peak_memory,
    simulate,
)


def recomputed_places(schedule):
    return {(a.stage, a.microbatch) for row in schedule.ranks for a in row if a.op is Op.R}


@pytest.mark.parametrize("mode", ["always", "except_last", "never"])
def test_only_the_stages_named_recompute(variant, mode):
    name, options = variant
    bare = build(name, ranks=4, microbatches=8, **options)
    everywhere = add_recompute(bare, mode)
    stages = {0, bare.num_stages - 1}
    some = add_recompute(bare, mode, stages)
    check(lower(some))
    assert recomputed_places(some) == {
        (stage, microbatch)
        for stage, microbatch in recomputed_places(everywhere)
        if stage in stages
    }
    assert add_recompute(bare, mode, range(bare.num_stages)) == everywhere
    assert add_recompute(bare, mode, ()) == bare


def test_stages_that_are_not_there_are_refused():
    with pytest.raises(ScheduleError, match=r"must be from 0 to 3, got \[1, 4\]"):
        add_recompute(build("gpipe", ranks=4, microbatches=2), "always", [4, 1])


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b", "zb_h1", "chimera"])
def test_offloading_ahead_of_recomputation_spares_the_same(name):
    """What stands between a forward and its backward is compute alone."""
    bare = build(name, ranks=4, microbatches=8)
    late = add_recompute(add_offload(bare), "except_last")
    check(late)
    assert recomputed_places(late) == recomputed_places(add_recompute(bare, "except_last"))


def test_memory_of_a_stage_that_recomputes_some_of_its_layers():
    """Stage 0 keeps 4 of 10 and makes 5 again; stage 1 keeps all, whatever is named for it."""
    bare = add_recompute(build("gpipe", ranks=2, microbatches=3), "always", [0])
    memory = Memory(forward=[10.0, 20.0], boundary=[4.0, 0.0], recompute=[5.0, 99.0])
    assert peak_memory(bare, memory) == (3 * 4 + 5, 60)
    timeline = simulate(bare, Costs(forward=1, backward=2, recompute=1))
    held = [each.amount for each in memory_over_time(timeline, memory, 0)]
    assert held == [0, 4, 8, 12, 17, 13, 9, 0]
    offloaded = add_offload(bare)
    memory = Memory(forward=[10.0, 20.0], boundary=[4.0, 0.0], offload=[3.0, 0.0])
    # F0 and F1 leave 1 each; F2, with R2 filling it up to 10, and F1 fetched.
    assert peak_memory(offloaded, memory)[0] == 1 + 4 + 10
