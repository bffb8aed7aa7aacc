"""Squared norms of what each part of a global batch adds to a stage's gradients.

The gradient noise scale is estimated from them. Parts are micro-batches, or copies of a stage: what
the micro-batches of one replica, on one route through its ranks, add together. For a micro-batch, a
copy of the sums is kept, and the difference that its backward makes is measured. For a copy, its
sum is measured before the reduction, which costs one pass over it. Tied parameters are left out:
ranks hold parts of one gradient, whose norm is not known before they are summed.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor, nn

from gpipe_hpc.device.deferred import AsyncHostCopy
from gpipe_hpc.device.device import Device
from gpipe_hpc.engine.sums.norms import norms_of, stacked
from gpipe_hpc.errors import ConfigError
from gpipe_hpc.schedule import Placement

MICROBATCHES: Final = "microbatches"
REPLICAS: Final = "replicas"


class Squares(Protocol):
    """Measures the parts of one stage's gradients during a step."""

    def begin(self) -> None:
        """Begin a step, whose gradients are zero or None."""

    def note(self, microbatch: int, *, is_last: bool) -> None:
        """Measure what a backward has just added; `is_last`: no W of the micro-batch follows."""

    def before_reduction(self, parameters: Iterable[nn.Parameter]) -> None:
        """Measure sums that are complete on this rank, before the reduction overwrites them."""

    def take(self) -> Mapping[int, Tensor]:
        """Return the squared norm, float64[], of each part by its first micro-batch."""


class MicrobatchSquares:
    """Measures micro-batches, by a copy of the stage's gradients.

    A parameter may get a part of its gradient in I and the rest in W: what came in I is kept until
    W. What is reduced during the last backward is measured before its reduction, and counted when
    that backward ends.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._before: dict[nn.Parameter, Tensor] = {}
        # The gradient that was measured last, and its version then: which have changed since?
        self._seen: dict[nn.Parameter, tuple[Tensor, int]] = {}
        self._begun: set[nn.Parameter] = set()
        self._left: set[nn.Parameter] = set()
        self._leaving: dict[nn.Parameter, Tensor] = {}
        self._halves: dict[int, dict[nn.Parameter, Tensor]] = {}
        self._squares: dict[int, Tensor] = {}

    def begin(self) -> None:
        """Begin a step, whose gradients are zero or None."""
        self._begun.clear()
        self._left.clear()
        self._leaving.clear()
        self._halves.clear()
        self._squares = {}
        self._seen = {p: (p.grad, p.grad._version) for p in self._parameters if p.grad is not None}

    @torch.no_grad()
    def note(self, microbatch: int, *, is_last: bool) -> None:
        """Measure what a backward has just added; `is_last`: no W of the micro-batch follows."""
        new = [parameter for parameter in self._parameters if self._is_new(parameter)]
        added = dict(zip(new, self._added(new), strict=True)) | self._leaving
        self._leaving = {}
        for parameter, half in self._halves.pop(microbatch, {}).items():
            added[parameter] = added[parameter] + half if parameter in added else half
        if not is_last:
            self._halves[microbatch] = {p: each.clone() for p, each in added.items()}
        elif added:
            self._squares[microbatch] = _square(list(added.values()))
        if new:
            torch._foreach_copy_([self._before[p] for p in new], _gradients(new))

    @torch.no_grad()
    def before_reduction(self, parameters: Iterable[nn.Parameter]) -> None:
        """Measure sums that are complete on this rank, before the reduction overwrites them."""
        own = set(parameters)
        new = [p for p in self._parameters if p in own and self._is_new(p)]
        self._leaving |= zip(new, self._added(new), strict=True)
        self._left |= own

    def take(self) -> Mapping[int, Tensor]:
        """Return the squared norm, float64[], of each part by its first micro-batch."""
        assert not self._halves, f"no W came for micro-batches {sorted(self._halves)}"
        assert not self._leaving, "what left within a backward was counted at its end"
        self._seen = {}
        return self._squares

    def _is_new(self, parameter: nn.Parameter) -> bool:
        gradient = parameter.grad
        if gradient is None or parameter in self._left:
            return False
        seen = self._seen.get(parameter)
        return seen is None or seen[0] is not gradient or seen[1] != gradient._version

    def _added(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """Return the negative of what was added since, in memory that is reused."""
        gradients = _gradients(parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            self._seen[parameter] = gradient, gradient._version
            if parameter not in self._before:
                self._before[parameter] = torch.zeros_like(gradient)
            elif parameter not in self._begun:
                self._before[parameter].zero_()
        self._begun.update(parameters)
        before = [self._before[parameter] for parameter in parameters]
        if before:
            torch._foreach_sub_(before, gradients)
        return before


class CopySquares:
    """Measures copies of the stage; that of this rank is named by its first micro-batch."""

    def __init__(self, parameters: Iterable[nn.Parameter], first_microbatch: int) -> None:
        self._parameters = list(parameters)
        self._first = first_microbatch
        self._squares: dict[int, Tensor] = {}

    def begin(self) -> None:
        """Begin a step."""
        self._squares = {}

    def note(self, microbatch: int, *, is_last: bool) -> None:
        """Do nothing: the whole sum is measured."""

    @torch.no_grad()
    def before_reduction(self, parameters: Iterable[nn.Parameter]) -> None:
        """Measure sums that are complete on this rank, before the reduction overwrites them."""
        own = set(parameters)
        present = [p for p in self._parameters if p in own and p.grad is not None]
        if present:
            known, square = self._squares.get(self._first), _square(_gradients(present))
            self._squares[self._first] = square if known is None else known + square

    def take(self) -> Mapping[int, Tensor]:
        """Return the squared norm, float64[], of each part by its first micro-batch."""
        return self._squares


@dataclass(frozen=True)
class GradientParts:
    """How much the gradients of a step's parts differ; the same on every rank.

    `squares`, `weights`: float64[replicas x micro-batches], by global micro-batch: the squared norm
    of what a part has added to the gradient, at the part's first micro-batch, and the weights of
    the loss. `part_of`: the first micro-batch of each one's part. `fetched`: both, float64[2, n],
    on their way to the host: reading waits for the device, nothing before does.
    """

    squares: Tensor
    weights: Tensor
    part_of: tuple[int, ...]
    fetched: AsyncHostCopy

    @classmethod
    def of(
        cls, squares: Tensor, weights: Tensor, part_of: tuple[int, ...], device: Device
    ) -> "GradientParts":
        """Return them, on their way to the host."""
        return cls(
            squares, weights, part_of, AsyncHostCopy.of(torch.stack([squares, weights]), device)
        )

    def mean_square(self) -> tuple[float, int]:
        """Return the mean squared norm of the parts' own gradients, and their number.

        With g_i the mean gradient of part i and a_i its share of the weight, sum a_i |g_i|^2. What
        it has added is a_i g_i. Parts of weight 0 are none.
        """
        squares, weights = self.fetched.read().tolist()
        shares: dict[int, float] = defaultdict(float)
        for part, weight in zip(self.part_of, weights, strict=True):
            shares[part] += weight
        total = sum(shares.values())
        used = {part: weight / total for part, weight in shares.items() if weight > 0}
        return sum(squares[part] / share for part, share in used.items()), len(used)


def parts_of(parts: str, placements: Sequence[Placement]) -> tuple[int, ...]:
    """Return the first global micro-batch of the part that each one belongs to.

    `parts`: microbatches or replicas; `placements`: of each replica. ConfigError if there are fewer
    than two parts, ranks that hold a stage for several of them, or another word.
    """
    counts = [placement.num_microbatches for placement in placements]
    if parts == MICROBATCHES:
        found = tuple(range(sum(counts)))
    elif parts == REPLICAS:
        shared = [
            stage
            for placement in placements
            for stage in range(placement.num_stages)
            if len(placement.holders(stage)) < len(set(placement.route_of))
        ]
        if shared:
            raise ConfigError(
                f"noise_over={REPLICAS}: expected a rank of its own for each copy of a stage, got "
                f"copies of stage {shared[0]} that share one; use noise_over={MICROBATCHES}"
            )
        found = tuple(
            sum(counts[:replica]) + placement.route_of.index(route)
            for replica, placement in enumerate(placements)
            for route in placement.route_of
        )
    else:
        raise ConfigError(
            f"noise_over: expected {MICROBATCHES} or {REPLICAS}, got {parts!r}; choose one"
        )
    if len(set(found)) < 2:
        remedy = (
            "use more micro-batches"
            if parts == MICROBATCHES
            else f"use noise_over={MICROBATCHES}, or more replicas"
        )
        raise ConfigError(
            f"noise_over={parts}: expected at least two parts of a batch, whose gradients are "
            f"compared, got one; {remedy}"
        )
    return found


def squares_of(
    parts: str, parameters: Iterable[nn.Parameter], microbatches: Sequence[int]
) -> Squares:
    """Return what measures the parts on a stage whose copy here runs these `microbatches`."""
    if parts == MICROBATCHES:
        return MicrobatchSquares(parameters)
    return CopySquares(parameters, min(microbatches, default=0))


def _square(tensors: Sequence[Tensor]) -> Tensor:
    """Return the squared norm of all together, float64[]."""
    return stacked(norms_of(tensors)).square().sum()


def _gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    found = [parameter.grad for parameter in parameters]
    return [gradient for gradient in found if gradient is not None]
