"""Advice: what a simulation of other settings brings, for what layers took in a measured step."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from gpipe_hpc.models import LayerSpec
from gpipe_hpc.planner import LayerTimes, Partition, Request, lay_out
from gpipe_hpc.planner.advice import KnownCosts, advise, layer_times
from gpipe_hpc.planner.costs.cost_models import MEASURED
from gpipe_hpc.planner.costs.counted import count_model
from gpipe_hpc.schedule import Costs, simulate

LAYERS = [LayerSpec(nn.Linear, 16, 16) for _ in range(8)]
COUNT = count_model(LAYERS, torch.empty(4, 16, device="meta"))
EVEN = (LayerTimes.alike(1.0, 2.0, 1.0, 1.0),) * 8


def known(times=EVEN):
    return KnownCosts(LAYERS, times, COUNT)


def asked(**wishes):
    request = Request(stages=4, microbatches=8, partition="uniform", recompute="never")
    return replace(request, **wishes)


def advice(request, cost_model, **more):
    found = advise(request, lay_out(request, cost_model), cost_model, **more)
    return {each.settings: each for each in found}


def test_gains_are_those_of_the_simulator():
    """gpipe at K = 4, M = 8 takes 66 with two layers a stage; zb_h1 12 less; 1F1B as long."""
    found = advice(asked(), known())
    assert "pipeline.schedule=one_f_one_b" not in found  # which takes as long
    assert found["pipeline.schedule=zb_h1"].gain == pytest.approx(1 - 54 / 66)
    assert "-18 %" in found["pipeline.schedule=zb_h1"].text()
    gains = [round(each.gain, 2) for each in found.values()]
    assert gains == sorted(gains, reverse=True) and gains[-1] >= 0.02


def test_of_what_saves_as_much_the_one_that_needs_least_memory_comes_first():
    """Of 1F1B and zero bubble, both without recomputation on the last rank."""
    times = (*EVEN[:6], *(LayerTimes.alike(9.0, 18.0, 9.0, 9.0),) * 2)
    found = list(advice(asked(recompute="except_last"), known(times)).values())
    by_gain = {}
    for each in found:
        by_gain.setdefault(round(each.gain, 2), []).append(each.more_bytes)
    assert any(len(several) > 1 for several in by_gain.values())
    assert all(several == sorted(several) for several in by_gain.values())


def test_a_bad_cut_is_told_with_the_better_one():
    times = (*(LayerTimes.alike(3.0, 6.0, 3.0, 3.0),) * 2, *EVEN[2:])
    found = advice(asked(), known(times))
    cut = found["pipeline.partition=[1,1,3,3]"]
    assert cut.gain == pytest.approx(
        1 - simulated((1, 1, 3, 3), times) / simulated((2,) * 4, times)
    )


def simulated(counts, times):
    partition = Partition(counts, (), MEASURED, times)
    layout = lay_out(asked(partition=list(counts)), known(times))
    return simulate(layout.schedule, partition.stage_costs()).makespan


def test_recomputation_is_weighed_with_its_memory():
    request = asked(recompute="always", schedule="one_f_one_b")
    found = advice(request, known())["pipeline.recompute=never"]
    assert found.gain == pytest.approx(1 - 66 / 82) and found.more_bytes > 0
    fits = advice(request, known(), limits=[1e9] * request.stages)
    assert "pipeline.recompute=never" in fits
    assert "pipeline.recompute=never" not in advice(request, known(), limits=[100] * request.stages)


def test_more_micro_batches_are_told_where_there_are_samples_with_what_that_assumes():
    found = advice(asked(), known(), finer=16)["pipeline.microbatches=16"]
    assert found.gain == pytest.approx(1 - (16 + 3) / 2 / (8 + 3))
    assert "half the time" in found.assumes and found.more_bytes is None
    assert not any("microbatches" in settings for settings in advice(asked(), known()))


def test_a_table_that_would_take_too_long_gets_none():
    """A run that was stopped simulated for 20 s before it said how to go on."""
    size = sum(map(len, lay_out(asked(), known()).schedule.ranks))
    assert advice(asked(), known(), most_actions=size)
    assert not advice(asked(), known(), most_actions=size - 1)


def test_one_rank_has_no_bubble_and_gets_no_advice():
    assert advice(asked(stages=1), known()) == {}


def test_one_rank_is_told_of_recomputation_alone():
    """It was told to order the work of one rank anew, for halves of a backward that sum to less."""
    uneven = (LayerTimes.alike(1.0, 4.0, 1.0, 1.0),) * 8
    request = asked(stages=1, recompute="always")
    assert list(advice(request, known(uneven), finer=16)) == ["pipeline.recompute=never"]


def test_gains_are_shares_of_the_measured_time():
    """18 % of a simulation without transfers were promised of a step that transfers doubled."""
    found = advice(asked(), known(), measured_s=132.0)
    assert found["pipeline.schedule=zb_h1"].gain == pytest.approx((66 - 54) / 132)


def test_empty_micro_batches_are_no_part_of_the_gain():
    """Three of eight micro-batches have a sample: there is less to drain, and as much to fill."""
    shares = (1.0,) * 3 + (0.0,) * 5
    found = advice(asked(), known(), shares=shares)["pipeline.schedule=zb_h1"]
    few = advice(asked(microbatches=3), known())["pipeline.schedule=zb_h1"]
    assert found.gain == pytest.approx(few.gain)


def test_advice_can_be_followed_beside_what_the_user_has_set():
    """The advised command was refused: an option of another schedule, a cut into fewer stages."""
    request = asked(
        schedule="looped_bfs", schedule_options={"stages_per_rank": 2}, partition=[1] * 8
    )
    found = advice(request, known())
    settings = "pipeline.schedule=zb_h1 pipeline.partition=[2,2,2,2]"
    assert found[settings].without == ("pipeline.options.stages_per_rank",)
    assert (
        found[settings]
        .text()
        .startswith(f"{settings} (without pipeline.options.stages_per_rank): -")
    )
    by_hand = advice(asked(partition=[2] * 4), known())
    assert any(each.endswith("pipeline.partition=[1,1,1,1,1,1,1,1]") for each in by_hand)
    assert "pipeline.schedule=zb_h1" in by_hand  # as many stages: the cut may stay


def test_compiled_layers_are_not_told_to_split_backwards():
    """Compiled, they make weight gradients together with those of inputs: W has nothing to do."""
    assert not any("zb_" in each for each in advice(asked(compile=True), known()))


def test_what_does_not_fit_the_numbers_is_passed_over():
    """Eight layers on eight ranks leave no second stage to a rank."""
    found = advice(asked(stages=8, microbatches=5), known())
    assert found and all("interleaved" not in settings for settings in found)


def test_measured_times_are_spread_over_the_layers_as_the_basis_says():
    basis = tuple(LayerTimes.alike(f, 10 * f, 4 * f, 6 * f) for f in (1.0, 3.0, 2.0, 2.0))
    costs = Costs(forward=[8.0, 2.0], backward=[4.0, 6.0])
    request = Request(stages=2, microbatches=4, partition=[2, 2], recompute="never")
    cost_model = KnownCosts(
        LAYERS[:4], basis, count_model(LAYERS[:4], torch.empty(4, 16, device="meta"))
    )
    timeline = simulate(lay_out(request, cost_model).schedule, costs)
    times = layer_times(timeline, [2, 2], basis)
    assert [each.forward for each in times] == [2.0, 6.0, 1.0, 1.0]
    assert [each.backward for each in times] == pytest.approx([1.0, 3.0, 3.0, 3.0])
    assert times[1].of_input == pytest.approx(1.2) and times[1].of_weight == pytest.approx(1.8)
    # A half that took longer than the whole while others had the machine ended runs in a traceback.
    disturbed = layer_times(timeline, [2, 2], (LayerTimes.alike(1.0, 2.0, 3.0, 1.0),) * 4)
    assert [each.of_weight for each in disturbed] == [0.0] * 4
    nothing = layer_times(timeline, [2, 2], (LayerTimes.alike(0.0, 0.0, 0.0, 0.0),) * 4)
    assert [each.forward for each in nothing] == [4.0, 4.0, 1.0, 1.0]


def test_a_better_cut_keeps_pinned_layers_where_they_are():
    times = (*(LayerTimes.alike(3.0, 6.0, 3.0, 3.0),) * 2, *EVEN[2:])
    assert not any("partition" in each for each in advice(asked(pins={1: 0}), known(times)))
    found = advice(asked(pins={1: 1, 4: 2}), known(times))
    assert "pipeline.partition=[1,1,3,3]" in found
