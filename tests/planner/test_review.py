"""The cut looked at again for what layers took: a slow layer is named with the right cut."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from gpipe_hpc.models import LayerSpec
from gpipe_hpc.planner import LayerTimes, Request, lay_out
from gpipe_hpc.planner.advice import KnownCosts, advise, layer_times
from gpipe_hpc.planner.costs.counted import count_model
from gpipe_hpc.planner.forecast import peak_bytes_of_ranks
from gpipe_hpc.planner.review import by_forwards, review, slow_stages_text
from gpipe_hpc.schedule import Costs, simulate

LAYERS = [LayerSpec(nn.Linear, 16, 16) for _ in range(8)]
COUNT = count_model(LAYERS, torch.empty(4, 16, device="meta"))
EVEN = (LayerTimes.alike(1.0, 2.0, 1.0, 1.0),) * 8
SLOW = LayerTimes.alike(4.0, 8.0, 4.0, 4.0)


def asked(**wishes):
    request = Request(stages=4, microbatches=8, partition="uniform", recompute="never")
    return replace(request, **wishes)


def reviewed(times, **wishes):
    cost_model, request = KnownCosts(LAYERS, tuple(times), COUNT), asked(**wishes)
    return review(request, lay_out(request, cost_model), cost_model, EVEN)


def with_slow(layer):
    return (*EVEN[:layer], SLOW, *EVEN[layer + 1 :])


@pytest.mark.parametrize(("layer", "cut"), [(0, (1, 3, 2, 2)), (7, (2, 2, 3, 1))])
def test_a_slow_layer_is_named_with_the_cut_that_stands_it_alone(layer, cut):
    found = reviewed(with_slow(layer))
    assert found is not None
    assert (found.layer, max(found.counts)) == (layer, max(cut))
    assert found.counts[0 if layer == 0 else -1] == 1
    # Of 8 micro-batches: 11 x 15 with 5 layers' worth on the fullest stage.
    assert 0.1 < found.gain < 1 - 4 / 5
    assert found.counted_gain == pytest.approx(0.0)
    assert found.times_counted == pytest.approx((4 / 11) / (1 / 8))
    text = found.text()
    assert f"layers.{layer} takes 2.9 times" in text
    assert f"pipeline.partition=[{','.join(map(str, found.counts))}]" in text


def test_the_gain_is_that_of_the_simulated_step():
    """Not that of the fullest stage, which a pipeline only comes near."""
    times = with_slow(0)
    found = reviewed(times)

    def makespan(counts):
        stages, at = [], 0
        for count in counts:
            stages.append(sum(each.forward for each in times[at : at + count]))
            at += count
        costs = Costs(forward=stages, backward=[2 * each for each in stages])
        cost_model = KnownCosts(LAYERS, times, COUNT)
        return simulate(lay_out(asked(), cost_model).schedule, costs).makespan

    assert found.gain == pytest.approx(1 - makespan(found.counts) / makespan((2,) * 4))


def test_a_balanced_run_is_silent():
    assert reviewed(EVEN) is None
    nearly = (*EVEN[:3], LayerTimes.alike(1.1, 2.2, 1.1, 1.1), *EVEN[4:])
    assert reviewed(nearly) is None


def test_pipelines_with_holes_are_looked_at_too():
    """A soak found it: which stages more ranks hold was asked of a cut that knew no weights."""
    holes = {"stages": 5, "schedule": "rerouted", "microbatches": 12}
    holes["schedule_options"] = {"stages": 3, "order": "zb_h1"}
    assert reviewed(EVEN, **holes) is None
    found = reviewed(with_slow(0), **holes)
    assert found is not None and found.layer == 0 and len(found.counts) == 3


def test_one_rank_alone_and_huge_tables_are_not_looked_at(monkeypatch):
    assert reviewed(with_slow(0), stages=1) is None
    monkeypatch.setattr("gpipe_hpc.planner.review.MOST_ACTIONS", 10)
    assert reviewed(with_slow(0)) is None


def test_the_seen_forwards_say_which_layer_of_a_stage_is_slow():
    """A stage's time alone does not tell: by FLOPs its two layers would share it."""
    request = asked()
    times = with_slow(5)
    cost_model = KnownCosts(LAYERS, times, COUNT)
    stages = [sum(each.forward for each in times[at : at + 2]) for at in range(0, 8, 2)]
    costs = Costs(forward=stages, backward=[2 * each for each in stages])
    measured = simulate(lay_out(request, cost_model).schedule, costs)
    forwards = {index: each.forward for index, each in enumerate(times)}
    basis = by_forwards(EVEN, forwards, (2,) * 4)
    found = layer_times(measured, (2,) * 4, basis)
    assert [each.forward for each in found] == pytest.approx([each.forward for each in times])
    blind = layer_times(measured, (2,) * 4, by_forwards(EVEN, {0: 1.0}, (2,) * 4))
    assert blind[4].forward == pytest.approx(blind[5].forward)


def test_a_layer_without_flops_takes_what_was_seen():
    none = (LayerTimes.alike(0.0, 0.0, 0.0, 0.0), *EVEN[1:2])
    assert by_forwards(none, {0: 3.0, 1: 1.0}, (2,))[0] == LayerTimes.alike(3.0, 6.0, 3.0, 3.0)


def held(layout):
    return peak_bytes_of_ranks(COUNT, layout.partition.counts, layout.schedule, 2)


def test_a_cut_that_does_not_fit_is_not_named():
    """The rank that was to get three layers had memory for two."""
    times, cost_model = with_slow(0), KnownCosts(LAYERS, with_slow(0), COUNT)
    better = reviewed(times).counts
    even = max(held(lay_out(asked(), cost_model)))
    wide = better.index(max(better))
    limits = [2.0 * even if rank != wide else 1.01 * even for rank in range(4)]
    found = reviewed(times, memory_bytes=limits)
    fitting = lay_out(asked(partition=found.counts), cost_model)
    assert found.counts != better and found.gain > 0.1
    assert all(have <= most for have, most in zip(held(fitting), limits, strict=True))
    assert reviewed(times, memory_bytes=[1.0 * even] * 4) is None
    assert reviewed(times, memory_bytes=[1000.0] * 4) is None


def test_the_gain_of_a_roomier_cut_is_of_what_was_laid_out():
    """Its stages were timed as those of the cut that did not fit."""
    each = (4, 4, 1, 2, 1, 2, 1, 1)
    times = tuple(LayerTimes(*(factor * part for part in EVEN[0])) for factor in each)
    cost_model = KnownCosts(LAYERS, times, COUNT)
    even = max(held(lay_out(asked(), cost_model)))
    better = reviewed(times)
    wide = better.counts.index(max(better.counts))
    limits = [2.0 * even if rank != wide else 1.01 * even for rank in range(4)]
    found = reviewed(times, memory_bytes=limits)
    assert found.counts != better.counts and found.gain < better.gain - 0.05

    def step_s(counts):
        stages = [
            sum(each.forward for each in times[sum(counts[:k]) :][:n]) for k, n in enumerate(counts)
        ]
        costs = Costs(forward=stages, backward=[2 * each for each in stages])
        return simulate(lay_out(asked(partition=counts), cost_model).schedule, costs).makespan

    assert found.gain == pytest.approx(1 - step_s(found.counts) / step_s((2,) * 4))


def test_stages_that_took_other_times_than_planned_are_told():
    request = asked(partition="time")
    cut = lay_out(request, KnownCosts(LAYERS, EVEN, COUNT)).partition
    took = (*EVEN[:4], LayerTimes.alike(1.6, 3.2, 1.6, 1.6), *EVEN[5:])
    text = slow_stages_text(cut, took, EVEN)
    assert "stage 2 7.8 s, planned 6 s" in text and "stage 1" not in text
    assert (
        slow_stages_text(cut, (*EVEN[:4], LayerTimes.alike(1.3, 2.6, 1.3, 1.3), *EVEN[5:]), EVEN)
        == ""
    )
    # Of a cut without times only shares are known: twice as slow in all is as planned.
    plain = lay_out(asked(), KnownCosts(LAYERS, EVEN, COUNT)).partition
    double = tuple(LayerTimes(*(2 * part for part in each)) for each in EVEN)
    assert slow_stages_text(plain, double, EVEN) == ""
    assert "stage 0 12 s, planned 6 s" in slow_stages_text(cut, double, EVEN)
    uneven = with_slow(4)
    assert "stage 2 15 s, planned 8.25 s" in slow_stages_text(plain, uneven, EVEN)


def test_a_better_cut_keeps_pinned_layers_where_they_are():
    free = reviewed(with_slow(0))
    assert free.counts[0] == 1
    times = (SLOW, *EVEN[1:6], SLOW, SLOW)
    assert reviewed(times).counts[0] == 1
    pinned = reviewed(times, pins={1: 0})
    assert pinned.counts[0] >= 2 and max(pinned.counts) > 2


@pytest.mark.parametrize(("schedule", "slow"), [("zb_v", (5, 6, 7)), ("looped_bfs", (2, 9))])
def test_where_cuts_are_simulated_the_named_one_is_too(schedule, slow):
    """It named the most even cut, which is not the fastest where ranks hold several stages."""
    layers = [LayerSpec(nn.Linear, 16, 16) for _ in range(12)]
    count = count_model(layers, torch.empty(4, 16, device="meta"))
    plain = (LayerTimes.alike(1.0, 2.0, 1.0, 1.0),) * 12
    times = tuple(SLOW if index in slow else each for index, each in enumerate(plain))
    cost_model = KnownCosts(layers, times, count)
    request = Request(
        stages=2, microbatches=4, partition="simulated", recompute="never", schedule=schedule
    )
    kept = lay_out(request, KnownCosts(layers, plain, count))
    found = review(request, kept, cost_model, plain)
    best = lay_out(request, cost_model).partition.counts
    even = lay_out(replace(request, partition="time"), cost_model).partition.counts
    assert found is not None and found.counts == best != even
    settings = [each.settings for each in advise(request, kept, cost_model)]
    assert f"pipeline.partition=[{','.join(map(str, best))}]" in settings
