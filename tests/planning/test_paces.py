"""Ranks of unequal speed: the cut gives slow ones fewer layers, and forecasts know of them."""

from dataclasses import replace
from fractions import Fraction
from itertools import accumulate, combinations, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gpipe_hpc import Pipeline, run_on_threads
from gpipe_hpc.errors import ConfigError
from gpipe_hpc.models import normalise_layers
from gpipe_hpc.planning import Partition, Request, cut, lay_out
from gpipe_hpc.planning.gauges import LayerTimes
from gpipe_hpc.planning.uneven import cut_for_paces
from gpipe_hpc.schedule import simulate
from tests.support import mean_square


class Given:
    """Twelve layers that take a second each way."""

    measure = "time"
    layers = normalise_layers([nn.Identity() for _ in range(12)])
    times = (LayerTimes(1.0, 2.0, 1.0, 1.0),) * 12
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
        ({"paces": [1, 2]}, "a number above 0 for each of 3 ranks"),
        ({"paces": [1, 2, 0]}, "a number above 0 for each of 3 ranks"),
        ({"paces": [1, 1, 2], "stages": 2}, "with holes"),
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
