import gc
import time

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_hpc.device.device import HostDevice
from gpipe_hpc.engine.precision import casting
from gpipe_hpc.errors import ModelError
from gpipe_hpc.models import LayerSpec, build_model, token_cross_entropy
from gpipe_hpc.planner import LayerCost, measure_layers
from gpipe_hpc.planner.costs.clock import WorkClock

FAST = {"repetitions": 1, "warmup": 0, "rounds": 1}
# Where seconds count: the least of several times is disturbed by no other work on the machine.
STEADY = FAST | {"repetitions": 5}


class Spy(nn.Module):
    """Note when layers are made and how many of them live at a time."""

    def __init__(self, log: list, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.log = log
        log.append("made")

    def forward(self, x: Tensor) -> Tensor:
        self.log.append("run")
        return self.linear(x)

    def __del__(self) -> None:
        self.log.append("dropped")


class Sleeper(nn.Module):
    def __init__(self, forward_s: float) -> None:
        super().__init__()
        self.forward_s = forward_s

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.forward_s)
        return x * 2


def test_a_gpt_with_its_loss_is_measured():
    layers = build_model("gpt", width=16, num_layers=3)
    tokens = torch.randint(256, (2, 9))
    costs = measure_layers(layers, tokens[:, :-1], tokens[:, 1:], token_cross_entropy, **FAST)
    assert len(costs) == len(layers)
    assert all(isinstance(cost, LayerCost) for cost in costs)
    assert all(cost.forward_s > 0 and cost.backward_s > 0 for cost in costs)
    # Equal blocks are one measurement.
    assert costs[1] == costs[3] == costs[5]
    assert costs[0].total_s == costs[0].forward_s + costs[0].backward_s


def living_bytes() -> int:
    gc.collect()
    living = [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter)]
    return sum(each.nbytes for each in living)


def test_nothing_of_the_layers_lives_on():
    # The log-probabilities of the loss are what their own node saves: a cycle, if it is kept so.
    layers = build_model("gpt", width=16, num_layers=1)
    tokens = torch.randint(256, (2, 9))
    before = living_bytes()
    measure_layers(layers, tokens[:, :-1], tokens[:, 1:], token_cross_entropy, **FAST)
    assert living_bytes() == before


def test_one_layer_lives_at_a_time_in_bfloat16():
    """Autocast holds the weights that it has cast until its outermost block ends."""
    before = living_bytes()
    with casting("bfloat16", HostDevice()):
        measure_layers([LayerSpec(nn.Linear, 4, 4)] * 3, torch.ones(2, 4), **FAST)
        assert living_bytes() == before


class Slope(nn.Module):
    """Differentiates itself within its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            y = self.linear(x).tanh().sum()
            return torch.autograd.grad(y, x, create_graph=True)[0]


class OfFunctions(nn.Linear):
    """Does so by torch.func, which no hooks may watch."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.func.grad(lambda y: y.tanh().sum())(x)


@pytest.mark.parametrize("module", [Slope, OfFunctions])
def test_a_layer_that_differentiates_itself_is_measured(module):
    arguments = (4, 4) if module is OfFunctions else ()
    layers = [LayerSpec(nn.Linear, 4, 4), LayerSpec(module, *arguments), LayerSpec(nn.ReLU)]
    costs = measure_layers(layers, torch.ones(2, 4), **FAST)
    assert costs[1].forward_s > 0


def test_one_layer_lives_at_a_time():
    log: list[str] = []
    layers = [LayerSpec(Spy, log), LayerSpec(Spy, log), LayerSpec(nn.ReLU), LayerSpec(Spy, [])]
    measure_layers(layers[:3], torch.ones(2, 4), repetitions=2, warmup=1, rounds=2, budget_s=0)
    # The input of the first layer asks for no gradient, the second's does: two measurements, of
    # its backward, of that in halves, and of a forward alone. In the first, a forward counts what
    # it keeps.
    each = ["made", *["run"] * 9, "dropped"]
    first = ["made", *["run"] * 10, "dropped"]
    assert log[:46] == first * 2 + each * 2
    # Where the real clock's two rounds differ there is one more. Then they are run one after the
    # other, for which they live together.
    together = log[57:] if log[46:57] == each else log[46:]
    assert together[:2] == ["made"] * 2 and together[-2:] == ["dropped"] * 2
    assert set(together[2:-2]) == {"run"}


class Told(WorkClock):
    """A clock that goes on as it is told to, and a little with all that it measures."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def now(self) -> float:
        return self.now_s

    def timed(self, work, device):
        before_s, result = self.now_s, work()
        self.now_s += 1e-6
        return result, self.now_s - before_s


def test_the_halves_of_a_backward_are_measured_apart():
    clock = Told()

    class Waits(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            clock.now_s += 0.02
            return gradient

    class Layer(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(Waits.apply(x))

    class Plain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Waits.apply(x).tanh()

    first, second, plain = measure_layers(
        [LayerSpec(Layer, 4, 4), LayerSpec(Layer, 4, 4), LayerSpec(Plain)],
        torch.ones(2, 4),
        clock=clock,
        **FAST,
    )
    assert first.input_s < 0.02 <= second.input_s
    assert second.backward_s >= 0.02
    assert 0 < second.weight_s < 0.02
    assert plain.weight_s < plain.input_s


def test_a_forward_without_a_graph_is_measured_apart():
    clock = Told()

    class Layer(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            clock.now_s += 0.02 if torch.is_grad_enabled() else 0.01
            return super().forward(x)

    (cost,) = measure_layers([LayerSpec(Layer, 4, 4)], torch.ones(2, 4), clock=clock, **FAST)
    assert cost.forward_s == pytest.approx(0.02, abs=1e-4)
    assert cost.bare_forward_s == pytest.approx(0.01, abs=1e-4)


def test_what_a_forward_takes_more_to_put_gradients_off_counts_in_the_first_half():
    """Schedules that split the backward were planned too short: nobody counted that."""
    clock = Told()

    class Layer(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            puts_off = torch._C._len_torch_function_stack() > 0
            clock.now_s += 0.03 if puts_off else 0.02
            return super().forward(x)

    (cost,) = measure_layers([LayerSpec(Layer, 4, 4)], torch.ones(2, 4), clock=clock, **FAST)
    assert cost.forward_s == pytest.approx(0.02, abs=1e-4)
    assert cost.input_s == pytest.approx(0.01, abs=1e-4)


def test_equal_specs_on_equal_inputs_are_run_once():
    log: list[str] = []
    spec = LayerSpec(Spy, log)
    costs = measure_layers([spec] * 6, torch.ones(2, 4), **FAST)
    # Layers 0 (no input gradient), 1, and the last one only if it carried a loss.
    # Then all six, one after the other.
    assert log.count("made") == 2 + 6
    assert costs[1] == costs[5]


def test_a_loss_counts_for_the_last_layer():
    def slow_loss(output: Tensor, target: Tensor) -> Tensor:
        time.sleep(0.05)
        return (output - target).square().mean()

    spec = LayerSpec(nn.Linear, 4, 4)
    costs = measure_layers([spec] * 4, torch.ones(2, 4), torch.ones(2, 4), slow_loss, **STEADY)
    assert costs[3].forward_s >= 0.045
    assert costs[1] == costs[2]
    assert costs[2] != costs[3]


def test_seconds_are_those_of_the_layer():
    layers = [LayerSpec(Sleeper, 0.03), LayerSpec(Sleeper, 0.0)]
    first, _ = measure_layers(layers, torch.ones(2, requires_grad=True), **STEADY)
    assert first.forward_s >= 0.027


def test_random_state_and_built_modules_are_left_alone():
    batch_norm = nn.BatchNorm1d(4)
    linear = nn.Linear(4, 4)
    before = torch.get_rng_state()
    mean = batch_norm.running_mean.clone()
    measure_layers([linear, batch_norm, nn.Dropout(0.5)], torch.randn(8, 4).clone(), **FAST)
    before_again = torch.get_rng_state()
    torch.set_rng_state(before)
    torch.randn(8, 4)
    assert torch.equal(before_again, torch.get_rng_state())
    assert torch.equal(batch_norm.running_mean, mean)
    assert batch_norm.num_batches_tracked == 0
    assert linear.weight.grad is None


def test_in_place_layers_and_the_callers_input():
    x = torch.linspace(-1, 1, 8)
    kept = x.clone()
    costs = measure_layers([nn.ReLU(inplace=True)] * 2, x.requires_grad_(), **FAST)
    assert len(costs) == 2
    assert torch.equal(x, kept)
    assert x.grad is None


def test_frozen_layers_have_no_backward_until_something_trains():
    frozen = nn.Linear(4, 4).requires_grad_(False)
    costs = measure_layers([frozen, nn.Linear(4, 4), frozen], torch.ones(2, 4), **FAST)
    assert costs[0].backward_s == 0
    assert costs[1].backward_s > 0
    assert costs[2].backward_s > 0


def test_nests_with_integers_and_none_pass_between_layers():
    class Split(nn.Module):
        def forward(self, tokens: Tensor) -> dict:
            return {"x": tokens.float()[..., None].requires_grad_(), "mask": tokens > 1, "n": None}

    class Join(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(1, 3)

        def forward(self, value: dict) -> tuple[Tensor, int]:
            assert value["n"] is None
            return self.linear(value["x"]) * value["mask"][..., None], 7

    costs = measure_layers([Split(), Join()], torch.arange(6).view(2, 3), **FAST)
    assert costs[1].backward_s > 0


def test_a_layer_that_does_not_fit_is_named():
    layers = [LayerSpec(nn.Linear, 4, 8), LayerSpec(nn.Linear, 4, 8)]
    with pytest.raises(ModelError, match=r"layers\.1 \(Linear\).*float32\[2, 8\].*RuntimeError"):
        measure_layers(layers, torch.ones(2, 4), **FAST)


def test_a_loss_that_fails_is_not_blamed_on_the_last_layer():
    """Its error was told as the last layer's, with the remedy for a layer."""

    def broken(output, targets):
        raise KeyError("no such key")

    layers, inputs = [nn.Linear(4, 3)], torch.zeros(2, 4)
    classes = torch.tensor([0, 3])
    for loss, said in ((broken, "KeyError: 'no such key'"), (F.cross_entropy, "Target 3 is out")):
        with pytest.raises(ModelError, match=said) as refusal:
            measure_layers(layers, inputs, classes, loss)
        text = str(refusal.value)
        assert text.startswith("loss: failed after layers.0 (Linear)")
        assert "output float32[2, 3] and targets int64[2]" in text
        assert (
            "correct the loss" if loss is broken else "class indices must be at least 0"
        ) in text
        assert "make the layer" not in text


def test_a_module_that_cannot_be_copied_is_refused():
    class Stubborn(nn.Module):
        def __deepcopy__(self, memo: dict) -> nn.Module:
            raise TypeError("not copyable")

    with pytest.raises(ModelError, match=r"layers\.0: cannot be measured.*LayerSpec"):
        measure_layers([Stubborn()], torch.ones(2), **FAST)


def test_skips_are_measured_where_they_are_made_and_used():
    class Stash(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x[:, :2].exp(), x

    class Pop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 2)

        def forward(self, x: Tensor, stashed: Tensor) -> Tensor:
            assert x.shape == (3, 2) and stashed.shape == (3, 4) and stashed.requires_grad
            return x + self.linear(stashed)

    layers = [
        LayerSpec(nn.Linear, 4, 4),
        LayerSpec(Stash).stashing("a"),
        LayerSpec(nn.ReLU),
        LayerSpec(Pop).popping("a"),
    ]
    costs = measure_layers(layers, torch.ones(3, 4), **FAST)
    assert costs[3].backward_s > 0
    with pytest.raises(ModelError, match=r"stashes 'a', but no later layer pops it"):
        measure_layers(layers[:3], torch.ones(3, 4), **FAST)
