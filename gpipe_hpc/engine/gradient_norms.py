"""Norms of gradients: the global norm, and norms of parts for the gradient noise scale.

The global norm is one number with the same bits for every partition. For the noise scale, each
part's contribution to a stage's gradients is measured. A part is a micro-batch, or a copy of the
stage: the sum over the micro-batches of one replica on one route through its ranks. For a
micro-batch, the difference between the gradient sums before and after its backward is measured.
For a copy, its sum is measured before the reduction, which costs one pass over the gradients. Tied
parameters are left out: each rank has only a part of their gradient until ranks are summed.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from gpipe_hpc.comm.collectives.group import ControlGroup
from gpipe_hpc.device.deferred import AsyncHostTensor
from gpipe_hpc.device.device import Device
from gpipe_hpc.errors import ConfigError
from gpipe_hpc.schedule import Placement

MICROBATCHES: Final = "microbatches"
REPLICAS: Final = "replicas"
_LOW: Final = (torch.bfloat16, torch.float16)


class Norms(NamedTuple):
    """The norm of each parameter's gradient, over all stages; the same on every rank.

    Args:
        names: All parameters, in global order.
        values: float64[names] on the device, 0 for a parameter without a gradient.
        present: float64[names] on the host, above 0 for a parameter with a gradient.
        dtype: The model's widest, at least float32.
        device: Where gradients are.
    """

    names: Sequence[str]
    values: Tensor
    present: Tensor
    dtype: torch.dtype
    device: Device

    def total(self) -> Tensor:
        """Return the norm over all parameters with a gradient, in `dtype`, as torch computes it.

        Does not wait for the device.
        """
        is_counted = self.present > 0
        norms = self.values
        if not is_counted.all():
            # Not by a mask: the host would wait for the device to count its entries.
            runs = [self.values[run] for run in _runs(is_counted.tolist())]
            norms = torch.cat(runs) if runs else self.values[:0]
        combined: Tensor = torch.linalg.vector_norm(norms.to(self.dtype))
        return combined

    def square_without(self, left_out: Collection[str]) -> float:
        """Return the sum of squared norms of names not in `left_out`; waits for the device."""
        values: list[float] = self.device.to_host(self.values).tolist()
        pairs = zip(self.names, values, strict=True)
        return sum(value * value for name, value in pairs if name not in left_out)


def gather_norms(
    own: Mapping[str, nn.Parameter],
    counted: Collection[str],
    all_names: Sequence[str],
    group: ControlGroup,
    device: Device,
    dtype: torch.dtype = torch.float32,
) -> Norms:
    """Return the norms of single parameters, in global order; a collective call of a pipeline.

    One norm for each parameter, as `torch.nn.utils.clip_grad_norm_` computes them in one process: a
    norm of a bucket or stage would change the last bit with the partition. If several ranks hold
    parts of a parameter, the squares of their norms are added. Needs one all-reduce; with an
    accelerator one more, on the host.

    Args:
        own: This rank's parameters by global name.
        counted: Names of the gradients that this rank contributes: one of the ranks that hold the
            whole gradient does, and each rank that holds a part.
        all_names: All parameters of the model.
        group: The ranks of the pipeline, or all ranks if gradients are sharded.
        device: Where gradients are.
        dtype: The widest of the model's parameters, at least float32.
    """
    gradients = {n: p.grad for n, p in own.items() if p.grad is not None and n in counted}
    # The root of a number's square is the number again, to the bit, so nothing is lost if a place
    # has one contributor. float64 is wide enough for every stage's dtype.
    norms = _norms(list(gradients.values()))
    squares = stacked(norms).square().unbind() if norms else ()
    by_name = dict(zip(gradients, squares, strict=True))
    zero = torch.zeros((), dtype=torch.float64, device=device.torch)
    sums = torch.stack([zero, *(by_name.get(name, zero) for name in all_names)])[1:]
    present = torch.tensor([name in by_name for name in all_names], dtype=torch.float64)
    if device.is_accelerator:
        pending = group.start_all_reduce(sums)
        group.all_reduce(present)
        pending.wait()
    else:
        both = torch.cat([sums, present])
        group.all_reduce(both)
        sums, present = torch.split(both, len(all_names)) if all_names else (sums, present)
    return Norms(all_names, sums.sqrt(), present, dtype, device)


def clip_by_norm(own: Mapping[str, nn.Parameter], norms: Norms, max_norm: float) -> Tensor:
    """Scale the gradients of `own` in place so that the norm over all stages is at most max_norm.

    Return the norm before clipping, a scalar tensor.
    """
    total = norms.total()
    if max_norm < float("inf"):
        gradients = [p.grad for p in own.values() if p.grad is not None]
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        if norms.device.is_accelerator or factor != 1.0:  # on a device, asking would wait
            _scale(gradients, factor)
    return total


def _scale(gradients: list[Tensor], factor: Tensor) -> None:
    """Multiply gradients by a factor, in their own dtype."""
    for dtype in {gradient.dtype for gradient in gradients}:
        kind = [gradient for gradient in gradients if gradient.dtype == dtype]
        torch._foreach_mul_(kind, factor.to(dtype))


def norms_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the 2-norm of each tensor, in float32 for tensors of 16 bits, which may overflow."""
    low = [tensor for tensor in tensors if tensor.dtype in _LOW]
    if not low:
        return _norms(tensors)
    wide = iter(torch._foreach_norm(low, 2, torch.float32))
    own = iter(_norms([tensor for tensor in tensors if tensor.dtype not in _LOW]))
    return [next(wide if tensor.dtype in _LOW else own) for tensor in tensors]


def stacked(numbers: Sequence[Tensor]) -> Tensor:
    """Return one or more scalars as one tensor, float64[numbers], with few kernels."""
    kinds: dict[torch.dtype, list[int]] = {}
    for place, number in enumerate(numbers):
        kinds.setdefault(number.dtype, []).append(place)
    parts = [torch.stack([numbers[i] for i in places]).double() for places in kinds.values()]
    if len(parts) == 1:
        return parts[0]
    rows = {
        place: row
        for places, part in zip(kinds.values(), parts, strict=True)
        for place, row in zip(places, part.unbind(), strict=True)
    }
    return torch.stack([rows[place] for place in range(len(numbers))])


def _norms(gradients: Sequence[Tensor]) -> list[Tensor]:
    return list(torch._foreach_norm(list(gradients))) if gradients else []


def _runs(flags: Sequence[bool]) -> list[slice]:
    """Return slices of consecutive flags that are set."""
    found, start = [], 0
    for is_set, run in groupby(flags):
        stop = start + len(list(run))
        if is_set:
            found.append(slice(start, stop))
        start = stop
    return found


class MicrobatchSquaredNorms:
    """Measures the squared norm of each micro-batch's contribution to the stage's gradients.

    Keeps a copy of the gradients. A parameter may get one part of its gradient in I and the rest in
    W: the part of I is kept until W. Gradients that are reduced during the last backward are
    measured before their reduction, and counted when that backward ends.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._before: dict[nn.Parameter, Tensor] = {}
        # The gradient that was measured last, and its version, to detect changes.
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
        """Measure the gradients that a backward has just added; `is_last`: no W follows."""
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
        """Measure gradients that are complete on this rank, before the reduction changes them."""
        own = set(parameters)
        new = [p for p in self._parameters if p in own and self._is_new(p)]
        self._leaving |= zip(new, self._added(new), strict=True)
        self._left |= own

    def take(self) -> Mapping[int, Tensor]:
        """Return the squared norm, float64[], of each part by its first micro-batch."""
        assert not self._halves, f"no W has run for micro-batches {sorted(self._halves)}"
        assert not self._leaving, "counted at the end of the last backward"
        self._seen = {}
        return self._squares

    def _is_new(self, parameter: nn.Parameter) -> bool:
        gradient = parameter.grad
        if gradient is None or parameter in self._left:
            return False
        seen = self._seen.get(parameter)
        return seen is None or seen[0] is not gradient or seen[1] != gradient._version

    def _added(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """Return the negated gradients added since the last call, in memory that is reused."""
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


class CopySquaredNorms:
    """Measures the squared norm of the gradient sum of this copy of the stage."""

    def __init__(self, parameters: Iterable[nn.Parameter], first_microbatch: int) -> None:
        self._parameters = list(parameters)
        self._first = first_microbatch
        self._squares: dict[int, Tensor] = {}

    def begin(self) -> None:
        """Begin a step."""
        self._squares = {}

    def note(self, microbatch: int, *, is_last: bool) -> None:
        """Do nothing, as only the sum over all micro-batches is measured."""

    @torch.no_grad()
    def before_reduction(self, parameters: Iterable[nn.Parameter]) -> None:
        """Measure gradients that are complete on this rank, before the reduction changes them."""
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
    """Squared norms and weights of the parts of a step's gradient, the same on every rank.

    Attributes:
        squares: float64[global micro-batches]: the squared norm of a part's contribution to the
            gradient, at the part's first micro-batch.
        weights: float64[global micro-batches]: the weights of the loss.
        part_of: For each micro-batch the first micro-batch of its part.
        fetched: Both, float64[2, n], copied to the host; only reading them waits for the device.
    """

    squares: Tensor
    weights: Tensor
    part_of: tuple[int, ...]
    fetched: AsyncHostTensor

    @classmethod
    def of(
        cls, squares: Tensor, weights: Tensor, part_of: tuple[int, ...], device: Device
    ) -> "GradientParts":
        """Start copying both to the host."""
        return cls(
            squares, weights, part_of, AsyncHostTensor.of(torch.stack([squares, weights]), device)
        )

    def mean_square(self) -> tuple[float, int]:
        """Return the mean squared norm of the parts' own gradients, and their number.

        With g_i the mean gradient of part i and a_i its share of the weight, sum a_i |g_i|^2. The
        contribution of part i is a_i g_i. Parts of weight 0 do not count.
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

    `parts`: ``microbatches`` or ``replicas``; `placements`: that of each replica.

    Raises ConfigError for another value, for fewer than two parts, and if a rank holds a stage for
    several parts.
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
                f"noise_over={REPLICAS}: each copy of a stage must be on its own rank, but copies "
                f"of stage {shared[0]} share one; use noise_over={MICROBATCHES}"
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
            f"noise_over={parts}: gradients of at least two parts of a batch must be compared, got "
            f"one part; {remedy}"
        )
    return found


def _square(tensors: Sequence[Tensor]) -> Tensor:
    """Return the squared norm of all tensors together, float64[]."""
    return stacked(norms_of(tensors)).square().sum()


def _gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    found = [parameter.grad for parameter in parameters]
    return [gradient for gradient in found if gradient is not None]
