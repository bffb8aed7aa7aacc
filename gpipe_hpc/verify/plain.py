"""Reference training for `verify`: one layer and one micro-batch after another.

The reference uses only those properties of a layout that determine the order of summation and
state: which replica of a layer runs each micro-batch, and the order in which a rank accumulates
gradients. It imports nothing from the engine, except the function that finds the generators of a
layer. Notation: r is a replica, k a rank of the pipeline, m a micro-batch of one replica, M their
number, g = r M + m its index in the global batch; a strand (r, k) is one rank.
"""

import copy
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from gpipe_hpc.device.device import Device
from gpipe_hpc.engine import own_generators
from gpipe_hpc.models import (
    GENERATOR_LOCK,
    Layer,
    LayerSpec,
    Reports,
    build_layer,
    find_ties,
    global_name,
    microbatch_key,
    named_layer_parameters,
    replace_parameter,
    reporting,
    run_layer,
    skip_names,
    source_key,
    torch_loss,
)
from gpipe_hpc.pytree import Nest, map_tensors
from gpipe_hpc.schedule import Op, Schedule
from gpipe_hpc.settings import MicrobatchSplit
from gpipe_hpc.verify.statistics import PlainStatistics

Strand = tuple[int, int]
"""A rank, given as (replica, rank of its pipeline)."""

Watcher = Callable[[int, int, Nest], None]
"""Called with the index of a layer, the index of the global micro-batch, and the output."""

_LOW: Final = (torch.bfloat16, torch.float16)
AUTOCAST: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class PlainLayout:
    """Partition and schedules: the properties of a layout that determine sums and state."""

    schedules: tuple[Schedule, ...]
    counts: tuple[int, ...]

    @property
    def portions(self) -> MicrobatchSplit:
        """Return the division of the global micro-batches over replicas."""
        return MicrobatchSplit.of_counts(schedule.num_microbatches for schedule in self.schedules)

    @property
    def stage_of(self) -> list[int]:
        """Return the stage of each layer, in order of layers."""
        return [stage for stage, count in enumerate(self.counts) for _ in range(count)]

    def strand(self, stage: int, microbatch: int) -> Strand:
        """Return the rank, as (replica, rank), that runs a stage for a global micro-batch."""
        replica, own = self.portions.owner(microbatch)
        return replica, self.schedules[replica].placement.rank_of(stage, own)

    def strands(self, stage: int) -> list[Strand]:
        """Return all ranks, as (replica, rank), that hold a stage, sorted by world rank."""
        return [
            (replica, rank)
            for replica, schedule in enumerate(self.schedules)
            for rank in schedule.placement.holders(stage)
        ]

    def order(self, stage: int, strand: Strand) -> list[int]:
        """Return the global micro-batches in a rank's order of gradient accumulation."""
        replica, rank = strand
        row = self.schedules[replica].ranks[rank]
        split = {a.microbatch for a in row if a.op is Op.W and a.stage == stage}
        found = [
            a.microbatch
            for a in row
            if a.stage == stage
            and a.microbatch is not None
            and (a.op is Op.W or (a.op is Op.B and a.microbatch not in split))
        ]
        return [self.portions.of(replica)[m] for m in found]


@dataclass
class GradientSum:
    """Gradient of a parameter on one rank, accumulated in the order of the schedule."""

    order: Sequence[int]
    total: Tensor | None = None
    _next: int = 0
    _waiting: dict[int, Tensor | None] = field(default_factory=dict)

    def add(self, microbatch: int, gradient: Tensor | None) -> None:
        """Add the gradient of a micro-batch, after those that precede it in the schedule."""
        self._waiting[microbatch] = gradient
        while self._next < len(self.order) and self.order[self._next] in self._waiting:
            ready = self._waiting.pop(self.order[self._next])
            self._next += 1
            if ready is not None:
                self.total = ready.clone() if self.total is None else self.total.add_(ready)


@dataclass
class PlainStep:
    """Result of one step of plain training.

    Attributes:
        loss: loss of the step.
        microbatch_losses: loss of each global micro-batch.
        main: the part of the loss that the loss function returned.
        gradients: gradients before clipping, on the host; None if a parameter has none.
        in_order: gradients accumulated from the first micro-batch to the last.
        magnitudes: sums of absolute values, which bound the effect of the order of summation.
        is_skipped: whether float16 gradients overflowed.
    """

    loss: float
    microbatch_losses: list[float]
    main: float
    gradients: dict[str, Tensor | None]
    in_order: dict[str, Tensor]
    magnitudes: dict[str, Tensor]
    is_skipped: bool


class PlainTraining:
    """Training of the model in one process, with a copy of layer buffers for each rank.

    Parameters are shared by all copies. `layers` are LayerSpecs or modules; modules are copied.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        loss_fn: Callable[[Any, Any], Any],
        layout: PlainLayout,
        *,
        seed: int,
        precision: str,
        buffers: str,
        device: Device,
    ) -> None:
        self.layout, self.seed, self.steps_done = layout, seed, 0
        self._layers, self._loss_fn = layers, loss_fn
        self._precision, self._device, self._policy = precision, device, buffers
        self._stage_of = layout.stage_of
        self._copies: list[dict[Strand, nn.Module]] = [
            self._build(index, stage) for index, stage in enumerate(self._stage_of)
        ]
        self._tie()
        self.parameters = self._named_parameters()
        self._stage_of_parameter = self._stages_of_parameters()
        self._statistics = PlainStatistics(self._copies)

    def _build(self, index: int, stage: int) -> dict[Strand, nn.Module]:
        """Build a copy of a layer for each rank that holds it; all copies share parameters."""
        layer = self._layers[index]
        copies: dict[Strand, nn.Module] = {}
        first: nn.Module | None = None
        for strand in self.layout.strands(stage):
            source = layer if isinstance(layer, LayerSpec) else copy.deepcopy(layer)
            module = build_layer(source, index=index, seed=self.seed, device=self._device)
            if first is None:
                first = module
            for name, parameter in first.named_parameters():
                replace_parameter(module, name, parameter)
            copies[strand] = module
        return copies

    def _tie(self) -> None:
        for tie in find_ties(self._layers):
            layer, name = tie.places[0]
            first = dict(self._any(layer).named_parameters(remove_duplicate=False))[name]
            for index, other in tie.places[1:]:
                for module in self._copies[index].values():
                    replace_parameter(module, other, first)

    def _any(self, layer: int) -> nn.Module:
        return next(iter(self._copies[layer].values()))

    def _named_parameters(self) -> dict[str, nn.Parameter]:
        named: dict[str, nn.Parameter] = {}
        seen: set[int] = set()
        for index in range(len(self._layers)):
            for name, parameter in named_layer_parameters(index, self._any(index)):
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    named[name] = parameter
        return named

    def _stages_of_parameters(self) -> dict[str, int]:
        return {name: self._stage_of[int(name.split(".")[1])] for name in self.parameters}

    def named_buffers(self, strand: Strand) -> dict[str, Tensor]:
        """Return the buffers of the layers that a rank holds, by global name."""
        return {
            global_name(index, name): buffer
            for index, copies in enumerate(self._copies)
            if strand in copies
            for name, buffer in copies[strand].named_buffers()
        }

    def take_over(self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        """Set weights and buffers to the initial ones of a pipeline, given by global name."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(parameters[name])
            for strand in {strand for copies in self._copies for strand in copies}:
                for name, buffer in self.named_buffers(strand).items():
                    buffer.copy_(buffers[name])

    def train(
        self,
        pieces: Sequence[tuple[Nest, Nest, int]],
        scale: Tensor,
        watcher: Watcher | None = None,
    ) -> PlainStep:
        """Run forward and backward of every global micro-batch; leave gradients in `.grad`.

        Args:
            pieces: (inputs, targets, number of samples) of each global micro-batch, on the host.
            scale: initial gradient of backward, a power of two; gradients are divided by it at the
                end.
            watcher: called with the output of each layer.
        """
        self._statistics.begin()
        terms: list[_LossTerms] = []
        sums: dict[str, dict[Strand, GradientSum]] = self._sums()
        in_order: dict[str, Tensor] = {}
        magnitudes: dict[str, Tensor] = {}
        for g, (inputs, targets, size) in enumerate(pieces):
            for parameter in self.parameters.values():
                parameter.grad = None
            terms.append(_LossTerms())
            if size:
                with self._generators_restored():
                    terms[-1] = self._forward(g, inputs, targets, size, watcher)
                    terms[-1].backward(scale)
                terms[-1].roots.clear()
            for name, parameter in self.parameters.items():
                gradient = _dense(parameter.grad)
                strand = self.layout.strand(self._stage_of_parameter[name], g)
                sums[name][strand].add(g, gradient)
                if gradient is not None:
                    _accumulate(in_order, name, gradient)
                    _accumulate(magnitudes, name, gradient.abs())
        weight = 1.0 if self._is_sum else _sum_in_order(each.weight for each in terms)
        divisor = scale * weight if weight > 0 else torch.full_like(scale, torch.inf)
        gradients = {name: _sum_over_ranks(by_strand) for name, by_strand in sums.items()}
        for found in (gradients, in_order, magnitudes):
            for each in found.values():
                if each is not None:
                    _divide(each, divisor)
        is_skipped = self._overflowed(gradients)
        for name, parameter in self.parameters.items():
            given = gradients[name]
            parameter.grad = None if is_skipped or given is None else given.clone()
        self._statistics.finish(is_kept=not is_skipped)
        self._combine_buffers(pieces)
        self.steps_done += 1
        return PlainStep(
            *_loss(terms, weight, is_sum=self._is_sum),
            _sum_in_order(each.main for each in terms) / weight if weight else 0.0,
            {name: g if g is None else self._device.to_host(g) for name, g in gradients.items()},
            {name: self._device.to_host(each) for name, each in in_order.items()},
            {name: self._device.to_host(each) for name, each in magnitudes.items()},
            is_skipped=is_skipped,
        )

    def evaluate(
        self, pieces: Sequence[tuple[Nest, Nest, int]], watcher: Watcher | None = None
    ) -> float:
        """Return the loss of a global batch in evaluation mode."""
        terms: list[_LossTerms] = []
        with self._generators_restored(), self._evaluating(), torch.no_grad():
            for g, (inputs, targets, size) in enumerate(pieces):
                terms.append(
                    self._forward(g, inputs, targets, size, watcher) if size else _LossTerms()
                )
        weight = 1.0 if self._is_sum else _sum_in_order(each.weight for each in terms)
        return _loss(terms, weight, is_sum=self._is_sum)[0]

    def _forward(
        self, g: int, inputs: Nest, targets: Nest, size: int, watcher: Watcher | None
    ) -> "_LossTerms":
        bring = self._device.to_device
        # The first layer may modify its input in place.
        nest: Any = map_tensors(lambda tensor: bring(tensor.clone()), inputs)
        stashed: dict[str, Any] = {}
        with self._casting(), reporting(Reports()) as reports, self._statistics.collecting(g):
            for index, copies in enumerate(self._copies):
                module = copies[self.layout.strand(self._stage_of[index], g)]
                self._draw(g, index, module)
                names = skip_names(self._layers[index], f"layers.{index}")
                nest = run_layer(module, names, nest, stashed, f"layers.{index}")
                if watcher is not None:
                    watcher(index, g, nest)
            # Only losses are used; statistics that gpipe_hpc's layers report are discarded.
            further = dict(reports.take().losses)
            self._draw(g, len(self._layers), None)
            given = map_tensors(bring, targets)
            value = self._loss_fn(nest, given)
            further |= reports.take().losses
        known = torch_loss(self._loss_fn)
        weight = float(size if known is None else known.weight_of(given, size))
        return _LossTerms.of(value, weight, further, is_sum=self._is_sum)

    def whole_loss(self, outputs: Nest, targets: Nest) -> float | None:
        """Return the loss of a whole batch in one call; None if the loss draws random numbers."""
        loss_fn = self._loss_fn
        if isinstance(loss_fn, nn.Module):  # do not change its buffers
            loss_fn = copy.deepcopy(loss_fn)
        with self._generators_restored(), torch.no_grad(), self._casting(), reporting(Reports()):
            before = [generator.get_state() for generator in self._device.generators()]
            value = loss_fn(outputs, map_tensors(self._device.to_device, targets))
            after = [generator.get_state() for generator in self._device.generators()]
        if not all(map(torch.equal, before, after)):
            return None
        if isinstance(value, tuple):
            return float(value[0]) / float(value[1]) if value[1] else 0.0
        return float(value)

    @property
    def _is_sum(self) -> bool:
        known = torch_loss(self._loss_fn)
        return known is not None and known.reduction == "sum"

    def _draw(self, g: int, layer: int, module: nn.Module | None) -> None:
        """Seed the generators that a layer uses for a micro-batch, by the documented formula."""
        key = microbatch_key(self.seed, self.steps_done, g, layer)
        seed_generators(key, self._device, module)

    def _casting(self) -> Any:
        dtype = AUTOCAST.get(self._precision)
        return nullcontext() if dtype is None else torch.autocast(self._device.type, dtype)

    def _sums(self) -> dict[str, dict[Strand, GradientSum]]:
        orders = {
            (stage, strand): self.layout.order(stage, strand)
            for stage in set(self._stage_of)
            for strand in self.layout.strands(stage)
        }
        return {
            name: {
                strand: GradientSum(orders[stage, strand]) for strand in self.layout.strands(stage)
            }
            for name, stage in self._stage_of_parameter.items()
        }

    def _overflowed(self, gradients: Mapping[str, Tensor | None]) -> bool:
        if self._precision != "float16":
            return False
        return not all(bool(g.isfinite().all()) for g in gradients.values() if g is not None)

    @contextmanager
    def _generators_restored(self) -> Iterator[None]:
        """Context that restores the random generators of the process, which rank threads share."""
        with GENERATOR_LOCK:
            states = torch.get_rng_state(), random.getstate(), np.random.get_state()
            try:
                yield
            finally:
                torch.set_rng_state(states[0])
                random.setstate(states[1])
                np.random.set_state(states[2])

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        modules = [m for copies in self._copies for each in copies.values() for m in each.modules()]
        before = [module.training for module in modules]
        for module in modules:
            module.training = False
        try:
            yield
        finally:
            for module, was in zip(modules, before, strict=True):
                module.training = was

    def _combine_buffers(self, pieces: Sequence[tuple[Nest, Nest, int]]) -> None:
        """Combine the buffers of the copies of each layer after a step."""
        for index, copies in enumerate(self._copies):
            if len(copies) == 1:
                continue
            num_samples = dict.fromkeys(copies, 0)
            for g, (_, _, size) in enumerate(pieces):
                num_samples[self.layout.strand(self._stage_of[index], g)] += size
            pooled = self._statistics.pooled_buffers(index)
            modules = [copies[strand] for strand in sorted(copies)]
            weights = [num_samples[strand] for strand in sorted(copies)]
            unite(modules, weights, self._policy, pooled)


@dataclass
class _LossTerms:
    """Loss terms of one micro-batch: tensors to run backward from, their values, the weight."""

    roots: list[Tensor] = field(default_factory=list)
    main: float = 0.0
    further: dict[str, float] = field(default_factory=dict)
    weight: float = 0.0

    @classmethod
    def of(
        cls, value: Any, weight: float, further: Mapping[str, Tensor], *, is_sum: bool = False
    ) -> "_LossTerms":
        """Interpret a loss function's return value: a mean, a sum, or (sum, weight)."""
        if isinstance(value, tuple):
            pair = value[:2]
        elif is_sum:
            pair = value, weight
        else:  # a mean of weight 0 is NaN
            pair = (value.reshape(()) * weight if weight else torch.zeros(())), weight
        roots = [pair[0].reshape(()), *further.values()]
        values = {name: float(total.detach()) for name, total in further.items()}
        return cls(roots, float(pair[0].detach()), values, float(pair[1]))

    def backward(self, scale: Tensor) -> None:
        """Run backward from all losses at once with initial gradient `scale`."""
        roots = [root for root in self.roots if root.requires_grad]
        if roots:
            torch.autograd.backward(roots, [scale.to(root.device, root.dtype) for root in roots])


def seed_generators(key: int, device: Device, layer: nn.Module | None) -> None:
    """Seed all generators that a layer may use from its documented key."""
    random.seed(source_key(key, 0))
    number = source_key(key, 1)
    np.random.seed([number & 0xFFFFFFFF, number >> 32])
    for place, own in enumerate(own_generators(layer, ()) if layer is not None else ()):
        own.seed(source_key(key, 2 + place))
    for generator in device.generators():
        generator.manual_seed(key)


def unite(
    copies: Sequence[nn.Module], num_samples: Sequence[int], policy: str, left_out: frozenset[str]
) -> None:
    """Combine the buffers of the copies of a layer as `pipeline.buffers` requests (`policy`).

    `num_samples` is the number of samples of each copy in this step; buffers named in `left_out`
    are unchanged.
    """
    if policy == "each" or not any(num_samples):
        return
    named = [dict(each.named_buffers()) for each in copies]
    first = next(number for number, seen in enumerate(num_samples) if seen)
    for name, value in named[first].items():
        held = [each[name] for each in named]
        if name in left_out or all(torch.equal(value, other) for other in held):
            continue
        united = value.clone()
        if policy == "average" and (value.is_floating_point() or value.is_complex()):
            wide = torch.complex128 if value.is_complex() else torch.float64
            terms = [w * b.to(wide) for b, w in zip(held, num_samples, strict=True) if w]
            united = (torch.stack(terms).sum(0) / sum(num_samples)).to(value.dtype)
        for each in held:
            each.copy_(united)


def _loss(
    terms: Sequence[_LossTerms], weight: float, *, is_sum: bool = False
) -> tuple[float, list[float]]:
    """Return the loss of the step and that of each micro-batch, summed in global order."""
    main = _sum_in_order(each.main for each in terms)
    further: dict[str, float] = {}
    for each in terms:
        for name, value in each.further.items():
            further[name] = further.get(name, 0.0) + value
    total = main + _sum_in_order(further.values())
    sums = [(each.main + _sum_in_order(each.further.values()), each.weight) for each in terms]
    return (
        total / weight if weight else 0.0,
        [value / own if own and not is_sum else value for value, own in sums],
    )


def _sum_in_order(numbers: Iterable[float]) -> float:
    """Return the sum from left to right; from Python 3.12 on, `sum` compensates rounding errors."""
    total = 0.0
    for number in numbers:
        total += number
    return total


def _divide(gradient: Tensor, divisor: Tensor) -> None:
    """Divide in place by a float64 tensor on the host, with a single rounding.

    16-bit values are divided in float32. Division by a Python number on a GPU would multiply by the
    reciprocal, which rounds twice.
    """
    is_low = gradient.dtype in _LOW
    number = divisor.to(gradient.device, torch.float32 if is_low else gradient.dtype)
    gradient.copy_(gradient.float() / number if is_low else gradient / number)


def _sum_over_ranks(by_strand: Mapping[Strand, GradientSum]) -> Tensor | None:
    """Sum the gradients of all ranks, in order of world rank."""
    totals = [each.total for _, each in sorted(by_strand.items()) if each.total is not None]
    if not totals:
        return None
    united = totals[0].clone()
    for each in totals[1:]:
        united += each
    return united


def _accumulate(sums: dict[str, Tensor], name: str, gradient: Tensor) -> None:
    if name in sums:
        sums[name] += gradient
    else:
        sums[name] = gradient.clone()


def _dense(gradient: Tensor | None) -> Tensor | None:
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient
