"""Layers that are pinned to stages: the best cut of those that hold them, or a clear refusal."""

from dataclasses import replace
from fractions import Fraction
from itertools import accumulate, combinations, pairwise

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from gpipe_hpc.device.device import planned_device
from gpipe_hpc.errors import PartitionError
from gpipe_hpc.models import LayerSpec, normalise_layers
from gpipe_hpc.planner import CountedCosts, Example, Partition, Request, choose_partition, lay_out
from gpipe_hpc.planner.cutting.minimax import minimax
from gpipe_hpc.planner.cutting.pins import (
    EndRanges,
    Pin,
    check_pinned,
    has_valid_cut,
    pins_text,
    read_pins,
)
from gpipe_hpc.planner.cutting.unequal_ranks import (
    StageConstraint,
    copies_for,
    cut_for_paces,
    cut_for_ranks,
    cut_with_constraint,
    paces_in_rows,
)
from gpipe_hpc.planner.fit import fit_stages
from gpipe_hpc.planner.forecast import peak_bytes_of_ranks
from gpipe_hpc.planner.memory.by_rank import excess_bytes
from tests.support import mean_square


def all_cuts(num_layers, stages):
    """Return every cut without an empty stage."""
    inner = combinations(range(1, num_layers), stages - 1)
    return [[b - a for a, b in pairwise((0, *ends, num_layers))] for ends in inner]


def keeps(pins, cut):
    ends = [0, *accumulate(cut)]
    return all(ends[s % len(cut)] <= i < ends[s % len(cut) + 1] for i, s in pins)


def stage_sums(costs, cut):
    ends = [0, *accumulate(cut)]
    return [sum(map(Fraction, costs[a:b])) for a, b in pairwise(ends)]


@st.composite
def problems(draw):
    """Draw costs, a number of stages, and pins that may or may not go together."""
    costs = draw(st.lists(st.sampled_from([0, 1, 2, 5, 0.1, 20.25]), min_size=1, max_size=8))
    stages = draw(st.integers(1, min(5, len(costs))))
    layers = draw(st.sets(st.integers(0, len(costs) - 1), max_size=3))
    pins = tuple(Pin(i, draw(st.integers(-stages, stages - 1))) for i in sorted(layers))
    return costs, stages, pins


@given(problems())
@settings(max_examples=300, deadline=None)
def test_the_intervals_are_those_of_all_cuts_that_hold_the_pins(problem):
    costs, stages, pins = problem
    held = [cut for cut in all_cuts(len(costs), stages) if keeps(pins, cut)]
    assert has_valid_cut(pins, len(costs), stages) == bool(held)
    if held:
        among = [*zip(*([0, *accumulate(cut)] for cut in held), strict=True)]
        low, high = EndRanges.where(pins, len(costs), stages)
        assert (list(low), list(high)) == ([*map(min, among)], [*map(max, among)])


@given(problems())
@settings(max_examples=300, deadline=None)
def test_the_cut_is_the_best_of_all_that_hold_the_pins(problem):
    costs, stages, pins = problem
    held = [cut for cut in all_cuts(len(costs), stages) if keeps(pins, cut)]
    if not held:
        with pytest.raises(PartitionError, match=r"pipeline\.pins: no cut into"):
            minimax(costs, stages, pins=pins)
        return

    def price(cut):
        sums = stage_sums(costs, cut)
        squares = sum(each * each for each in sums)
        ends = [*accumulate(cut)]
        return max(sums), squares, sum(n * n for n in cut), ends[-2::-1]

    assert minimax(costs, stages, pins=pins) == min(held, key=price)


@given(problems(), st.lists(st.sampled_from([1, 2, 0.5]), min_size=5, max_size=5), st.data())
@settings(max_examples=200, deadline=None)
def test_cuts_for_slow_ranks_holes_and_memory_are_the_best_that_hold_the_pins(problem, paces, data):
    costs, stages, pins = problem
    held = [cut for cut in all_cuts(len(costs), stages) if keeps(pins, cut)]
    assume(held)
    paces = paces[:stages]

    def took(cut):
        pairs = zip(stage_sums(costs, cut), paces, strict=True)
        return max(each * Fraction(pace) for each, pace in pairs)

    found = cut_for_paces(costs, paces, pins)
    assert found in held and took(found) == min(map(took, held))

    most = data.draw(st.lists(st.integers(1, 6), min_size=stages, max_size=stages))
    room = StageConstraint(lambda stage, start, end: end - start <= most[stage], lambda *_: True)
    fitting = [cut for cut in held if all(n <= m for n, m in zip(cut, most, strict=True))]
    roomy = cut_with_constraint(costs, paces, room, pins)
    assert (roomy is None) == (not fitting)
    if roomy is not None:
        assert roomy in fitting and took(roomy) == min(map(took, fitting))

    ranks = stages + data.draw(st.integers(0, 6))

    def busiest(cut):
        copies = copies_for(cut, costs, ranks)
        return max(a / number for a, number in zip(stage_sums(costs, cut), copies, strict=True))

    shared = cut_for_ranks(costs, stages, ranks, pins=pins)
    assert shared in held and busiest(shared) == min(map(busiest, held))

    slow = data.draw(st.lists(st.sampled_from([1, 2, 1.5]), min_size=ranks, max_size=ranks))

    def slowest(cut):
        copies = copies_for(cut, costs, ranks, slow)
        of_stages = zip(stage_sums(costs, cut), copies, paces_in_rows(copies, slow), strict=True)
        return max(float(amount) * pace / number for amount, number, pace in of_stages)

    uneven = cut_for_ranks(costs, stages, ranks, slow, pins)
    assert uneven in held and slowest(uneven) <= min(map(slowest, held)) * (1 + 1e-6)


LAYERS = [LayerSpec(nn.Embedding, 4, 8), *[LayerSpec(nn.Linear, 8, 8)] * 10, LayerSpec(nn.Tanh)]


def test_a_layer_is_named_by_its_index_or_by_a_name_of_its_own():
    given = {"Tanh": -1, "3": 1, "layers.2": 0, 0: 0, -2: 2}
    assert read_pins(given, LAYERS) == ((0, 0), (2, 0), (3, 1), (10, 2), (11, -1))
    assert read_pins(None, LAYERS) == read_pins({}, LAYERS) == ()
    text = "pinned (pipeline.pins): layers.0 Embedding on stage 0, layers.11 Tanh on stage 2"
    assert pins_text((Pin(0, 0), Pin(11, -1)), LAYERS, 3) == text


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({12: 0}, "expected a layer index from 0 to 11, got 12"),
        ({-13: 0}, "expected a layer index from 0 to 11, got -13"),
        ({"Linear": 0}, r"'Linear' is the name of 10 layers \(1 to 10\)"),
        ({"Head": -1}, r"no layer 'Head'; use an index .* or a unique name \(Embedding, Tanh\)"),
        ({True: 0}, "no layer True"),
        ({11: 0, "Tanh": 1}, r"layers\.11 is pinned twice"),
        ({0: "first"}, "expected an integer stage for layer 0.*got 'first'"),
        ({0: True}, "got True"),
        ([0, 1], r"expected a mapping from layers to stages, got \[0, 1\]"),
    ],
)
def test_what_names_no_layer_or_stage_is_refused(given, what):
    with pytest.raises(PartitionError, match=what):
        read_pins(given, LAYERS)


@pytest.mark.parametrize(
    ("pins", "what"),
    [
        ((Pin(3, 3),), r"layers\.3 is pinned to stage 3, but stages are 0 to 2"),
        ((Pin(3, -4),), "pinned to stage -4"),
        ((Pin(0, 1),), r"puts layers\.0 on stage 0 and layers\.0 on stage 1"),
        ((Pin(11, 1),), r"layers\.11 on stage 1 and layers\.11 on stage 2"),
        ((Pin(3, 1), Pin(5, 0)), r"layers\.3 on stage 1 and layers\.5 on stage 0"),
        ((Pin(3, 0), Pin(4, 2)), r"layers\.3 on stage 0 and layers\.4 on stage 2"),
    ],
)
def test_pins_that_no_cut_holds_are_named(pins, what):
    with pytest.raises(PartitionError, match=what):
        EndRanges.where(pins, 12, 3)


def test_a_cut_by_hand_has_to_hold_them():
    check_pinned((Pin(4, 1), Pin(11, -1)), [4, 4, 4])
    for pins in ((Pin(3, 1),), (Pin(4, 3),)):
        with pytest.raises(
            PartitionError, match=r"pipeline.partition=\[4, 4, 4\] puts it on another"
        ):
            check_pinned(pins, [4, 4, 4])


def counted():
    layers = [layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.Tanh())]
    batch, targets = (torch.empty(16, 32, device="meta") for _ in range(2))
    example = Example(batch, targets, mean_square, 0, planned_device("cpu"))
    return CountedCosts(normalise_layers(layers), example)


GAUGE = counted()
ASKED = Request(stages=3, microbatches=6, partition="time", schedule="one_f_one_b")


@pytest.mark.parametrize("partition", ["time", "uniform", "parameters", [9, 2, 1]])
@pytest.mark.parametrize(
    ("schedule", "options", "num_stages"),
    [("one_f_one_b", {}, 3), ("interleaved", {"stages_per_rank": 2}, 6), ("auto", {}, 3)],
)
def test_every_way_to_cut_holds_them(partition, schedule, options, num_stages):
    if isinstance(partition, list):
        partition = partition if num_stages == 3 else [1, 7, 1, 1, 1, 1]
    options = {**options, "trials": 0} if schedule == "auto" else options
    asked = replace(
        ASKED,
        partition=partition,
        schedule=schedule,
        schedule_options=options,
        pins={8: 0 if num_stages == 3 else 2, -1: -1, 7: 0 if num_stages == 3 else 1},
    )
    cut = lay_out(asked, GAUGE).partition
    assert len(cut.counts) == num_stages and keeps(cut.pins, cut.counts) and len(cut.pins) == 3
    again = replace(asked, partition=Partition.stored(cut._asdict()))
    assert lay_out(again, GAUGE).partition == cut
    moved = replace(again, pins={0: 0, 3: 1})
    if not isinstance(partition, list):
        assert keeps(((0, 0), (3, 1)), lay_out(moved, GAUGE).partition.counts)


def test_a_kept_cut_of_the_best_placement_holds_pins_that_are_new():
    best = replace(
        ASKED, schedule="auto", schedule_options={"placement": "best", "trials": 0}, stages=2
    )
    kept = lay_out(best, GAUGE).partition
    pinned = lay_out(replace(best, partition=kept, pins={2: 1}), GAUGE)
    assert keeps(((2, 1),), pinned.partition.counts)
    unpinned = lay_out(replace(best, partition=kept, pins={10: 0}), GAUGE)
    assert "cannot hold" not in pinned.searched
    assert keeps(((10, 0),), unpinned.partition.counts)
    assert "its stages cannot satisfy pipeline.pins" in unpinned.searched
    with pytest.raises(PartitionError, match="pins"):  # it was an AssertionError
        lay_out(replace(best, partition=kept, pins={2: 9}), GAUGE)


def test_a_cut_that_leaves_for_memory_holds_them():
    def held(layout):
        states = ASKED.kept_states
        return peak_bytes_of_ranks(GAUGE.count, layout.partition.counts, layout.schedule, states)

    plain = held(lay_out(ASKED, GAUGE))
    limits = [round(0.8 * plain[0]), *(4 * each for each in plain[1:])]
    small = lay_out(replace(ASKED, memory_bytes=limits), GAUGE)
    assert excess_bytes(held(small), limits) == 0 and small.partition.counts[0] < 4
    pins = {sum(small.partition.counts[:2]): 1}
    pinned = lay_out(replace(ASKED, memory_bytes=limits, pins=pins), GAUGE)
    assert excess_bytes(held(pinned), limits) == 0 and keeps(pins.items(), pinned.partition.counts)


def test_stages_that_cannot_hold_them_are_not_chosen():
    found = fit_stages(replace(ASKED, stages="fit", pins={4: 1, 5: 2}), 4, GAUGE)
    assert found.stages in (3, 4) and found.text.endswith("; 1, 2 cannot satisfy pipeline.pins")


def test_pins_are_refused_before_layers_are_measured():
    cost_model = CountedCosts(LAYERS, None)  # cannot be asked for times
    with pytest.raises(PartitionError, match=r"pipeline\.pins: no cut into 3 stages puts"):
        choose_partition("time", 3, cost_model, pins=(Pin(0, 1),))
