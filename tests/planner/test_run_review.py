"""A run looks at its cut again once, after REVIEW_AFTER steps, and rank 0 warns."""

import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from gpipe_hpc.models import LayerSpec
from gpipe_hpc.planner import LayerTimes, Request, lay_out
from gpipe_hpc.planner.advice import KnownCosts
from gpipe_hpc.planner.costs.counted import count_model
from gpipe_hpc.planner.review import Review
from gpipe_hpc.planner.run_review import review_run
from gpipe_hpc.schedule import Costs, simulate
from gpipe_hpc.trainer import loop
from gpipe_hpc.trainer.summary import reporting
from tests.support import metrics, train_here

RUN = ("pipeline.stages=2", "train.steps=6")


@pytest.fixture(autouse=True)
def review_early(monkeypatch):
    monkeypatch.setattr(loop, "REVIEW_AFTER", 4)


@pytest.fixture
def reviews(monkeypatch):
    """Answer each review with a cut, and hold what was asked."""
    asked = []

    def answer(pipe, foreseen, measured, forwards_s):
        asked.append((pipe.world.rank, measured, forwards_s))
        return Review((1, 6), 0.25, -0.1, 3, 4.0)

    monkeypatch.setattr(reporting, "review_run", answer)
    return asked


def test_rank_0_looks_once_at_all_ranks_and_warns(tiny, tmp_path, reviews, caplog):
    with caplog.at_level(logging.WARNING, "gpipe_hpc.train"):
        train_here(2, *tiny, *RUN, f"run.dir={tmp_path}")
    ((rank, measured, forwards_s),) = reviews
    assert rank == 0 and measured.num_ranks == 2 and all(measured.events)
    assert sorted(forwards_s) == list(range(len(forwards_s))) and min(forwards_s.values()) > 0
    told = [each.getMessage() for each in caplog.records if "partition:" in each.getMessage()]
    assert len(told) == 1
    assert "a step 25 % shorter" in told[0] and "pipeline.partition=[1,6]" in told[0]
    assert "the cut by counted FLOPs: 10 % longer" in told[0]
    assert len([each for each in metrics(tmp_path) if "loss" in each]) == 6


def test_a_run_without_a_trace_does_not_look(tiny, tmp_path, reviews):
    train_here(2, *tiny, *RUN, "trace.steps=0", f"run.dir={tmp_path}")
    assert reviews == []


def test_a_review_that_fails_ends_no_run(tiny, tmp_path, monkeypatch, caplog):
    def fail(*_):
        raise ValueError("no such cut")

    monkeypatch.setattr(reporting, "review_run", fail)
    train_here(2, *tiny, *RUN, f"run.dir={tmp_path}")
    assert len([each for each in metrics(tmp_path) if "loss" in each]) == 6
    assert "the partition was not reviewed; the run itself is complete" in caplog.text


def test_of_given_clocks_the_slow_layer_is_named_with_its_cut():
    """Layer 5 takes as much as six others; its stage alone would not tell which of the two."""
    layers = [LayerSpec(nn.Linear, 16, 16) for _ in range(8)]
    count = count_model(layers, torch.empty(4, 16, device="meta"))
    even = (LayerTimes.alike(1.0, 2.0, 1.0, 1.0),) * 8
    request = Request(stages=4, microbatches=8, partition="uniform", recompute="never")
    known = KnownCosts(layers, even, count)
    layout = lay_out(request, known)
    forwards_s = {index: 6.0 if index == 5 else 1.0 for index in range(8)}
    stages = [forwards_s[at] + forwards_s[at + 1] for at in range(0, 8, 2)]
    measured = simulate(
        layout.schedule, Costs(forward=stages, backward=[2 * each for each in stages])
    )
    pipe = SimpleNamespace(partition=layout.partition, request=request, layout=layout)
    found = review_run(pipe, SimpleNamespace(known=known), measured, forwards_s)
    assert found is not None and found.layer == 5
    assert 1 in found.counts and sum(found.counts) == 8
    first = sum(found.counts[: found.counts.index(1)])
    assert first == 5  # the layer stands alone
    fast = dict.fromkeys(range(8), 1.0)
    stages = [2.0] * 4
    measured = simulate(layout.schedule, Costs(forward=stages, backward=[4.0] * 4))
    assert review_run(pipe, SimpleNamespace(known=known), measured, fast) is None
