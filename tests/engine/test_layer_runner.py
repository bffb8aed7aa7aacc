"""Stages that recompute some layers: bitwise equal results, and only these layers run twice."""

import itertools
from collections import Counter

import pytest
import torch
from torch import nn

from gpipe_hpc.device.device import HostDevice
from gpipe_hpc.engine.layer_runner import RunMode
from gpipe_hpc.engine.run import Outcome, Run
from gpipe_hpc.engine.stage import Stage
from gpipe_hpc.engine.stage_runner import ForwardPlan, StageRunner
from gpipe_hpc.engine.wiring import StageRoutes
from gpipe_hpc.models import SkipNames, add_loss

CPU = HostDevice()
FIRST, NUM_LAYERS, WIDTH = 3, 5, 4
ROUTES = StageRoutes({0: ("near",), -1: ("far",)}, {2: ("next",), 4: ("out", "more")})
# Popped from other stages, stashed for other stages, and one skip within the stage.
NAMES = {
    3: SkipNames(stashes=("inner",)),
    4: SkipNames(pops=("far",), stashes=("next",)),
    5: SkipNames(stashes=("more", "out")),
    7: SkipNames(pops=("inner", "near")),
}


class Layer(nn.Module):
    def __init__(self, index, calls):
        super().__init__()
        self.index, self.calls = index, calls
        self.names = NAMES.get(index, SkipNames())
        self.linear = nn.Linear(WIDTH * (1 + len(self.names.pops)), WIDTH)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x, *popped):
        self.calls[self.index] += 1
        y = x + self.dropout(torch.tanh(self.linear(torch.cat([x, *popped], -1))))
        add_loss("own", y.square().sum())
        stashed = [y * (2 + k) for k in range(len(self.names.stashes))]
        return (y, *stashed) if stashed else y


RUN = Run("test", lambda microbatch: lambda layer: layer, 1, seed=torch.tensor(0.5))


def run(recomputed, splits):
    """Run one micro-batch; return outputs, gradients of inputs and weights, losses, layer calls."""
    torch.manual_seed(0)
    calls = Counter()
    layers = {i: Layer(i, calls) for i in range(FIRST, FIRST + NUM_LAYERS)}
    stage = Stage(1, layers, CPU, ROUTES, names=NAMES, recomputed=recomputed)
    work = StageRunner(stage)
    stage.gradients.clear()
    inputs = [torch.randn(2, WIDTH, requires_grad=True) for _ in range(3)]
    keep = RunMode.TRAIN if recomputed == frozenset() else RunMode.RECORD
    parts = [(inputs[0], inputs[1]), (inputs[2],)]
    outcome = Outcome()
    outputs = work.forward(RUN, 0, parts, 2, ForwardPlan(keep, splits), outcome)
    losses = [total.item() for each in outcome.noted[0] for total in each.reports.losses.values()]
    has_recomputed = work.recompute(RUN, 0) if keep is RunMode.RECORD else False
    assert has_recomputed == bool(recomputed is None or recomputed)
    flat = [tensor for part in outputs for tensor in part]
    gradients = work.backward(0, [torch.full_like(t, 0.1 * (i + 1)) for i, t in enumerate(flat)])
    if splits:
        work.weights(0)
    assert work.num_kept == 0
    input_gradients = [gradient for part in gradients for gradient in part]
    weights = [p.grad for p in stage.named_parameters().values()]
    return [t.detach() for t in flat], input_gradients, weights, losses, calls


SUBSETS = [
    frozenset(subset)
    for size in range(NUM_LAYERS + 1)
    for subset in itertools.combinations(range(FIRST, FIRST + NUM_LAYERS), size)
]


@pytest.mark.parametrize("splits", [False, True])
def test_any_subset_of_layers_can_be_recomputed(splits):
    *expected, _ = run(frozenset(), splits)
    for recomputed in (None, *SUBSETS):
        outputs, input_gradients, weights, losses, calls = run(recomputed, splits)
        assert [len(outputs), len(input_gradients), len(weights)] == [4, 3, 2 * NUM_LAYERS]
        for mine, theirs in zip((outputs, input_gradients, weights), expected, strict=False):
            assert all(map(torch.equal, mine, theirs)), recomputed
        assert losses == expected[3]
        run_twice = recomputed if recomputed is not None else set(calls)
        assert calls == {i: 1 + (i in run_twice) for i in calls}


def test_recomputed_layers_store_only_their_input():
    """Counts the tensors that autograd saves before the recomputation."""
    saved = []

    def count(recomputed):
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            stage = Stage(
                0,
                {i: nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for i in range(3)},
                CPU,
                StageRoutes({-1: ()}, {1: ()}),
                recomputed=recomputed,
            )
            work = StageRunner(stage)
            x = torch.ones(2, 4, requires_grad=True)
            work.forward(RUN, 0, [x], 2, ForwardPlan(RunMode.RECORD), Outcome())
            saved.clear()  # the first forward builds a graph to detect outputs that require grad
            work.forward(RUN, 1, [x], 2, ForwardPlan(RunMode.RECORD), Outcome())
        return len(saved)

    whole = count(frozenset())
    assert [count(frozenset(range(n))) for n in (1, 2, 3)] == [whole * k // 3 for k in (2, 1, 0)]
