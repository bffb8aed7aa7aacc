"""Recomputation: number of forwards of each layer, and that R does not wait for the gradient."""

import itertools
import threading
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from gpipe_hpc import Pipeline, run_on_threads
from gpipe_hpc.engine import backward_draws, random_state
from gpipe_hpc.schedule import Action, Op
from tests.support import mean_square

STAGES = 3
TIMEOUT_S = 120.0  # reached only if a test hangs


class Counting(nn.Linear):
    """Linear layer that counts its forwards and calls `when[n]` when the n-th begins."""

    def __init__(self):
        super().__init__(2, 2)
        self.num_calls = 0
        self.when = {}

    def forward(self, x):
        self.num_calls += 1
        self.when.get(self.num_calls, int)()
        return super().forward(x)


class _SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, wait):
        ctx.wait = wait
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.wait()
        return gradient, None


class SlowBackward(nn.Linear):
    """Linear layer that calls `wait` when its first backward begins."""

    def __init__(self, wait):
        super().__init__(2, 2)
        self.wait = wait

    def forward(self, x):
        return _SlowBackward.apply(super().forward(x), self._once)

    def _once(self):
        wait, self.wait = self.wait, bool
        wait()


def count_calls(schedule, recompute, microbatches):
    """Return the number of forwards of each rank's layer in one step."""

    def body(world):
        layers = [Counting() for _ in range(STAGES)]
        pipe = Pipeline(
            layers,
            mean_square,
            microbatches=microbatches,
            schedule=schedule,
            recompute=recompute,
            world=world,
        )
        pipe.step(torch.randn(8, 2), torch.randn(8, 2))
        return layers[pipe.stage_rank].num_calls

    return run_on_threads(STAGES, body)


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b"])
@pytest.mark.parametrize(("recompute", "times"), [("always", 2), ("never", 1)])
def test_layers_run_twice_with_recomputation_and_once_without(
    schedule, recompute, times, microbatches
):
    assert count_calls(schedule, recompute, microbatches) == [times * microbatches] * STAGES


@pytest.mark.parametrize(("schedule", "num_spared"), [("gpipe", 1), ("one_f_one_b", 4)])
def test_except_last_skips_recomputation_directly_before_the_backward(schedule, num_spared):
    assert count_calls(schedule, "except_last", 4)[-1] == 2 * 4 - num_spared


def test_except_last_recomputes_on_all_other_ranks_of_1f1b():
    assert count_calls("one_f_one_b", "except_last", 4)[:-1] == [2 * 4] * (STAGES - 1)


def test_evaluation_and_prediction_run_layers_once():
    def body(world):
        layers = [Counting() for _ in range(STAGES)]
        pipe = Pipeline(layers, mean_square, microbatches=4, recompute="always", world=world)
        pipe.evaluate(torch.randn(8, 2), torch.randn(8, 2))
        pipe.predict(torch.randn(8, 2))
        return layers[pipe.stage_rank].num_calls

    assert run_on_threads(STAGES, body) == [8, 8, 8]


class NoLock(nullcontext):
    """Lock without effect, as if each rank were a process with its own generators."""

    def acquire(self):
        pass

    def release(self):
        pass


@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b"])
def test_recomputation_starts_before_gradient_arrives(schedule, monkeypatch):
    """Rank 1 delays its first gradient until rank 0 recomputes; otherwise the step would not end.

    The generator lock is replaced, because ranks are threads: a backward that waits for another
    rank's R would block it.
    """
    monkeypatch.setattr(random_state, "GENERATOR_LOCK", NoLock())
    # Without the lock, a backward sees the other rank's seeds and would raise an error.
    monkeypatch.setattr(backward_draws, "_FIRST", 0)
    microbatches = 3
    num_warmup = {"gpipe": microbatches, "one_f_one_b": 2}[schedule]
    recomputing = threading.Event()

    def wait():
        if not recomputing.wait(TIMEOUT_S):
            raise TimeoutError("rank 0 waits for the gradient before it recomputes")

    def body(world):
        early = Counting()
        early.when[num_warmup + 1] = recomputing.set
        pipe = Pipeline(
            [early, SlowBackward(wait)],
            mean_square,
            microbatches=microbatches,
            schedule=schedule,
            recompute="always",
            world=world,
        )
        pipe.step(torch.randn(8, 2), torch.randn(8, 2))
        return pipe.timeline()

    first, second = run_on_threads(2, body)
    assert first.events == second.events
    times = {event.action: event for row in first.events for event in row}
    last = 2 if schedule == "gpipe" else 0  # the micro-batch whose backward runs first
    r, b = times[Action(Op.R, 0, last)], times[Action(Op.B, 1, last)]
    assert r.start_s < b.end_s
    assert r.end_s <= times[Action(Op.B, 0, last)].start_s


def test_timeline_lists_all_compute_actions_in_table_order():
    def body(world):
        layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
        pipe = Pipeline(layers, mean_square, microbatches=3, recompute="except_last", world=world)
        pipe.step(torch.randn(8, 2), torch.randn(8, 2))
        return pipe.timeline(), pipe.schedule

    timeline, schedule = run_on_threads(2, body)[0]
    assert (timeline.num_ranks, timeline.num_stages, timeline.num_microbatches) == (2, 2, 3)
    for row, actions in zip(timeline.events, schedule.ranks, strict=True):
        assert [event.action for event in row] == [a for a in actions if a.op in (Op.F, Op.R, Op.B)]
        for earlier, later in itertools.pairwise(row):
            assert earlier.start_s <= earlier.end_s <= later.start_s
    assert 0.0 < timeline.bubble < 1.0


def test_timeline_omits_empty_microbatches():
    def body(world):
        pipe = Pipeline([nn.Linear(2, 2)], mean_square, microbatches=4, world=world)
        pipe.step(torch.randn(2, 2), torch.randn(2, 2))
        return pipe.timeline()

    (timeline,) = run_on_threads(1, body)
    assert {event.action.microbatch for row in timeline.events for event in row} == {0, 1}
