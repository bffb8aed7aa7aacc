"""What a micro-batch adds to the loss, and how backward starts before its weight is known."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from gpipe_hpc.comm.nests import Nest, tensors_of
from gpipe_hpc.engine.sums.powers import power_near_inverse
from gpipe_hpc.errors import ModelError
from gpipe_hpc.models import Reports, add_metric

LossFunction = Callable[[Any, Any], Any]
"""Takes (output, target) of a micro-batch; returns the mean over its samples, or (sum, weight).

As a third value it may return metrics: a dict of name -> (sum, weight), or of name -> a mean.
"""


class LossTerm(NamedTuple):
    """What one micro-batch adds: the sum of its losses, and the weight it is to be divided by."""

    total: torch.Tensor
    weight: torch.Tensor | float

    def without_graph(self) -> "LossTerm":
        """Return the same numbers, held by no graph."""
        return LossTerm(alone(self.total), _alone(self.weight))


class Noted(NamedTuple):
    """What one layer, by its global index, reported of one micro-batch.

    The loss function counts as the layer behind the last.
    """

    layer: int
    reports: Reports

    def without_graph(self) -> "Noted":
        """Return the same numbers, held by no graph."""
        losses = {name: alone(total) for name, total in self.reports.losses.items()}
        metrics = {name: (_alone(s), _alone(w)) for name, (s, w) in self.reports.metrics.items()}
        return Noted(self.layer, replace(self.reports, losses=losses, metrics=metrics))


def alone(number: torch.Tensor) -> torch.Tensor:
    """Return a number without its graph, in memory of its own.

    `F.mse_loss` returns one that holds as much as the whole output; until the step ends that
    would be as much for each micro-batch.
    """
    return number.detach().clone()


def _alone(number: torch.Tensor | float) -> torch.Tensor | float:
    return alone(number) if isinstance(number, torch.Tensor) else number


def loss_term(function: LossFunction, output: Nest, target: Nest, num_samples: int) -> LossTerm:
    """Call the loss function on one micro-batch of `num_samples` samples; report its metrics.

    Raises ModelError if it returns neither a scalar nor a pair (sum, weight) of scalars.
    """
    value = function(output, target)
    if isinstance(value, tuple) and len(value) == 3 and isinstance(value[2], Mapping):
        for name, metric in value[2].items():
            pair = metric if isinstance(metric, tuple) else (metric * num_samples, num_samples)
            add_metric(name, *pair)
        value = value[:2]
    term = LossTerm(*value) if isinstance(value, tuple) and len(value) == 2 else None
    if term is None and isinstance(value, torch.Tensor) and value.numel() == 1:
        term = LossTerm(value.reshape(()) * num_samples, float(num_samples))
    if term is None or not isinstance(term.total, torch.Tensor) or term.total.numel() != 1:
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise ModelError(
            f"loss_fn: expected a scalar tensor (the mean over the micro-batch) or a pair "
            f"(sum, weight) of scalars, got {shape}; reduce the loss to one number"
        )
    return LossTerm(term.total.reshape(()), term.weight)


def has_lost_graph(term: LossTerm, output: Nest) -> bool:
    """Say whether a loss has no graph though an output has one."""
    if term.total.requires_grad or not torch.is_grad_enabled():  # none is wanted of what runs again
        return False
    return any(each.requires_grad for each in tensors_of(output))


def refuse_constant(value: float) -> None:
    """Raise ModelError for a loss without a graph.

    A loss of 0 may be a constant: of a micro-batch with nothing to learn from.
    """
    if value != 0:
        raise ModelError(
            f"loss_fn: expected a loss that autograd can follow to the model's output, got "
            f"{value:.6g} without a graph, so that nothing would be trained; take detach(), "
            f"item(), torch.tensor(...) or no_grad() out of it (return 0 where the losses that "
            f"layers add are all there is)"
        )


def backward_seed(weight: torch.Tensor) -> torch.Tensor:
    """Return the power of two near 1/weight that backward starts from, float64[].

    Multiplying by it is exact, so it changes no bit of the final gradients; it keeps those of
    half precision in range before the weight of the step is known. Weight 0 counts as 1.
    """
    is_weight = (weight > 0) & (weight < 2.0**1022)
    return power_near_inverse(torch.where(is_weight, weight, 1.0))


def final_divisor(weight: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
    """Return what accumulated gradients are divided by at the end; infinite if weight is 0."""
    return torch.where(weight > 0, weight * seed, torch.full_like(weight, torch.inf))
