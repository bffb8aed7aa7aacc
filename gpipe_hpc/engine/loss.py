"""The loss of one micro-batch, and the gradient that its backward starts from."""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from numbers import Real
from typing import Any, Final, NamedTuple, TypeVar

import torch

from gpipe_hpc.device.deferred import AsyncHostTensor
from gpipe_hpc.device.device import Device
from gpipe_hpc.errors import ModelError
from gpipe_hpc.models import LossFunction, Reductions, Reports, TorchLoss, add_metric
from gpipe_hpc.pytree import Nest, tensors_of

log = logging.getLogger("gpipe_hpc.pipeline")

_LOW: Final = (torch.bfloat16, torch.float16)
# The exponent bits of float64, and the sum of those of 2 ** n and of 2 ** -(n + 1).
_EXPONENT: Final = 0x7FF << 52
_MIRROR: Final = (2 * 1023 - 1) << 52


Number = TypeVar("Number", torch.Tensor, torch.Tensor | float)


class LossTerm(NamedTuple):
    """The loss of one micro-batch.

    Args:
        total: The sum over the samples of the micro-batch, a scalar.
        weight: The divisor; summed over all micro-batches, it divides the sum of all totals.
        is_sum: The loss of a batch is the sum itself; `weight` is the number of samples.
    """

    total: torch.Tensor
    weight: torch.Tensor | float
    is_sum: bool = False

    def without_graph(self) -> "LossTerm":
        """Return the same numbers, detached and copied."""
        return LossTerm(_copied(self.total), _copied(self.weight), self.is_sum)


class LayerReports(NamedTuple):
    """Losses and metrics that one layer added in one micro-batch.

    `layer` is the global index of the layer; the loss function has the index after the last layer.
    """

    layer: int
    reports: Reports

    def without_graph(self) -> "LayerReports":
        """Return the same numbers, detached and copied."""
        losses = {name: _copied(total) for name, total in self.reports.losses.items()}
        metrics = {name: (_copied(s), _copied(w)) for name, (s, w) in self.reports.metrics.items()}
        return LayerReports(self.layer, replace(self.reports, losses=losses, metrics=metrics))


def _copied(number: Number) -> Number:
    """Return a detached copy of a scalar tensor; a number as it is.

    The result of `F.mse_loss` holds memory as large as the whole output, which would stay allocated
    for each micro-batch until the end of the step.
    """
    return number.detach().clone() if isinstance(number, torch.Tensor) else number


def loss_term(
    function: LossFunction,
    output: Nest,
    target: Nest,
    num_samples: int,
    known: TorchLoss | None,
    watch: Reductions | None = None,
) -> LossTerm:
    """Call the loss function on one micro-batch of `num_samples` samples, and add its metrics.

    `known` is the result of `torch_loss` for the function. The call runs within `watch` if given.
    Raises ModelError if the function returns neither a scalar nor a pair (sum, weight) of scalars.
    """
    if watch is None:
        value = function(output, target)
    else:
        with watch:
            value = function(output, target)
        watch.is_pair = isinstance(value, tuple) and len(value) > 1
        watch.result = value[0] if watch.is_pair else value
    if isinstance(value, tuple) and len(value) == 3 and isinstance(value[2], Mapping):
        _report(value[2], num_samples)
        value = value[:2]
    if isinstance(value, tuple) and len(value) == 2:
        total, weight = value
        if isinstance(total, torch.Tensor) and total.numel() == 1:
            if not isinstance(weight, float):
                _check_weight(weight)
            return LossTerm(_scalar(total), weight)
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        raise ModelError(
            f"loss_fn: expected a scalar tensor (the mean over the micro-batch) or a pair "
            f"(sum, weight) of scalars, got {_shown(value)}; reduce the loss to one number"
        )
    value = _scalar(value)
    if known is None:
        return LossTerm(value * num_samples, float(num_samples))
    if known.reduction == "sum":
        return LossTerm(value, float(num_samples), is_sum=True)
    if known.ignore_index is None:
        return LossTerm(value * num_samples, float(num_samples))
    weight = known.weight_of(target, num_samples)
    if not isinstance(weight, torch.Tensor):
        return LossTerm(value * num_samples, weight)
    return LossTerm(_weighted(value, weight), weight)


class LossWatch:
    """Logs a warning in the first steps if a loss function does not reduce as expected.

    It detects a scalar that is a sum, or a mean over a number of targets that differs between
    samples, and a pair whose first value is a mean. `where` names the loss in the warning.
    """

    def __init__(self, device: Device, where: str) -> None:
        self._device, self._where = device, where
        self._shares: list[tuple[float, ...]] = []
        # Checks of the last step whose numbers are still being copied from a device.
        self._waiting: list[tuple[Callable[[AsyncHostTensor], None], AsyncHostTensor]] = []
        self._has_warned = False

    def begin(self) -> None:
        """Begin a step: run the checks of the last step that waited for numbers from a device."""
        waiting, self._waiting = self._waiting, []
        for take_in, numbers in waiting:
            take_in(numbers)

    def note(self, found: Reductions, term: LossTerm, num_samples: int, *, is_cut: bool) -> None:
        """Check the loss of one micro-batch; `is_cut`: the batch has several micro-batches."""
        weight, is_pair = term.weight, found.is_pair
        if self._has_warned:
            return
        if is_pair and found.num_means:
            weight = torch.as_tensor(weight, dtype=torch.float64)
            self._take(partial(self._take_in_weight, found.num_means), weight)
        elif is_cut and not is_pair and found.is_sum:
            self._warn(
                "returns a sum over the samples of a micro-batch, but a single number is taken as "
                "their mean: loss and gradients are divided by the number of micro-batches. Return "
                "(sum, weight), for example (loss, len(target)), or pass a loss of torch, for "
                "example torch.nn.CrossEntropyLoss(reduction='sum')"
            )
        elif is_cut and found.counted and weight == num_samples:
            self._take(self._take_in_shares, torch.stack(found.counted) / num_samples)

    def _take(self, take_in: Callable[[AsyncHostTensor], None], numbers: torch.Tensor) -> None:
        fetched = AsyncHostTensor.of(numbers, self._device)
        if fetched.event is None:
            take_in(fetched)
        else:
            self._waiting.append((take_in, fetched))

    def _take_in_weight(self, num_means: int, fetched: AsyncHostTensor) -> None:
        weight = float(fetched.read())
        # As many means as the weight counts: each is of one sample, so their sum is a sum.
        is_sum_over_samples = weight > 1 and num_means % weight == 0
        if weight != 1 and not is_sum_over_samples:
            self._warn(
                f"returns a mean and {weight:.6g}, but two values are taken as (sum, weight): the "
                f"sum of the first values is divided by the sum of the second ones. Return only "
                f"the mean, or (sum, weight); metrics are the third value: (sum, weight, "
                f"{{'accuracy': (num_right, num_samples)}})"
            )

    def _take_in_shares(self, fetched: AsyncHostTensor) -> None:
        shares = tuple(fetched.read().tolist())
        self._shares.append(shares)
        first = self._shares[0]
        if len(first) != len(shares) or not all(map(math.isclose, first, shares)):
            self._warn(
                "returns a mean over targets that count, but their number per sample differs "
                "between micro-batches (ignored targets or class weights), so the loss depends on "
                "the number of micro-batches. Return (sum, weight), or pass a loss of torch, for "
                "example torch.nn.CrossEntropyLoss(...)"
            )

    def _warn(self, what: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning("%s %s", self._where, what)


def _scalar(number: torch.Tensor) -> torch.Tensor:
    """Return a one-element tensor as a scalar; adds no autograd node if it is one already."""
    return number.reshape(()) if number.dim() else number


def _weighted(mean: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return a mean times its weight, or 0 if the weight is 0, as the mean over nothing is NaN.

    The bits are the same as with a weight on the host, which is not rounded to 16 bits either.
    """
    wide = mean.float() if mean.dtype in _LOW else mean
    product = (wide * weight.to(wide)).to(mean.dtype)
    return torch.where(weight > 0, product, torch.zeros_like(product))


def _report(metrics: Mapping[str, Any], num_samples: int) -> None:
    for name, metric in metrics.items():
        numbers = metric if isinstance(metric, tuple) and len(metric) == 2 else (metric,)
        if not all(isinstance(each, torch.Tensor | Real) for each in numbers):
            raise ModelError(
                f"loss_fn: expected the metric {name!r} to be a mean or a pair (sum, weight), got "
                f"{_shown(metric)}; return numbers or tensors of one number"
            )
        pair = numbers if len(numbers) == 2 else (numbers[0] * num_samples, num_samples)
        add_metric(name, *pair)


def _check_weight(weight: object) -> None:
    """Raise ModelError if the second value of a pair is not a valid weight."""
    if isinstance(weight, Real):
        return
    if not isinstance(weight, torch.Tensor) or weight.numel() != 1 or weight.is_complex():
        raise ModelError(
            f"loss_fn: expected a pair (sum, weight) of scalars, got {_shown(weight)} as the "
            f"weight; return the loss alone, or metrics in a dict as the third value: "
            f"(sum, weight, {{'accuracy': (num_right, num_samples)}})"
        )
    if weight.requires_grad:
        raise ModelError(
            "loss_fn: the weight of a pair (sum, weight) requires a gradient, which would be lost; "
            "return the sum of several losses as one scalar, or detach() a weight that is constant"
        )


def _shown(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple):
        return f"a tuple of {', '.join(type(each).__name__ for each in value)}"
    return type(value).__name__


def refuse_negative_weight(weight: float) -> None:
    """Raise ModelError for a loss weight below 0."""
    if weight < 0:
        raise ModelError(
            f"loss_fn: the weight of the whole batch must be 0 or more, got {weight:.6g}; return "
            f"(-sum, -weight)"
        )


def has_graph(output: Nest) -> bool:
    """Return whether a tensor of an output requires a gradient."""
    return any(each.requires_grad for each in tensors_of(output))


def refuse_constant(value: float) -> None:
    """Raise ModelError for a loss without a graph.

    A loss of 0 may be a constant: a micro-batch may have no targets that count.
    """
    if value != 0:
        raise ModelError(
            f"loss_fn: the loss {value:.6g} has no graph to the model's output, so nothing would "
            f"be trained; remove detach(), item(), torch.tensor(...) or no_grad() from loss_fn (if "
            f"only losses that layers add are to be trained, return 0)"
        )


def backward_seed(weight: torch.Tensor, *, is_on_host: bool = False) -> torch.Tensor:
    """Return the gradient that a backward starts from: a power of two near 1/weight, float64[].

    The weight of the step is known only after all forwards, so that of the last step is used.
    Multiplying by a power of two is exact and changes no bit of the final gradients; it keeps
    gradients of half precision in range. Weight 0 counts as 1.
    """
    if is_on_host:  # the same number, with fewer calls of torch
        known = float(weight)
        exponent = math.frexp(known)[1] if 0 < known < 2.0**1022 else 1
        return torch.tensor(math.ldexp(1.0, -max(exponent, -1022)), dtype=torch.float64)
    is_weight = (weight > 0) & (weight < 2.0**1022)
    return power_near_inverse(torch.where(is_weight, weight, 1.0))


def power_near_inverse(number: torch.Tensor) -> torch.Tensor:
    """Return the power of two whose product with a number is at least 1/2 and below 1, float64.

    Computed from the bits of float64, so it is exact on every device: `torch.ldexp` multiplies by
    `torch.pow(2, n)` in float32, which a device may round. Numbers must be float64, positive and
    finite.
    """
    return (_MIRROR - (number.view(torch.int64) & _EXPONENT)).view(torch.float64)


def final_divisor(weight: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
    """Return the divisor of accumulated gradients; infinite if the weight is 0."""
    return torch.where(weight > 0, weight * seed, torch.full_like(weight, torch.inf))
