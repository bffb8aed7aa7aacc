"""Ranks measure how fast they are: equal ones stay equal, and a resumed run keeps what it found."""

import json
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gpipe_hpc import Pipeline, run_on_threads
from gpipe_hpc.device.device import planned_device
from gpipe_hpc.errors import ConfigError
from gpipe_hpc.planner import shared_decisions
from gpipe_hpc.planner.costs.speed import confirms, paces_of_times, paces_text, seconds_of_work
from tests.support import mean_square, train_here


@given(
    st.lists(st.sampled_from([1.0, 2.0, 3.5]), min_size=1, max_size=8),
    st.lists(st.floats(1.0, 1.04), min_size=8, max_size=8),
    st.floats(1e-4, 10),
)
@settings(max_examples=60, deadline=None)
def test_ranks_of_one_kind_get_one_pace_whatever_the_noise(kinds, noise, unit):
    times = [unit * kind * more for kind, more in zip(kinds, noise, strict=False)]
    found = paces_of_times(times)
    for pace, kind in zip(found, kinds, strict=True):
        assert pace == pytest.approx(kind / min(kinds), rel=0.1)
        assert found.count(pace) == kinds.count(kind)


def test_paces_are_confirmed_whatever_they_are_relative_to():
    assert confirms([1, 2, 1.1], [0.5, 1, 0.5])
    assert not confirms([1, 1, 1], [1, 2, 1])
    assert not confirms([1, 1], [1, 1, 1])
    assert paces_text((1.0, 2.0, 1.0)) == "ranks 0, 2: 1, rank 1: 2 times as long as the fastest"
    assert paces_text((2.0, 2.0)) == "all 2 ranks count as equally fast"


class Ticking:
    """A clock by which every repeat takes less than the one before."""

    def __init__(self):
        self.runs = 0

    def now(self):
        return 0.0

    def timed(self, work, device):
        self.runs += 1
        return work(), 1 / self.runs


def test_the_least_of_some_repeats_counts_and_no_random_number_is_drawn():
    state, clock = torch.get_rng_state(), Ticking()
    assert seconds_of_work(planned_device("cpu"), "float32", clock) == 1 / clock.runs
    assert clock.runs > 2 and torch.equal(state, torch.get_rng_state())


def of_rank(*seconds):
    """Return what stands in for the measurement: so many seconds on each rank."""
    return lambda *_: seconds[int(threading.current_thread().name.removeprefix("rank"))]


def cuts(ranks, **settings):
    def body(world):
        layers = [nn.Linear(3, 3) for _ in range(6)]
        pipe = Pipeline(
            layers, mean_square, microbatches=4, world=world, paces="measured", **settings
        )
        return pipe.partition.counts, pipe.partition.rank_paces, pipe.request.stages

    first, *others = run_on_threads(ranks, body)
    assert all(other == first for other in others)
    return first


def test_the_cut_follows_what_ranks_have_measured(monkeypatch, caplog):
    monkeypatch.setattr(shared_decisions, "seconds_of_work", of_rank(0.01, 0.0203))
    with caplog.at_level("INFO"):
        assert cuts(2) == ((4, 2), (1.0, 2.0), 2)
    assert "paces: rank 0: 1, rank 1: 2 times as long as the fastest" in caplog.text


def test_rank_0_alone_is_told_of_the_paces_of_all(monkeypatch):
    """Each rank heard of every other: 37 kB in a world of 4,096."""
    monkeypatch.setattr(shared_decisions, "seconds_of_work", of_rank(0.01, 0.01, 0.01, 0.02))

    def body(world):
        layers = [nn.Linear(3, 3) for _ in range(6)]
        pipe = Pipeline(layers, mean_square, microbatches=4, world=world, paces="measured")
        return pipe.request.paces

    assert run_on_threads(4, body) == [(1.0, 1.0, 1.0, 2.0), (), (), ()]


def test_of_replicas_the_slower_counts(monkeypatch):
    monkeypatch.setattr(shared_decisions, "seconds_of_work", of_rank(0.02, 0.01, 0.01, 0.02))
    assert cuts(4, replicas=2) == ((3, 3), (1.0, 1.0), 2)
    monkeypatch.setattr(shared_decisions, "seconds_of_work", of_rank(0.01, 0.01, 0.01, 0.02))
    assert cuts(4, replicas=2) == ((4, 2), (1.0, 2.0), 2)


def test_pipelines_with_holes_follow_what_ranks_have_measured(monkeypatch):
    """They measured nothing, and said so."""
    monkeypatch.setattr(shared_decisions, "seconds_of_work", of_rank(0.01, 0.01, 0.03))
    # The slow rank and a fast one do 4/3 as much as the other fast one.
    assert cuts(3, stages=2) == ((2, 4), (1.0, 1.0, 3.0), 3)


def test_stages_fit_ranks_as_measured(monkeypatch):
    monkeypatch.setattr(shared_decisions, "seconds_of_work", of_rank(0.01, 0.03))
    assert cuts(2, stages="fit", schedule="zb_h1")[2] == 2
    monkeypatch.setattr(shared_decisions, "seconds_of_work", of_rank(0.01, 0.0101))
    assert cuts(2, stages="fit", schedule="zb_h1")[2] == 1


def test_paces_of_another_name_are_refused():
    def body(world):
        Pipeline([nn.Linear(3, 3)] * 2, mean_square, world=world, paces="guessed")

    with pytest.raises(ConfigError, match="paces, expected one of measured, got 'guessed'"):
        run_on_threads(1, body)


@pytest.mark.parametrize("partition", ["time", "parameters"])
def test_a_resumed_run_keeps_its_paces_unless_ranks_have_changed(
    tiny, tmp_path, monkeypatch, partition
):
    """Each start measures a little else: the cut shall not wander with that."""
    words = (*tiny, "pipeline.paces=measured", f"pipeline.partition={partition}")

    def run(seconds, steps):
        monkeypatch.setattr(shared_decisions, "seconds_of_work", of_rank(*seconds))
        train_here(2, f"run.dir={tmp_path}", *words, f"train.stop_at={steps}", "train.steps=9")
        layout = json.loads((tmp_path / "summary.json").read_text())["layout"]
        return layout["paces"], layout["layers_of_stages"]

    first = run([0.01, 0.02], 1)
    assert first[0] == [1.0, 2.0] and first[1][0] > first[1][1]
    assert run([0.01, 0.0215], 2) == first
    assert "cut again" not in (tmp_path / "logs" / "rank0.log").read_text()
    assert run([0.01, 0.01], 3)[0] == [1.0, 1.0]
    assert "the model is cut again" in (tmp_path / "logs" / "rank0.log").read_text()
