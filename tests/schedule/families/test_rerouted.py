"""Tables in rows with holes: proved for any number of ranks, and as fast as ranks allow."""

from collections import Counter
from itertools import product
from operator import mul

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe_hpc.errors import ScheduleError
from gpipe_hpc.schedule import Costs, build, check, forward_only, lower, num_stages, simulate
from gpipe_hpc.schedule.families.rerouted import ORDERS
from gpipe_hpc.schedule.table.placements import copies_in_rows


@st.composite
def sizes(draw):
    """Draw ranks, stages, micro-batches, and how many ranks hold each stage, evenly or not."""
    stages = draw(st.integers(1, 5))
    copies = draw(st.lists(st.integers(1, 4), min_size=stages, max_size=stages))
    is_given = draw(st.booleans())
    return sum(copies), stages, draw(st.integers(1, 9)), copies if is_given else None


@given(sizes(), st.sampled_from(ORDERS), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_each_table_is_proved_and_keeps_its_bound(size, order, room):
    """No deadlock, each action once, every share even; and memory as the docstring says."""
    ranks, stages, microbatches, copies = size
    table = build(
        "rerouted",
        ranks=ranks,
        microbatches=microbatches,
        stages=stages,
        order=order,
        copies=copies,
        room=room,
    )
    check(lower(table))
    check(lower(forward_only(table)))
    placement = table.placement
    held = [len(placement.holders(stage)) for stage in range(stages)]
    assert held == (copies or held) and sum(held) == ranks and max(held) - min(held) < 4
    rows = max(held)
    kept = {"gpipe": [microbatches] * stages, "zb_h1": [stages] * stages}
    kept["one_f_one_b"] = [stages - stage for stage in range(stages)]
    homes = [microbatch % rows for microbatch in range(microbatches)]
    for stage in range(stages):
        taken = Counter(placement.rank_of(stage, m) for m in range(microbatches))
        loads = [taken[rank] for rank in placement.holders(stage)]
        assert sum(loads) == microbatches
        if rows - held[stage] in (0, 1):
            assert max(loads) - min(loads) <= 1
        for row, rank in enumerate(placement.holders(stage)):
            # Whoever is there keeps what is his.
            own = [m for m, home in enumerate(homes) if home == row]
            assert all(placement.rank_of(stage, m) == rank for m in own)
            most = -(-rows * kept[order][stage] // held[stage]) + room * (len(set(held)) > 1)
            assert table.max_activations[rank] <= most


def test_more_room_lets_the_bubble_take_in_a_hole():
    """Of 240 ranks one is missing: the others have a share of 1/11 of its work, but lost 12 %."""
    size = {"ranks": 239, "stages": 20, "microbatches": 12 * 40}
    costs = Costs(forward=1, input_gradient=1, weight_gradient=1)
    whole = simulate(build("zb_h1", ranks=20, microbatches=40), costs).makespan
    tight, roomy = (
        simulate(build("rerouted", room=room, **size), costs).makespan / whole for room in (1, 8)
    )
    assert tight > 1.12 > 1.1 > roomy


def weighed(table, times):
    """Return costs of stages that are cut to keep all ranks equally busy."""
    copies = copies_in_rows(table.placement) or [1] * table.num_stages
    forward, inputs, weights = ([time * each for each in copies] for time in times)
    return Costs(forward=forward, input_gradient=inputs, weight_gradient=weights)


@pytest.mark.parametrize(
    ("ranks", "stages", "most"),
    [(3, 2, 1.05), (5, 2, 1.07), (5, 4, 1.09), (6, 4, 1.11), (7, 4, 1.13), (7, 3, 1.07)],
)
def test_holes_cost_no_more_than_a_pipeline_does(ranks, stages, most):
    """Against all work over all ranks; split backwards bring it nearer, as in whole pipelines."""
    microbatches = 8 * -(-ranks // stages)
    floor = 3 * microbatches
    size = {"ranks": ranks, "microbatches": microbatches, "stages": stages}
    took = {}
    for order in ORDERS:
        table = build("rerouted", order=order, **size)
        timeline = simulate(table, weighed(table, (1, 1, 1)))
        took[order] = timeline.makespan / floor
        assert sum(timeline.busy) == pytest.approx(floor * ranks)
    assert 1 < took["zb_h1"] <= most
    assert took["zb_h1"] < took["one_f_one_b"]
    whole = build("one_f_one_b", ranks=stages, microbatches=8)
    plain = simulate(whole, Costs(forward=1, backward=2)).makespan / 24
    assert took["one_f_one_b"] <= plain + 1e-9


@st.composite
def unequal(draw):
    """Draw copies of stages, micro-batches, and how slow each rank is."""
    copies = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    paces = draw(
        st.lists(
            st.sampled_from([1.0, 1.5, 2.0, 4.0, 40.0]),
            min_size=sum(copies),
            max_size=sum(copies),
        )
    )
    return copies, draw(st.integers(1, 9)), paces


@given(unequal(), st.sampled_from(ORDERS))
@settings(max_examples=60, deadline=None)
def test_ranks_of_unequal_paces_share_a_stage_as_well_as_can_be(size, order):
    """No deadlock, and no other shares would let the last rank of a stage end earlier."""
    copies, microbatches, paces = size
    table = build(
        "rerouted",
        ranks=len(paces),
        microbatches=microbatches,
        stages=len(copies),
        order=order,
        copies=copies,
        paces=paces,
    )
    check(lower(table))
    check(lower(forward_only(table)))
    placement = table.placement
    for stage, count in enumerate(copies):
        holders = placement.holders(stage)
        assert len(holders) == count
        taken = Counter(placement.rank_of(stage, m) for m in range(microbatches))
        slow = [paces[rank] for rank in holders]
        ends = max(taken[rank] * pace for rank, pace in zip(holders, slow, strict=True))
        shares = product(range(microbatches + 1), repeat=count)
        whole = (each for each in shares if sum(each) == microbatches)
        best = min(max(map(mul, each, slow)) for each in whole)
        assert ends == pytest.approx(best)


def test_a_slow_rank_holds_up_less_than_with_even_shares():
    """Of seven ranks for three stages one takes twice as long; the cut gives its stage less."""
    paces = [1.0, 1.0, 1.0, 1.0, 2.0, 1.0, 1.0]
    size = {"ranks": 7, "microbatches": 36, "stages": 3}
    took = {}
    for name, heeded in (("even", None), ("heeded", paces)):
        table = build("rerouted", paces=heeded, **size)
        work = [sum(1 / paces[rank] for rank in table.placement.holders(s)) for s in range(3)]
        costs = Costs(
            forward=work, input_gradient=work, weight_gradient=work, paces=dict(enumerate(paces))
        )
        took[name] = simulate(table, costs).makespan / (3 * 36)
    assert took["heeded"] < 1.1, "a tenth above all work over all that ranks can do"
    assert took["even"] > 1.3 * took["heeded"]


def test_without_a_hole_it_is_the_schedule_of_that_name():
    for order in ORDERS:
        table = build("rerouted", ranks=4, microbatches=8, order=order)
        named = build(order, ranks=4, microbatches=8)
        assert table.rows == named.rows and table.max_activations == named.max_activations
        two = build("rerouted", ranks=8, microbatches=16, stages=4, order=order)
        costs = Costs(forward=1, input_gradient=1, weight_gradient=1)
        assert simulate(two, costs).makespan == simulate(named, costs).makespan


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stages": 4}, "4 stages need at least 4 ranks, got 3"),
        ({"stages": 0}, "stages must be a whole number"),
        ({"stages": 2, "copies": [2, 2]}, "sum to 3 ranks"),
        ({"stages": 2, "copies": [3]}, "each of 2 stages"),
        ({"stages": 2, "copies": [3, 0]}, "copies must be a whole number"),
        ({"stages": 2, "room": 0}, "room must be a whole number"),
        ({"stages": 2, "paces": [1, 1]}, "each of 3 ranks, each above 0, got .1, 1."),
        ({"stages": 2, "paces": [1, 0, 1]}, "each of 3 ranks, each above 0"),
        ({"stages": 2, "order": "zb_v"}, "one of gpipe, one_f_one_b, zb_h1"),
    ],
)
def test_what_makes_no_rows_is_refused(options, words):
    with pytest.raises(ScheduleError, match=words):
        build("rerouted", ranks=3, microbatches=2, **options)


def test_the_number_of_stages_is_known_without_a_table():
    assert num_stages("rerouted", ranks=7, microbatches=2, stages=4) == 4
    assert num_stages("rerouted", ranks=7, microbatches=2) == 7
    rows = {"placement": "rerouted", "stages": 3}
    assert num_stages("auto", ranks=7, microbatches=2, **rows) == 3


def test_auto_beats_the_named_orders_of_the_same_rows():
    costs = Costs(forward=[2, 1], input_gradient=[2, 1.5], weight_gradient=[2, 0.5])
    rows = {"ranks": 3, "microbatches": 6, "stages": 2}
    found = simulate(build("auto", placement="rerouted", costs=costs, **rows), costs).makespan
    named = [simulate(build("rerouted", order=o, **rows), costs).makespan for o in ORDERS]
    assert found <= min(named)
    with pytest.raises(ScheduleError, match="need placement rerouted, got 'wave'"):
        build("auto", ranks=4, microbatches=2, placement="wave", stages=2)
