"""Measure what each layer costs on the device and micro-batch at hand."""

import copy
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass, field
from functools import partial
from statistics import fmean
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from gpipe_hpc.comm.device import Device, HostDevice
from gpipe_hpc.comm.nests import map_tensors, tensors_of
from gpipe_hpc.engine.backward.splitting import Deferred, DeferWeights
from gpipe_hpc.engine.remedies import with_remedy
from gpipe_hpc.engine.state.sources import process_generators_kept
from gpipe_hpc.errors import ModelError, words_of
from gpipe_hpc.models import (
    Layer,
    LayerSpec,
    build_layer,
    init_key,
    run_layer,
    seeded_generators,
)
from gpipe_hpc.planning.costs.caches import Caches
from gpipe_hpc.planning.costs.clock import Clock
from gpipe_hpc.planning.costs.walk import Passed, Visit, described, walk

log = logging.getLogger("gpipe_hpc.pipeline")

LossFunction = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class LayerCost:
    """What one layer costs for one micro-batch; seconds are as in a step, see `measure_layers`.

    ``forward_s`` and ``backward_s`` are seconds without recomputation, ``input_s`` and ``weight_s``
    those of a backward that is split in two, ``bare_forward_s`` those of a forward that keeps
    nothing for a backward. Bytes are counted, not measured: see `LayerCount`.
    """

    forward_s: float
    backward_s: float
    input_s: float
    weight_s: float
    bare_forward_s: float

    @property
    def total_s(self) -> float:
        """Return the seconds of forward plus backward."""
        return self.forward_s + self.backward_s


def measure_layers(
    layers: Sequence[Layer],
    example_inputs: Any,
    example_targets: Any = None,
    loss_fn: LossFunction | None = None,
    *,
    seed: int = 0,
    device: Device | None = None,
    repetitions: int = 2,
    warmup: int = 1,
    rounds: int = 3,
    budget_s: float = 10.0,
    clock: Clock | None = None,
) -> list[LayerCost]:
    """Return the cost of every layer, each run alone on one micro-batch.

    How much one layer costs beside another is told by the least of each one's times: other work on
    the machine moves these least. But a step is a sum of usual times, 12 to 23 % longer than the
    least ones on two shared cores. So all costs are multiplied by one factor: how much longer than
    their least times all layers took together, on average. A time above 1.5 times the least is left
    out of that average, as other work had the machine.

    On an accelerator these are the device's own times. With small layers the host takes longer to
    order the work than the device to do it. Then each part costs the longer of the two; see
    `_Ordering`.

    All layers are measured in turn, then all again, so that other work on the machine disturbs
    none more than another. After `rounds` rounds that agree it is done. Else there are as many
    more, and at most ten for layers whose best times did not come again in another round, until
    they do or `budget_s` seconds have passed since the start. What is uncertain even then is told
    in the log.

    One layer at a time is built (`build_layer` with ``seed``) and dropped again; its inputs stay
    from round to round. Equal specs whose inputs have equal structure are measured once. Without
    ``loss_fn`` the last layer's backward starts from ones; with it the loss counts for the last
    layer. ``example_inputs`` is any nest of tensors. Modules that come built are copied, so neither
    their buffers nor their gradients change, and random states are left as they were. Purely
    local: no communication.

    Raises `ModelError`, naming the layer, when it does not run on what the layer before gives.
    """
    target = device or HostDevice()
    bench = _Bench(
        seed, target, repetitions, warmup, clock or Clock(), Caches(not target.is_accelerator)
    )
    began = bench.clock.now()
    goal = _to(example_targets, target)
    subjects = _first_round(layers, _to(example_inputs, target), goal, loss_fn, bench)
    distinct = list({id(subject): subject for subject in subjects}.values())
    if bench.caches.lessen(sum(subject.num_bytes for subject in subjects)):
        for subject in distinct:  # once more: the first time found less in the caches than a step
            subject.rounds.clear()
            bench.run(subject)
    always = (rounds - 1) * len(distinct)
    for turn, subject in enumerate(_turns(subjects, distinct, rounds)):
        if turn >= always and bench.clock.now() - began >= budget_s:
            break
        bench.run(subject)
    _tell(subjects, _uncertain(subjects, distinct), bench.clock.now() - began)
    usual = _usual(subjects)
    ordering = _Ordering.of(subjects)
    return [ordering.with_host(subject.cost(usual), subject) for subject in subjects]


def _usual(subjects: Sequence["_Subject"]) -> float:
    """Return how many times as long as at the least the layers took on average, at least 1."""
    least_s = taken_s = 0.0
    for subject in subjects:
        for times_s in zip(*subject.times, strict=True):
            best_s = min(times_s)
            least_s += best_s
            taken_s += fmean(time_s for time_s in times_s if time_s <= _DISTURBED * abs(best_s))
    return max(1.0, taken_s / least_s) if least_s else 1.0


def _turns(
    subjects: Sequence["_Subject"], distinct: Sequence["_Subject"], rounds: int
) -> Iterator["_Subject"]:
    """Give what is to be measured next, after the first round; `subjects`: of every layer."""
    for _ in range(rounds - 1):
        yield from distinct
    slack_s = _slack_s(subjects)
    if any(subject.spread(slack_s, last=True) for subject in distinct):
        # Something disturbs. A layer that it disturbed in all rounds alike does not show it.
        for _ in range(rounds):
            yield from distinct
    for _ in range(_MOST_ROUNDS):
        yield from _uncertain(subjects, distinct)


def _first_round(
    layers: Sequence[Layer],
    inputs: Any,
    targets: Any,
    loss_fn: LossFunction | None,
    bench: "_Bench",
) -> list["_Subject"]:
    """Run every layer on what the one before gives; return for each what was measured for it."""
    last = {len(layers) - 1: _Loss(loss_fn, targets)} if loss_fn else {}

    def visit(each: Visit) -> Passed[_Subject]:
        subject = _Subject(each, last.get(each.index))
        output, *stashed = bench.run(subject)
        return Passed(subject, output, stashed)

    return walk(layers, inputs, visit, alone=last)[0]


class _Seconds(NamedTuple):
    """Of forward, backward, the two halves of a split backward, and a forward without a graph."""

    forward: float
    backward: float
    of_input: float
    of_weight: float
    bare_forward: float


@dataclass(eq=False)
class _Subject:
    """A layer, what it is run on, and its times in each round.

    `ordered`: how long the host took to order each part for an accelerator. `num_bytes`: of its
    weights, what it is given and what it gives, as a step touches them.
    """

    visit: Visit
    loss: "_Loss | None"
    rounds: list[tuple[_Seconds, ...]] = field(default_factory=list)
    ordered: list[_Seconds] = field(default_factory=list)
    num_bytes: int = 0

    @property
    def times(self) -> list[_Seconds]:
        """Return what was measured, of all rounds."""
        return [times for of_round in self.rounds for times in of_round]

    @property
    def best(self) -> _Seconds:
        """Return the least seconds of each part."""
        return _least(self.times)

    def cost(self, usual: float) -> LayerCost:
        """Return the result; `usual`: how many times as long as at the least layers take."""
        return LayerCost(*(usual * least_s for least_s in self.best))

    def spread(self, slack_s: float, last: bool = False) -> float:
        """Return by how much of a best time the next best round missed it, or the worst one.

        What lies within the tolerance, or `slack_s`, is 0.
        """
        worst = 0.0
        for times in zip(*map(_least, self.rounds), strict=True):
            best, *others = sorted(times)
            missed = others[-1 if last else 0] - best if others else 0.0
            if missed > max(_TOLERANCE * best, slack_s):
                worst = max(worst, missed / best if best else math.inf)
        return worst


def _least(times: Sequence[_Seconds]) -> _Seconds:
    return _Seconds(*map(min, zip(*times, strict=True)))


class _Ordering(NamedTuple):
    """How the host keeps up with an accelerator: whether a step waits for the host instead.

    Alone, a layer's work takes the host longer to order than within a step, where one layer follows
    the other. On an H200 (torch 2.11, 16 cores) a step of a GPT of 0.9 million parameters, which
    waits for the host, took 0.47 times what its layers take alone: 49 ms of 103.
    """

    is_late: bool

    @classmethod
    def of(cls, subjects: Sequence[_Subject]) -> "_Ordering":
        """Find out, from all layers of a model."""
        device_s = sum(subject.best.forward + subject.best.backward for subject in subjects)
        hosts = [_least(subject.ordered) for subject in subjects]
        return cls(_WITHIN * sum(host.forward + host.backward for host in hosts) > device_s)

    def with_host(self, cost: LayerCost, subject: _Subject) -> LayerCost:
        """Return what a layer costs where the host's times count, too."""
        if not self.is_late:
            return cost
        pairs = zip(astuple(cost), _least(subject.ordered), strict=True)
        return LayerCost(*(max(own_s, _WITHIN * host_s) for own_s, host_s in pairs))


_WITHIN: Final = 0.47  # of the host's time for a layer alone: what it takes within a step
_DISTURBED: Final = 1.5  # times the least: other work had the machine
_TOLERANCE: Final = 0.05  # of a time: it came again
_NEGLIGIBLE: Final = 0.005  # of the time of all layers
_NEGLIGIBLE_S: Final = 20e-6
_MOST_ROUNDS: Final = 10  # more for layers that stay uncertain
_SHOWN: Final = 8  # layers in a message
_FIT_LAYER: Final = "make the layer take what the layer before it (or the data) gives"
_FIT_LOSS: Final = (
    "correct the loss, or choose model, data and loss that fit each other (as many outputs as the "
    "targets have classes)"
)


def _slack_s(subjects: Sequence[_Subject]) -> float:
    whole = sum(subject.best.forward + subject.best.backward for subject in subjects)
    return max(_NEGLIGIBLE_S, _NEGLIGIBLE * whole)


def _uncertain(subjects: Sequence[_Subject], distinct: Sequence[_Subject]) -> list[_Subject]:
    """Return those whose best times were not seen in two rounds; `subjects`: of every layer."""
    slack_s = _slack_s(subjects)
    return [subject for subject in distinct if subject.spread(slack_s) > 0]


def _tell(subjects: Sequence[_Subject], uncertain: Sequence[_Subject], spent_s: float) -> None:
    if not uncertain:
        return
    slack_s = _slack_s(subjects)
    ids = {id(subject) for subject in uncertain}
    indices = [index for index, subject in enumerate(subjects) if id(subject) in ids]
    more = f" and {len(indices) - _SHOWN} more" if len(indices) > _SHOWN else ""
    log.warning(
        "partition: the times of layers %s%s were measured for %.0f s, expected the best to come "
        "again within %.0f %%, got none nearer than %.0f %%; other work keeps this machine busy, "
        "and the cut may not be the best: measure on a quiet one, or give the cut by hand",
        ", ".join(map(str, indices[:_SHOWN])),
        more,
        spent_s,
        100 * _TOLERANCE,
        100 * max(subject.spread(slack_s) for subject in uncertain),
    )


class _Bench(NamedTuple):
    """How layers are measured."""

    seed: int
    device: Device
    repetitions: int
    warmup: int
    clock: Clock
    caches: Caches

    def run(self, subject: _Subject) -> list[Any]:
        """Measure a layer for a round; return its output and stashes, detached."""
        # In a function of its own, so that the layer is gone before the next one is built.
        visit = subject.visit
        index = visit.index
        with seeded_generators(init_key(self.seed, index)), process_generators_kept():
            private = _private(visit.layer, index)
            module = build_layer(private, index=index, seed=self.seed, device=self.device)
            trial = _Trial(visit, module, subject.loss, self)
            results, seconds, ordered = trial.measured()
            subject.rounds.append(seconds)
            subject.ordered += ordered
            touched = (*module.parameters(), *tensors_of((tuple(visit.given), results)))
            subject.num_bytes = sum(each.numel() * each.element_size() for each in touched)
        return results


class _Took(NamedTuple):
    """Seconds of a part: of the device, and of the host that ordered it."""

    device: float
    host: float


# Output and stashes of a run, and what its parts took.
_Run = tuple[list[Any], Sequence[_Took]]


@dataclass(frozen=True)
class _Trial:
    """One built layer and the micro-batch it is run on."""

    visit: Visit
    module: nn.Module
    loss: "_Loss | None"
    bench: _Bench

    def measured(self) -> tuple[list[Any], tuple[_Seconds, ...], tuple[_Seconds, ...]]:
        """Return output and stashes, detached, and the seconds of each part, of each repetition.

        The device's, then the host's.
        """
        results, whole = self._repeated(self._pass)
        _, halves = self._repeated(partial(self._pass, is_split=True))
        _, bare = self._repeated(self._bare)
        rows = [
            (*both, *of_halves[1:], *of_bare)
            for both, of_halves, of_bare in zip(whole, halves, bare, strict=True)
        ]
        of_device = tuple(_Seconds(*(took.device for took in row)) for row in rows)
        return results, of_device, tuple(_Seconds(*(took.host for took in row)) for row in rows)

    def _repeated(self, run: Callable[[], _Run]) -> tuple[list[Any], list[Sequence[_Took]]]:
        """Run it several times; return output and stashes of the last, and what each took."""
        warmup, wanted = self.bench.warmup, self.bench.repetitions
        times: list[Sequence[_Took]] = []
        for _ in range(warmup + wanted):
            results: list[Any] = []  # what the last one made is gone before the next begins
            results, seconds = run()
            times.append(seconds)
        return results, times[warmup:]

    def _pass(self, *, is_split: bool = False) -> _Run:
        """Run one forward and backward; return output and stashes, and what its parts took.

        The parts are forward and backward, or, where weight gradients are deferred, three.
        """
        deferred = Deferred() if is_split else None
        # Parameter gradients stay, so that repetitions accumulate into them as micro-batches do.
        forward, results = self._forward()
        ordered = partial(self.bench.clock.ordered, device=self.bench.device)
        self.bench.caches.fill()
        with self._failures_told():
            with ExitStack() as blocks:
                if deferred is not None:
                    blocks.enter_context(deferred.in_forward())
                    blocks.enter_context(DeferWeights(deferred))
                ends, *in_forward = ordered(forward)
            seeds = [torch.ones_like(end) for end in ends]
            self.bench.caches.fill()
            _, *in_backward = ordered(lambda: _backward(ends, seeds))
            parts = [_Took(*in_forward), _Took(*in_backward) if ends else _Took(0.0, 0.0)]
            if deferred is not None:
                self.bench.caches.fill()
                parts.append(_Took(*ordered(deferred.run)[1:]))
        return map_tensors(_detached, results), parts

    def _bare(self) -> _Run:
        """Run a forward that keeps nothing; return nothing else, and what it took."""
        forward, _ = self._forward()
        self.bench.caches.fill()
        with self._failures_told(), torch.no_grad():
            _, *took = self.bench.clock.ordered(forward, device=self.bench.device)
        return [], [_Took(*took)]

    def _forward(self) -> tuple[Callable[[], list[Tensor]], list[Any]]:
        """Return a forward on clones, to be called once, and the list that gets what it makes.

        It returns what a backward starts from. A layer may work in place: on a leaf that is
        forbidden, and the next repetition needs the input unchanged.
        """
        names, where = self.visit.names, self.visit.where
        given = map_tensors(lambda tensor: _detached(tensor).clone(), tuple(self.visit.given))
        results: list[Any] = []

        def forward() -> list[Tensor]:
            value, popped = given
            stashed = dict(zip(names.pops, popped, strict=True))
            output = run_layer(self.module, names, value, stashed, where)
            results.extend([output, *(stashed[name] for name in names.stashes)])
            ends = results if self.loss is None else [self.loss.of(output, where)]
            return [tensor for tensor in tensors_of(ends) if tensor.requires_grad]

        return forward, results

    @contextmanager
    def _failures_told(self) -> Iterator[None]:
        """Name the layer in what it raises."""
        try:
            yield
        except _LossError:
            raise
        except Exception as error:
            raise ModelError(
                f"{self.visit.where}: failed on the example micro-batch, expected it to run on "
                f"{described(self.visit.given)}, got {with_remedy(error, _FIT_LAYER)}"
            ) from error


def _backward(ends: list[Tensor], seeds: list[Tensor]) -> None:
    if ends:
        torch.autograd.backward(ends, seeds)


class _LossError(ModelError):
    """The loss failed, not the layer before it."""


class _Loss(NamedTuple):
    """The loss, and the targets of the example."""

    function: LossFunction
    targets: Any

    def of(self, output: Any, where: str) -> Tensor:
        """Return the one tensor that the backward starts from; `where` names the last layer."""
        try:
            value = self.function(output, self.targets)
        except Exception as error:
            raise _LossError(
                f"loss: failed on the output of {where} and the example's targets, expected it to "
                f"take output {described(output)} and targets {described(self.targets)}, got "
                f"{with_remedy(error, _FIT_LOSS)}"
            ) from error
        total: Tensor = value[0] if isinstance(value, tuple) else value
        return total


def _private(layer: Layer, index: int) -> Layer:
    """Return a layer that the measurement may change: a copy of a module that comes built."""
    if isinstance(layer, LayerSpec):
        return layer
    try:
        return copy.deepcopy(layer)
    except Exception as error:
        raise ModelError(
            f"layers.{index}: cannot be measured, expected a module that copy.deepcopy copies, "
            f"got {words_of(error)}; give a LayerSpec, or partition by parameters"
        ) from error


def _detached(tensor: Tensor) -> Tensor:
    """Cut a tensor from its graph; it remembers whether a gradient will be asked of it."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _to(nest: Any, device: Device) -> Any:
    return map_tensors(device.bring, nest)
