"""Loss terms, the initial gradient (seed) and the final divisor of gradients."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from gpipe_hpc.comm.collectives.group import SoloGroup
from gpipe_hpc.device.device import HostDevice
from gpipe_hpc.engine.loss import LayerReports, LossTerm, backward_seed, final_divisor, loss_term
from gpipe_hpc.engine.step_reduction import StepReduction
from gpipe_hpc.errors import ModelError
from gpipe_hpc.models import Reports

CPU = HostDevice()
_POWERS = (torch.ops.aten.pow, torch.ops.aten.exp2, torch.ops.aten.ldexp)


def scalar(value):
    return torch.tensor(value, dtype=torch.float64)


def step_loss(*terms):
    own = {i: LossTerm(scalar(total), weight) for i, (total, weight) in enumerate(terms)}
    return StepReduction(len(terms), 0, SoloGroup(0), 0, CPU).reduce(own).loss


@given(st.integers(1, 2**53))
def test_seed_is_a_power_of_two_near_the_inverse_weight(weight):
    seed = backward_seed(scalar(float(weight))).item()
    assert math.frexp(seed)[0] == 0.5
    assert 0.5 <= weight * seed <= 1.0


@given(st.floats(1e-30, 1e30), st.integers(1, 10**9), st.integers(1, 10**9))
def test_seed_does_not_round_gradients(gradient, weight, weight_before):
    seed = backward_seed(scalar(float(weight_before)))
    scaled = scalar(gradient) * seed / final_divisor(scalar(float(weight)), seed)
    assert scaled.item() == gradient / weight


def test_zero_weight_has_the_seed_of_weight_one_and_zero_gradient():
    seed = backward_seed(scalar(0.0))
    assert seed.item() == backward_seed(scalar(1.0)).item()
    assert (scalar(5.0) / final_divisor(scalar(0.0), seed)).item() == 0.0


@pytest.mark.parametrize("weight", [1.0, 3.0, 1e5, 2.0**40, 2.0**-40])
def test_seed_is_exact_if_a_device_rounds_powers(weight):
    """Regression: torch.ldexp multiplies by a result of `pow`, which a device may round.

    A seed that is no power of two would change the last bit of every gradient.
    """
    with _RoundedPowers():
        assert backward_seed(scalar(weight)).item() == 2.0 ** -math.frexp(weight)[1]


class _RoundedPowers(TorchDispatchMode):
    """Make the results of power functions inexact."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        is_power = func.overloadpacket in _POWERS
        return made * (1 + 2.0**-23) if is_power else made


@pytest.mark.parametrize("weight", [math.inf, math.nan, -1.0])
def test_invalid_weight_has_the_seed_of_weight_one(weight):
    assert backward_seed(scalar(weight)).item() == backward_seed(scalar(1.0)).item()


def test_mean_loss_becomes_a_sum_over_samples():
    flat = loss_term(lambda o, t: o.mean(), torch.arange(4.0), None, 4, None)
    assert flat == (6.0, 4.0, False)
    shaped = loss_term(lambda o, t: o.mean().view(1, 1), torch.ones(4), None, 4, None)
    assert shaped == (4.0, 4.0, False)


def test_pair_of_sum_and_weight_is_unchanged():
    term = loss_term(lambda o, t: (o.sum(), t), torch.ones(4), torch.tensor(7), 4, None)
    assert (term.total.item(), term.weight.item()) == (4.0, 7)


@pytest.mark.parametrize("value", [None, 1.0, torch.ones(2), (torch.ones(2), 1), [1, 2], (1.0, 2)])
def test_invalid_loss_value_raises_error(value):
    with pytest.raises(ModelError, match=r"loss_fn: expected a scalar.*reduce the loss"):
        loss_term(lambda o, t: value, None, None, 4, None)


def test_losses_are_summed_from_left_to_right():
    values = [1e16, 1.0, -1e16, 1.0]
    loss = step_loss(*((value, 1.0) for value in values))
    assert loss.value == (((values[0] + values[1]) + values[2]) + values[3]) / 4
    assert loss.weight.item() == 4.0


def test_microbatch_losses_show_the_non_finite_one():
    loss = step_loss((6.0, 3.0), (math.nan, 2.0), (0.0, 0.0), (math.inf, 0.0))
    assert math.isnan(loss.value)
    first, second, empty, infinite = loss.microbatch_losses
    assert (first, empty, infinite) == (2.0, 0.0, math.inf) and math.isnan(second)


def test_zero_weight_gives_zero_loss():
    assert step_loss((0.0, 0.0), (0.0, 0.0)).value == 0.0


def test_stored_loss_takes_the_memory_of_one_number():
    """`F.mse_loss` returns a scalar whose storage is as large as the output."""
    output = torch.zeros(64, 64, requires_grad=True)
    total = torch.nn.functional.mse_loss(output, torch.ones(64, 64), reduction="sum")
    stored = LossTerm(total, total.detach()).without_graph()
    noted = LayerReports(
        0, Reports({"extra": total}, {"metric": (total.detach(), 1.0)})
    ).without_graph()
    (added, weight) = noted.reports.metrics["metric"]
    for number in (stored.total, stored.weight, noted.reports.losses["extra"], added):
        assert number.item() == 4096 and number.grad_fn is None
        assert number.untyped_storage().nbytes() == number.element_size()
    assert weight == 1.0
