"""The loss of a step: summed over micro-batches and replicas, divided once by the weight."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from gpipe_hpc.comm.group import Group
from gpipe_hpc.comm.nests import Nest
from gpipe_hpc.errors import ModelError

LossFunction = Callable[[Any, Any], Any]
"""Takes (output, target) of a micro-batch; returns the mean over its samples, or (sum, weight)."""


class LossTerm(NamedTuple):
    """What one micro-batch adds: the sum of its losses, and the weight it is to be divided by."""

    total: torch.Tensor
    weight: torch.Tensor | float


def loss_term(function: LossFunction, output: Nest, target: Nest, num_samples: int) -> LossTerm:
    """Call the loss function on one micro-batch of `num_samples` samples.

    Raises ModelError if it returns neither a scalar nor a pair (sum, weight) of scalars.
    """
    value = function(output, target)
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


@dataclass(frozen=True)
class StepLoss:
    """The loss of a global batch; the same on every rank.

    `terms` is float64[2, replicas x micro-batches]: sums and weights in global order. Reading
    a property waits for the device; nothing before that does.
    """

    terms: torch.Tensor

    @classmethod
    def exchange(
        cls,
        own: Mapping[int, LossTerm],
        num_global: int,
        group: Group,
        device: torch.device,
    ) -> "StepLoss":
        """Put the terms of all replicas together; `own` maps global micro-batches to terms.

        Each place has one contributor and zeros from everybody else, so the sum is exact.
        """
        terms = torch.zeros(2, num_global, dtype=torch.float64, device=device)
        for index, term in own.items():
            terms[0, index] = term.total
            terms[1, index] = term.weight
        group.all_reduce(terms)
        return cls(terms)

    @property
    def weight(self) -> torch.Tensor:
        """Return the global weight, float64[] on the device."""
        # cumsum adds from left to right: the global order, whatever the layout.
        return self.terms[1].cumsum(0)[-1]

    @cached_property
    def value(self) -> float:
        """Return the loss over the global batch: sum / weight, 0 if the weight is 0."""
        total, weight = self.terms.cumsum(1)[:, -1].tolist()
        return total / weight if weight != 0 else 0.0

    @cached_property
    def microbatch_losses(self) -> list[float]:
        """Return the loss of each global micro-batch; NaN shows whose is NaN."""
        sums, weights = self.terms.tolist()
        return [s / w if w != 0 else s for s, w in zip(sums, weights, strict=True)]


@dataclass(frozen=True)
class StepResult:
    """What a step or an evaluation gave; the same on every rank."""

    _loss: StepLoss

    @property
    def loss(self) -> float:
        """Return the loss over the global batch: summed, divided once by the global weight."""
        return self._loss.value

    @property
    def weight(self) -> float:
        """Return what the sum was divided by: samples, or tokens not ignored."""
        return float(self._loss.weight)

    @property
    def microbatch_losses(self) -> list[float]:
        """Return the loss of each global micro-batch."""
        return self._loss.microbatch_losses


def backward_seed(weight: torch.Tensor) -> torch.Tensor:
    """Return the power of two near 1/weight that backward starts from, float64[].

    Multiplying by it is exact, so it changes no bit of the final gradients; it keeps those of
    half precision in range before the weight of the step is known. Weight 0 counts as 1.
    """
    _, exponent = torch.frexp(torch.where(weight > 0, weight, torch.ones_like(weight)))
    return torch.ldexp(torch.ones_like(weight), -exponent)


def final_divisor(weight: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
    """Return what accumulated gradients are divided by at the end; infinite if weight is 0."""
    return torch.where(weight > 0, weight * seed, torch.full_like(weight, torch.inf))
