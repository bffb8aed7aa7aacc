"""Ranks of unequal speed: the cut gives slow ones fewer layers, and forecasts know of them."""

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate, combinations, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gpipe_hpc import Pipeline, run_on_threads
from gpipe_hpc.device.device import planned_device
from gpipe_hpc.errors import ConfigError
from gpipe_hpc.models import normalise_layers
from gpipe_hpc.planner import (
    CountedCosts,
    Example,
    Partition,
    Request,
    cut,
    fit_stages,
    lay_out,
    ordering,
)
from gpipe_hpc.planner.advice import KnownCosts, advise, layer_times
from gpipe_hpc.planner.costs.cost_models import LayerTimes
from gpipe_hpc.planner.cutting.unequal_ranks import cut_for_paces
from gpipe_hpc.planner.report.alternatives import forecast_of
from gpipe_hpc.schedule import Costs, simulate
from tests.support import mean_square


class Given:
    """Twelve layers that take a second each way."""

    measure = "time"
    layers = normalise_layers([nn.Identity() for _ in range(12)])
    times = (LayerTimes.alike(1.0, 2.0, 1.0, 1.0),) * 12
    count = None


def slowest(counts, costs, paces):
    ends = [0, *accumulate(counts)]
    pairs = zip(pairwise(ends), paces, strict=True)
    return max(sum(map(Fraction, costs[a:b])) * Fraction(pace) for (a, b), pace in pairs)


@given(
    st.lists(st.sampled_from([0, 1, 2, 5, 0.5, 0.1]), min_size=4, max_size=8),
    st.lists(st.sampled_from([1, 1.5, 0.3, 4]), min_size=1, max_size=4),
)
@settings(max_examples=100, deadline=None)
def test_no_cut_lets_the_slowest_stage_be_faster(costs, paces):
    found = cut_for_paces(costs, paces)
    assert sum(found) == len(costs) and min(found) > 0
    best = min(
        slowest([b - a for a, b in pairwise((0, *ends, len(costs)))], costs, paces)
        for ends in combinations(range(1, len(costs)), len(paces) - 1)
    )
    assert slowest(found, costs, paces) == best


ASKED = Request(stages=3, microbatches=6, partition="time", schedule="one_f_one_b")


def test_a_slow_rank_gets_fewer_layers_and_the_step_is_as_fast_as_can_be():
    even = cut(ASKED, Given())
    slow = replace(ASKED, paces=[1, 2, 1])
    uneven = cut(slow, Given())
    assert even.counts == (4, 4, 4) and uneven.counts == (5, 2, 5)
    costs = uneven.stage_costs()
    table = lay_out(slow, Given()).schedule
    took = [simulate(table, replace(costs, **parts)).makespan for parts in ({}, _costs_of(even))]
    assert took[0] < took[1]


def _costs_of(partition):
    found = vars(partition.stage_costs())
    return {name: found[name] for name in ("forward", "backward", "recompute")}


def test_auto_searches_for_ranks_as_they_are():
    asked = replace(ASKED, schedule="auto", paces=[1, 3, 1], schedule_options={"trials": 5})
    layout = lay_out(asked, Given())
    assert layout.partition.stage_costs().paces == {0: 1, 1: 3, 2: 1}
    assert layout.partition.counts[1] < 3


def test_stages_of_one_rank_share_its_pace():
    asked = replace(ASKED, schedule="interleaved", stages=2, paces=[1, 2])
    assert cut(asked, Given()).counts == (4, 2, 4, 2)


def test_a_stored_cut_is_made_anew_for_other_paces():
    stored = Partition.stored(cut(ASKED, Given())._asdict())
    again = replace(ASKED, partition=stored)
    assert cut(again, Given()).counts == (4, 4, 4)
    slow = cut(replace(again, paces=[1, 2, 1]), Given())
    assert slow.counts == (5, 2, 5)
    kept = replace(ASKED, partition=Partition.stored(slow._asdict()), paces=[1, 2, 1])
    assert cut(kept, Given()).counts == (5, 2, 5)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"paces": ()}, "a number above 0 for each of the 3 ranks"),
        ({"paces": [1, 2]}, "a number above 0 for each of the 3 ranks"),
        ({"paces": [1, 2, 0]}, "a number above 0 for each of the 3 ranks"),
        ({"paces": [1, 2], "stages": 2}, "a number above 0 for each of the 3 ranks"),
    ],
)
def test_paces_that_say_nothing_of_the_ranks_are_refused(settings, words):
    asked = replace(ASKED, **settings).on(3)
    with pytest.raises(ConfigError, match=words):
        lay_out(asked, Given())


def test_a_pipeline_trains_the_same_with_slow_ranks():
    inputs, targets = torch.randn(8, 3), torch.randn(8, 3)

    def body(world, **settings):
        layers = [nn.Linear(3, 3) for _ in range(6)]
        for number, layer in enumerate(layers):
            nn.init.constant_(layer.weight, 0.1 * (number + 1))
            nn.init.zeros_(layer.bias)
        pipe = Pipeline(layers, mean_square, microbatches=4, world=world, **settings)
        return pipe.partition.counts, pipe.step(inputs, targets).loss

    ((_, alone),) = run_on_threads(1, body)
    for counts, loss in run_on_threads(2, lambda world: body(world, paces=[1, 2])):
        assert counts == (4, 2) and loss == pytest.approx(alone, rel=1e-6)


def test_paces_are_those_of_the_slowest_replica_and_told_relative_to_rank_0():
    """Rank 0 measures the layers: where it is slow the others take less than what it measured."""
    asked = replace(ASKED, replicas=2, paces=[2, 1, 1, 1, 4, 1])
    found = cut(asked, Given())
    assert found.rank_paces == (1.0, 2.0, 0.5)
    assert found.counts[2] > found.counts[0] > found.counts[1]
    with pytest.raises(
        ConfigError, match="each of the 3 ranks of a pipeline, or for each of all 6"
    ):
        cut(replace(asked, paces=[1, 2]), Given())


def test_equal_paces_are_nothing_to_refuse_in_pipelines_with_holes():
    asked = replace(ASKED, stages=2, paces=[2, 2, 2]).on(3)
    assert cut(asked, Given()).rank_paces == ()


@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b", "zb_h1", "auto"])
def test_pipelines_with_holes_heed_paces(schedule):
    """Rank 4 of seven takes three times as long: it, and its stage, get less to do."""
    paces = [1, 1, 1, 1, 3, 1, 1]
    options = {"trials": 2} if schedule == "auto" else {}
    asked = replace(ASKED, schedule=schedule, schedule_options=options, microbatches=8, stages=3)
    even, heeded = (lay_out(replace(asked, paces=given).on(7), Given()) for given in (None, paces))
    took = simulated(heeded, paces)
    assert took < 0.8 * simulated(even, paces)
    cut_of = heeded.partition
    assert cut_of.rank_paces == tuple(map(float, paces)) and cut_of.num_ranks == 7
    placement = heeded.schedule.placement
    assert cut_of.copies == [len(placement.holders(stage)) for stage in range(3)]
    (stage,) = placement.stages_of(4)
    taken = Counter(placement.rank_of(stage, m) for m in range(placement.num_microbatches))
    others = [taken[rank] for rank in placement.holders(stage) if rank != 4]
    assert 2 * taken[4] < min(others)
    means = [sum(paces[placement.rank_of(own, m)] for m in range(24)) / 24 for own in range(3)]
    assert cut_of.stage_paces == pytest.approx(means, rel=0.1)
    # What a checkpoint keeps is taken as it is by those ranks, and cut anew for others.
    again = replace(asked, paces=paces, partition=Partition.stored(cut_of._asdict()))
    assert cut(again.on(7), Given()) == cut_of
    assert cut(replace(again, paces=None).on(7), Given()) == even.partition


def known():
    """Return a gauge with the times of `Given`, and counts."""
    layers = normalise_layers([nn.Linear(8, 8) for _ in range(12)])
    batch = torch.empty(2, 8, device="meta")
    example = Example(batch, batch, mean_square, 0, planned_device("cpu"))
    return KnownCosts(layers, Given.times, CountedCosts(layers, example).count)


def simulated(layout, paces):
    costs = replace(layout.partition.likely_costs(), paces=dict(enumerate(paces)))
    return simulate(layout.schedule, costs).makespan


def test_auto_heeds_paces_also_where_no_layer_was_measured():
    """With partition=parameters, or a cut by hand, the search was one for equally fast ranks."""
    layers = normalise_layers([nn.Linear(4, 4) for _ in range(6)])
    cost_model = type("Parameters", (Given,), {"layers": layers})()
    asked = replace(
        ASKED,
        schedule="auto",
        partition=[2, 2, 2],
        schedule_options={"trials": 30},
        paces=[1, 3, 1],
    )
    heeding = simulated(lay_out(asked, cost_model), [1, 3, 1])
    blind = simulated(lay_out(replace(asked, paces=None), cost_model), [1, 3, 1])
    assert heeding <= blind
    options = ordering._with_costs(asked, cut(asked, cost_model)).options["costs"]
    assert options.paces == {0: 1, 1: 3, 2: 1}


@pytest.mark.parametrize(
    ("given", "paces"),
    [
        ({"forward": 1, "backward": 2}, {0: 1, 1: 3, 2: 1}),
        (Costs(forward=1, backward=2), {0: 1, 1: 3, 2: 1}),
        ({"forward": 1, "backward": 2, "paces": {0: 2}}, {0: 2}),
        (Costs(forward=1, backward=2, paces={0: 2}), {0: 2}),
    ],
)
def test_costs_of_the_users_own_get_the_paces_unless_they_have_some(given, paces):
    asked = replace(ASKED, schedule="auto", schedule_options={"costs": given}, paces=[1, 3, 1])
    found = ordering._with_costs(asked, cut(asked, Given())).options["costs"]
    assert (found["paces"] if isinstance(found, dict) else found.paces) == paces


def test_the_best_placement_is_chosen_for_ranks_as_they_are():
    """Placements were compared for equally fast ranks, and paces refused."""
    options = {"placement": "best", "trials": 0}
    asked = replace(ASKED, stages=2, schedule="auto", schedule_options=options, paces=[1, 2])
    found = lay_out(asked, known())
    assert found.partition.rank_paces == (1, 2)
    placement = found.schedule.placement
    layers = [0, 0]
    for stage, count in enumerate(found.partition.counts):
        layers[placement.holders(stage)[0]] += count
    assert layers == [8, 4]
    even = lay_out(replace(asked, paces=None), known())
    assert simulated(found, [1, 2]) < simulated(even, [1, 2])


def test_stages_are_chosen_for_ranks_as_slow_as_they_are():
    """Replicas wait for the slowest: with one slow rank of two, a pipeline is the faster."""
    asked = replace(ASKED, stages="fit", microbatches=12, schedule="zb_h1")
    even, uneven = (fit_stages(replace(asked, paces=p), 2, Given()).stages for p in (None, [1, 3]))
    assert (even, uneven) == (1, 2)
    with pytest.raises(ConfigError, match=r"paces: .*stages=fit.* each of the 2 ranks"):
        fit_stages(replace(asked, paces=[1, 2, 3]), 2, Given())


def test_what_is_foreseen_of_a_step_knows_slow_ranks():
    """`plan` told the time of a step on equally fast ranks."""
    layers = normalise_layers([nn.Linear(8, 8) for _ in range(6)])
    batch = torch.empty(2, 8, device="meta")
    cost_model = CountedCosts(layers, Example(batch, batch, mean_square, 0, planned_device("cpu")))
    asked = replace(ASKED, stages=2, partition=[3, 3])
    even, slow = (
        forecast_of(lay_out(each, cost_model), each, cost_model, 12)
        for each in (asked, replace(asked, paces=[1, 2]))
    )
    assert slow.timeline.makespan > 1.5 * even.timeline.makespan
    assert slow.step_flops == even.step_flops


def test_advice_leaves_layers_where_they_are_for_slow_ranks():
    """A slow rank's layers looked dear, so the advice was to give it still fewer."""
    slow = replace(ASKED, stages=2, paces=[1, 2])
    layout = lay_out(slow, Given())
    timeline = simulate(layout.schedule, layout.partition.stage_costs())
    took = layer_times(timeline, layout.partition.counts, Given.times, layout.partition.paces)
    assert [each.backward for each in took] == pytest.approx([2.0] * 12)
    found = [each.settings for each in advise(slow, layout, known())]
    assert not any("pipeline.partition" in settings for settings in found)


def test_a_stored_cut_is_made_anew_where_other_stages_are_on_the_slow_rank():
    """Two stages a rank, looped or in a V: as many stages, but not the same ones are slow."""
    asked = replace(ASKED, schedule="interleaved", stages=2, paces=[1, 2])
    stored = Partition.stored(cut(asked, Given())._asdict())
    folded = cut(replace(asked, schedule="zb_v", partition=stored), Given())
    assert folded.counts == (4, 2, 2, 4)
