import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe_hpc.schedule import (
    Costs,
    Link,
    Memory,
    MemoryAllowance,
    Op,
    ScheduleError,
    add_recompute,
    build,
    check,
    lower,
    lower_bound,
    peak_memory,
    place,
    schedule_names,
    search,
    simulate,
)

ONE_EACH = Costs(forward=1, input_gradient=1, weight_gradient=1)
SHAPES = [("one_each", 1), ("looped", 2), ("wave", 2), ("mirrored", 1)]


def options_for(name, shape, stages_per_rank):
    """Return the options with which a schedule may come out on a placement."""
    if name in ("looped_bfs", "interleaved"):
        return {"stages_per_rank": stages_per_rank}
    return {"waves": 1} if name == "hanayo" else {}


def named_makespans(placement, shape, stages_per_rank, costs, limit):
    """Yield name and time of each schedule known by name on a placement and within a limit."""
    for name in schedule_names():
        if name in ("auto", "file"):
            continue
        try:
            bare = build(
                name,
                ranks=placement.num_ranks,
                microbatches=placement.num_microbatches,
                **options_for(name, shape, stages_per_rank),
            )
        except ScheduleError:
            continue
        if bare.placement == placement and (limit is None or max(bare.max_activations) <= limit):
            yield name, simulate(bare, costs).makespan


@pytest.mark.parametrize(("shape", "stages_per_rank"), SHAPES)
@pytest.mark.parametrize("limit", [None, 4, 8])
def test_never_worse_than_the_best_known_by_name(shape, stages_per_rank, limit):
    draw = random.Random(f"{shape} {limit}")
    for ranks, microbatches in ((2, 3), (4, 6)):
        placement = place(shape, ranks, microbatches, stages_per_rank)
        times = [[draw.uniform(0.5, 2) for _ in range(placement.num_stages)] for _ in range(3)]
        costs = Costs(*times[:1], None, *times[1:], send=0.1)
        found = search(placement, costs, limit=limit, trials=10)
        check(found.schedule)
        check(lower(found.schedule))
        assert found.schedule.placement == placement
        assert found.makespan == simulate(found.schedule, costs).makespan
        assert found.makespan >= found.lower_bound - 1e-9
        assert found.gap == pytest.approx(found.makespan / found.lower_bound - 1)
        if limit is not None:
            assert max(simulate(found.schedule, costs).peak_activations) <= limit
        named = dict(named_makespans(placement, shape, stages_per_rank, costs, limit))
        if named:
            assert found.makespan <= min(named.values()) + 1e-9
            assert found.best_named_makespan == pytest.approx(min(named.values()))


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "options"),
    [
        ("gems", 3, 8, {"replications": 2}),
        ("chimera", 4, 3, {"scaling": "forward_doubling"}),
        ("chimera", 4, 2, {"pipelines": 4}),
    ],
)
def test_never_worse_than_what_a_schedule_does_with_options(name, ranks, microbatches, options):
    """Under the very memory that it takes, which may leave list scheduling no room."""
    bare = build(name, ranks=ranks, microbatches=microbatches, **options)
    draw = random.Random(7)
    for _ in range(5):
        costs = Costs(*([draw.uniform(0.5, 2) for _ in range(ranks)] for _ in range(2)))
        found = search(bare.placement, costs, limit=bare.max_activations, trials=10)
        assert found.makespan <= simulate(bare, costs).makespan + 1e-9


def test_a_cost_that_is_not_known_is_refused():
    with pytest.raises(ScheduleError, match=r"unknown cost 'fwd', expected some of forward"):
        build("auto", ranks=2, microbatches=2, costs={"fwd": 1})


def test_optimal_where_a_published_schedule_is():
    """ZB-H1 at F = I = W, 1F1B where backwards are whole, ZB-V on a V: no gap to the bound."""
    for shape, limit in (("one_each", 4), ("wave", 8)):
        assert search(place(shape, 4, 8), ONE_EACH, limit=limit).gap == pytest.approx(0)
    whole = search(place("one_each", 4, 8), Costs(forward=1, backward=2), limit=4)
    assert whole.gap == pytest.approx(0)
    assert not any(a.op in (Op.I, Op.W) for row in whole.schedule.ranks for a in row)


def test_backwards_are_split_only_where_it_helps():
    """One rank gains nothing; on several, only what fills a bubble is split."""
    alone = search(place("one_each", 1, 4), ONE_EACH).schedule
    assert {action.op for row in alone.ranks for action in row} == {Op.F, Op.B}
    found = search(place("one_each", 3, 6), ONE_EACH, limit=3)
    row = found.schedule.ranks[0]
    assert any(action.op is Op.B for action in row)
    assert found.makespan == simulate(build("zb_h1", ranks=3, microbatches=6), ONE_EACH).makespan


RECOMPUTED = Memory(forward=10.0, boundary=1.0)


def with_r(schedule):
    return add_recompute(schedule, "always")


@pytest.mark.parametrize(
    ("dressed", "limits"), [(with_r, [12.0, 13.0, 14.0]), (lambda table: table, [30.0, 20.0, 10.0])]
)
def test_what_ranks_may_hold_is_that_of_the_table_as_it_runs(dressed, limits):
    """With recomputation a rank has room for many boundaries, and for one micro-batch in full."""
    placement = place("one_each", 3, 6)
    within = MemoryAllowance(RECOMPUTED, limits, dressed)
    found = search(placement, ONE_EACH, within=within, trials=10)
    peaks = peak_memory(dressed(found.schedule), RECOMPUTED)
    assert all(peak <= most for peak, most in zip(peaks, limits, strict=True))
    free = search(placement, ONE_EACH, trials=10)
    assert within.excess(free.schedule) > 0 and found.makespan >= free.makespan


def test_where_nothing_fits_the_order_that_needs_least_is_found():
    within = MemoryAllowance(RECOMPUTED, [5.0] * 3, lambda table: table)
    found = search(place("one_each", 3, 6), ONE_EACH, within=within, trials=10).schedule
    assert peak_memory(found, RECOMPUTED) == (10.0, 10.0, 10.0)
    assert build("auto", ranks=3, microbatches=6, trials=10, within=lambda placement: within)


@pytest.mark.parametrize("name", ["auto", "gpipe"])
def test_what_ranks_may_hold_is_no_setting(name):
    with pytest.raises(ScheduleError, match=r"unknown option 'within', expected"):
        build(name, ranks=2, microbatches=2, within=3)


def test_memory_in_bytes():
    """Room for the weights and two micro-batches on rank 0, three on rank 1."""
    memory = Memory(forward=[10, 20], weights=[100, 50])
    placement = place("one_each", 2, 4)
    found = search(placement, ONE_EACH, limit=[125, 110], memory=memory)
    peaks = peak_memory(found.schedule, memory)
    assert peaks[0] <= 125
    assert peaks[1] <= 110
    assert found.schedule.max_activations[0] == 2
    with pytest.raises(ScheduleError, match=r"no order stays within the limit \[105, 110\]"):
        search(placement, ONE_EACH, limit=[105, 110], memory=memory)
    with pytest.raises(ScheduleError, match="one for each of 2 ranks, got 3"):
        search(placement, ONE_EACH, limit=[1, 2, 3])


def test_auto_is_a_schedule_by_name():
    costs = {"forward": [1, 2], "backward": [2, 4]}
    bare = build("auto", ranks=2, microbatches=4, costs=costs, limit=2, recompute="always")
    check(lower(bare))
    assert bare.name == "auto"
    assert max(bare.max_activations) <= 2
    default = build("auto", ranks=2, microbatches=1)
    assert simulate(default, ONE_EACH).makespan == 5
    for kind, count in (("ring", 2), ("wave", 3)):
        with pytest.raises(ScheduleError, match="placement must be one_each, looped, mirrored"):
            build("auto", ranks=2, microbatches=1, placement=kind, stages_per_rank=count)


def test_the_same_search_finds_the_same_table():
    """Ranks search on their own and have to agree."""
    costs = Costs(
        forward=[1, 1.5, 0.7], input_gradient=1.1, weight_gradient=[0.5, 0.6, 1], send=0.2
    )
    tables = [search(place("one_each", 3, 7), costs, limit=3).schedule for _ in range(2)]
    assert tables[0] == tables[1]


def test_a_slow_rank_is_searched_for_as_a_slow_stage_is():
    """With a stage for each rank it is the same, so orders, times and bounds are."""
    times = {"input_gradient": [1.0, 1.0, 1.0], "weight_gradient": [0.5, 0.5, 0.5]}
    slow = Costs(forward=[1.0, 1.0, 1.0], paces={1: 2.0}, **times)
    same = Costs(forward=[1.0, 2.0, 1.0], **{k: [v[0], 2 * v[1], v[2]] for k, v in times.items()})
    placement = place("one_each", 3, 5)
    by_rank, by_stage = (search(placement, costs, limit=3) for costs in (slow, same))
    assert by_rank == by_stage
    even = search(placement, replace(slow, paces={}), limit=3)
    assert even.lower_bound < by_rank.lower_bound


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["gpipe", "one_f_one_b", "zb_h1", "zb_h2", "zb_v", "gems", "dualpipe_v"]),
    st.lists(st.floats(0.01, 5), min_size=24, max_size=24),
    st.floats(0, 2),
    st.integers(1, 6),
    st.dictionaries(st.integers(0, 3), st.floats(0.2, 4)),
)
def test_no_table_beats_the_lower_bound(name, times, latency, microbatches, paces):
    bare = build(name, ranks=4, microbatches=microbatches)
    stages = bare.num_stages
    costs = Costs(
        forward=times[:stages],
        input_gradient=times[8 : 8 + stages],
        weight_gradient=times[16 : 16 + stages],
        link=Link(latency=latency),
        paces=paces,
    )
    assert simulate(bare, costs).makespan >= lower_bound(bare.placement, costs, True) - 1e-9


def test_skips_are_part_of_what_is_searched():
    """An order found without them was slower once the transfers over skips were waited for."""
    placement = place("one_each", 4, 6)
    costs = Costs(
        forward=[1, 2, 1, 2],
        backward=[2, 4, 2, 4],
        skip_bytes={(0, 3): 4.0},
        link=Link(bandwidth=1.0),
    )
    skips = ((0, 3),)
    found = search(placement, costs, trials=20, skips=skips)
    check(lower(found.schedule))
    assert found.schedule.skips == skips
    assert found.makespan == simulate(found.schedule, costs).makespan
    blind = replace(search(placement, costs, trials=20).schedule, skips=skips)
    assert found.makespan <= simulate(blind, costs).makespan
