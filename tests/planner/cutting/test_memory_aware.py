"""A cut that gives each rank no more than it may fill, where the fastest one does not."""

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gpipe_hpc.device.device import planned_device
from gpipe_hpc.errors import PartitionError
from gpipe_hpc.models import LayerSpec, normalise_layers
from gpipe_hpc.planner import CountedCosts, Example, Request, lay_out
from gpipe_hpc.planner.budget.fitting import choose_recompute
from gpipe_hpc.planner.cutting.memory_aware import fitting_cut
from gpipe_hpc.planner.cutting.partition import Partition
from gpipe_hpc.planner.cutting.unequal_ranks import StageConstraint, cut_with_constraint
from gpipe_hpc.planner.forecast import lasting_bytes, peak_bytes_of_ranks, rank_states
from gpipe_hpc.planner.layout import cut
from gpipe_hpc.planner.memory.by_rank import excess_bytes
from gpipe_hpc.planner.ordering import table_of
from gpipe_hpc.planner.stages import count_span, count_stages
from gpipe_hpc.planner.tables import with_recompute_and_offload
from gpipe_hpc.schedule.table.placements import looped
from tests.support import mean_square

# All alike, so that what moves, moves for want of memory.
LAYERS = [layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.Tanh())]
ASKED = Request(stages=3, microbatches=6, partition="time", schedule="one_f_one_b")


def counted(layers=LAYERS, width=32):
    batch, targets = (torch.empty(16, each, device="meta") for each in (width, 32))
    example = Example(batch, targets, mean_square, 0, planned_device("cpu"))
    return CountedCosts(normalise_layers(layers), example)


GAUGE = counted()


def held(layout, request):
    return peak_bytes_of_ranks(
        GAUGE.count,
        layout.partition.counts,
        layout.schedule,
        request.kept_states,
        layout.recomputed,
    )


def slowest(costs, counts):
    ends = [0]
    for count in counts:
        ends.append(ends[-1] + count)
    return max(sum(costs[a:b]) for a, b in pairwise(ends))


@given(
    st.lists(st.sampled_from([1, 2, 5]), min_size=4, max_size=9),
    st.lists(st.integers(1, 6), min_size=2, max_size=4),
    st.lists(st.sampled_from([1, 2, 0.5]), min_size=4, max_size=4),
)
@settings(max_examples=80, deadline=None)
def test_no_cut_that_fits_is_faster(costs, most, paces):
    """Against all cuts; a stage fits here with at most so many layers."""
    stages = len(most)
    paces = paces[:stages]
    cuts = [
        [b - a for a, b in pairwise((0, *ends, len(costs)))]
        for ends in combinations(range(1, len(costs)), stages - 1)
    ]
    fitting = [cut for cut in cuts if all(n <= limit for n, limit in zip(cut, most, strict=True))]
    if not cuts:
        return

    def took(cut):
        ends = [sum(cut[:k]) for k in range(stages + 1)]
        pairs = zip(pairwise(ends), paces, strict=True)
        return max(sum(costs[a:b]) * pace for (a, b), pace in pairs)

    fits = StageConstraint(lambda stage, start, end: end - start <= most[stage], lambda *_: True)
    found = cut_with_constraint(costs, paces, fits)
    assert (found is None) == (not fitting)
    if found is not None:
        assert found in fitting and took(found) == min(map(took, fitting))


def test_a_span_is_counted_as_the_stage_that_it_would_be():
    for counts in ([4, 5, 3], [1, 10, 1], [12]):
        starts = [sum(counts[:k]) for k in range(len(counts))]
        whole = count_stages(GAUGE.count, counts)
        place = looped(len(counts), 1, 2)
        for rank, (start, count, stage) in enumerate(zip(starts, counts, whole, strict=True)):
            span = count_span(GAUGE.count, start, start + count)
            assert span == stage
            states = rank_states(GAUGE.count, whole, place, rank, 2).lasting_bytes
            assert lasting_bytes(GAUGE.count, span.layers, 2) == states


@pytest.mark.parametrize(
    ("recompute", "small"), [("never", 0), ("always", 2), ("except_last", 0), ("budget", 2)]
)
@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b", "zb_h1", "auto"])
def test_layers_move_from_a_rank_that_lacks_memory(schedule, recompute, small):
    """The cut was by time alone: `plan` said NO, and a budget that nothing fits."""
    options = {"trials": 0} if schedule == "auto" else {}
    asked = replace(ASKED, schedule=schedule, recompute=recompute, schedule_options=options)
    thrifty = asked
    if schedule == "auto":
        thrifty = replace(thrifty, schedule="one_f_one_b", schedule_options={})
    if recompute == "budget":
        thrifty = replace(thrifty, recompute="always")
    even = lay_out(thrifty, GAUGE)
    limits = [4 * each for each in held(even, asked)]
    limits[small] = round(0.8 * limits[small] / 4)
    within = replace(asked, memory_bytes=limits)
    found = lay_out(within, GAUGE)
    assert excess_bytes(held(found, within), limits) == 0
    if schedule != "auto":  # which may find an order that keeps less
        assert found.partition.counts[small] < even.partition.counts[small]
    times = even.partition.costs
    other = slowest(times, found.partition.counts)
    assert other <= 1.5 * slowest(times, even.partition.counts)
    # What was found is asked for again, as by a resumed run.
    again = lay_out(replace(within, partition=found.partition), GAUGE)
    assert again.partition.counts == found.partition.counts


def test_a_cut_that_fits_stays_and_where_none_fits_the_fastest_does():
    even = lay_out(ASKED, GAUGE)
    ample = replace(ASKED, memory_bytes=[max(held(even, ASKED))] * 3)
    assert lay_out(ample, GAUGE).partition == even.partition
    hopeless = replace(ASKED, memory_bytes=[1000, 1e9, 1e9])
    assert lay_out(hopeless, GAUGE).partition == even.partition
    with pytest.raises(PartitionError, match="nothing fits"):
        lay_out(replace(hopeless, recompute="budget"), GAUGE)


def test_a_cut_by_hand_stays_and_layers_that_cannot_be_counted_are_cut_by_time():
    by_hand = replace(ASKED, partition=[2, 8, 2], memory_bytes=[1e9, 1000, 1e9])
    assert lay_out(by_hand, GAUGE).partition.counts == (2, 8, 2)
    blind = CountedCosts(GAUGE.layers, None)
    uniform = replace(ASKED, partition="uniform", memory_bytes=1000)
    assert lay_out(uniform, blind).partition.counts == (4, 4, 4)


class Wider(nn.Module):
    """Make rows many times as wide."""

    def __init__(self, times):
        super().__init__()
        self.times = times

    def forward(self, x):
        return x.repeat(1, self.times)


class Narrower(nn.Module):
    """Make them narrow again; keeps nothing."""

    def __init__(self, times):
        super().__init__()
        self.times = times

    def forward(self, x):
        return x.view(len(x), self.times, -1).sum(1)


class Stash(nn.Module):
    """Leave something wide for a later layer."""

    def __init__(self, times):
        super().__init__()
        self.times = times

    def forward(self, x):
        return x, x.repeat(1, self.times)


class Pop(nn.Module):
    """Add what was left."""

    def __init__(self, times):
        super().__init__()
        self.times = times

    def forward(self, x, left):
        return x + left.view(len(x), self.times, -1).sum(1)


def cuts_of(num_layers, stages):
    return [
        tuple(b - a for a, b in pairwise((0, *ends, num_layers)))
        for ends in combinations(range(1, num_layers), stages - 1)
    ]


def needs(asked, counts, cost_model):
    """Return what ranks hold with a cut and, of a budget, whether some recomputation fits."""
    table = table_of(asked)
    if asked.recompute != "budget":
        whole = with_recompute_and_offload(table, asked.recompute, offload=False)
        return peak_bytes_of_ranks(cost_model.count, counts, whole, asked.kept_states)
    try:
        choose_recompute(cost_model.count, counts, table, asked.memory_bytes, asked.kept_states)
    except PartitionError:
        return [float("inf")] * len(counts)
    return [0] * len(counts)


def fastest_that_fits(asked, cost_model):
    """Return how long the slowest stage of the best of all cuts takes; None: none fits."""
    costs = [each.forward + each.backward for each in cost_model.times]
    fitting = [
        slowest(costs, counts)
        for counts in cuts_of(len(costs), asked.stages)
        if excess_bytes(needs(asked, counts, cost_model), asked.memory_bytes) == 0
    ]
    return min(fitting, default=None)


def assert_best_of_all_cuts(layers, asked, cost_model=None):
    cost_model = cost_model or counted(layers)
    found = fitting_cut(asked, cut(asked, cost_model), table_of(asked), cost_model)
    best = fastest_that_fits(asked, cost_model)
    assert (found is None) == (best is None)
    if found is not None:
        costs = [each.forward + each.backward for each in cost_model.times]
        assert excess_bytes(needs(asked, found.counts, cost_model), asked.memory_bytes) == 0
        assert slowest(costs, found.counts) == best


def test_a_stage_that_ends_behind_a_wide_output_may_fit_if_it_ends_later():
    """No cut was found: the search for an end stopped at the first that did not fit."""
    narrow = [nn.Linear(32, 32) for _ in range(3)]
    layers = [nn.Linear(32, 32), Wider(200), Narrower(200), *narrow]
    asked = Request(stages=2, microbatches=4, recompute="never", partition="time")
    cost_model = counted(layers)
    limit = max(needs(asked, (4, 2), cost_model))
    assert max(needs(asked, (2, 4), cost_model)) > limit
    asked = replace(asked, memory_bytes=[limit] * 2)
    found = fitting_cut(
        asked, Partition((2, 4), gauge_costs(cost_model), "FLOPs"), table_of(asked), cost_model
    )
    assert found is not None and found.counts in ((3, 3), (4, 2))
    assert_best_of_all_cuts(layers, asked)


def gauge_costs(cost_model):
    return tuple(each.forward + each.backward for each in cost_model.times)


def test_a_budget_need_not_recompute_a_layer_that_drops_a_wide_input():
    """No cut was found: each rank was taken to recompute all, and so to keep that input."""
    layers = [Narrower(100), *(nn.Linear(32, 32) for _ in range(4))]
    asked = Request(stages=2, microbatches=4, recompute="budget", partition=[2, 3])
    cost_model = counted(layers, width=3200)
    always, never = (
        peak_bytes_of_ranks(
            cost_model.count,
            (2, 3),
            with_recompute_and_offload(table_of(asked), each, offload=False),
            asked.kept_states,
        )
        for each in ("except_last", "never")
    )
    assert never[0] < always[0]
    asked = replace(asked, partition="time")
    for limit in (never[0], (never[0] + always[0]) // 2, always[0], always[0] * 2):
        assert_best_of_all_cuts(layers, replace(asked, memory_bytes=[limit, always[1]]), cost_model)


@st.composite
def models(draw):
    """Draw layers of unequal widths, one pair of them tied, one skip over others."""
    layers = []
    for _ in range(draw(st.integers(3, 5))):
        kind = draw(st.sampled_from(["linear", "wide", "tanh", "broad"]))
        times = draw(st.sampled_from([3, 20]))
        if kind == "linear":
            layers.append([LayerSpec(nn.Linear, 32, 32)])
        elif kind == "wide":
            layers.append([LayerSpec(Wider, times), LayerSpec(Narrower, times)])
        elif kind == "tanh":
            layers.append([LayerSpec(nn.Tanh)])
        else:
            layers.append([LayerSpec(nn.Linear, 32, 96), LayerSpec(nn.Linear, 96, 32)])
    if draw(st.booleans()):
        tied = [LayerSpec(nn.Linear, 32, 32).tied({"weight": "shared"}) for _ in range(2)]
        layers = [tied[:1], *layers, tied[1:]]
    flat = [layer for block in layers for layer in block]
    if draw(st.booleans()):
        times = draw(st.sampled_from([1, 30]))
        first = draw(st.sampled_from([0, len(layers[0])]))
        flat.insert(first, LayerSpec(Stash, times).stashing("left"))
        flat.append(LayerSpec(Pop, times).popping("left"))
    return flat


@given(
    models(),
    st.integers(2, 3),
    st.sampled_from(["never", "always", "except_last", "budget"]),
    st.sampled_from(["gpipe", "one_f_one_b"]),
    st.lists(st.floats(0.4, 1.3), min_size=3, max_size=3),
    st.randoms(use_true_random=False),
)
@settings(max_examples=40, deadline=None)
def test_of_all_cuts_that_fit_one_of_the_fastest_is_found(
    layers, stages, recompute, schedule, factors, random
):
    """Unequal widths, ties and skips, against what each cut holds."""
    asked = Request(
        stages=stages, microbatches=3, recompute=recompute, schedule=schedule, partition="time"
    )
    cost_model = counted(layers)
    plain = replace(asked, recompute="except_last" if recompute == "budget" else recompute)
    some = random.choice(cuts_of(len(layers), stages))
    pairs = zip(needs(plain, some, cost_model), factors, strict=False)
    limits = [max(1, round(factor * nbytes)) for nbytes, factor in pairs]
    assert_best_of_all_cuts(layers, replace(asked, memory_bytes=limits), cost_model)
