"""Measure the time of each layer on a device for one micro-batch."""

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

from gpipe_hpc.device.device import Device, HostDevice
from gpipe_hpc.models import Layer, LossFunction
from gpipe_hpc.planner.costs.built_layers import ExampleLoss, LayerSeconds, MeasuringOptions, usual
from gpipe_hpc.planner.costs.clock import WorkClock
from gpipe_hpc.planner.costs.stretch import StretchLayer, in_stage
from gpipe_hpc.planner.costs.walk import LayerVisit, VisitResult, walk
from gpipe_hpc.pytree import map_tensors

log = logging.getLogger("gpipe_hpc.pipeline")


@dataclass(frozen=True)
class LayerCost:
    """Measured seconds of one layer for one micro-batch in a step, see `measure_layers`.

    Attributes:
      forward_s, backward_s: without recomputation.
      input_s, weight_s: the two halves of a split backward. `input_s` includes the time by which a
        forward takes longer if its backward will be split.
      bare_forward_s: a forward that saves nothing for the backward.
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
    clock: WorkClock | None = None,
) -> list[LayerCost]:
    """Measure the cost of every layer on one micro-batch, without communication.

    Relative costs are the minimum times, because other load on the machine affects them least. But
    a step is a sum of typical times, 12 to 23 % longer than the minimum on two shared cores. So all
    costs are multiplied by one factor, the mean ratio of typical to minimum times, without times
    above 1.5 times the minimum.

    Then consecutive layers are run together as a stage runs them, for up to about 1.5 seconds
    beyond `budget_s`, and all costs are corrected by the difference: on a CPU by at most half down
    and a tenth up, on an accelerator by more if it waits for the host. See `in_stage`.

    Layers are measured in rounds over all layers, so that disturbances spread evenly. If the
    `rounds` rounds agree, measurement ends. Otherwise as many more follow, and up to ten for layers
    whose best time was not reproduced, until `budget_s` seconds have passed. Remaining uncertainty
    is logged.

    Layers are built one at a time with `seed`; equal specs with inputs of equal structure are
    measured once. Built modules are copied, and random states are restored.

    Args:
      example_inputs: nested tensors of one micro-batch.
      loss_fn: is measured as part of the last layer. Without it the last backward starts from ones.

    Raises ModelError, naming the layer, if a layer fails on the output of the layer before it.
    """
    target = device or HostDevice()
    bench = MeasuringOptions(seed, target, repetitions, warmup, clock or WorkClock())
    began = bench.clock.now()
    goal = _to(example_targets, target)
    subjects = _first_round(layers, _to(example_inputs, target), goal, loss_fn, bench)
    distinct = list({id(subject): subject for subject in subjects}.values())
    always = (rounds - 1) * len(distinct)
    for turn, subject in enumerate(_later_rounds(subjects, distinct, rounds)):
        if turn >= always and bench.clock.now() - began >= budget_s:
            break
        subject.run(bench)
    _warn_if_uncertain(subjects, _uncertain(subjects, distinct), bench.clock.now() - began)
    times = _typical_to_minimum(subjects)
    members = [subject.member(times) for subject in subjects]
    stage = in_stage(members, bench)
    return [_cost(stage.seconds(member.own, member.host)) for member in members]


def _cost(took: LayerSeconds) -> LayerCost:
    deferring_s = max(0.0, took.split_forward - took.forward)
    return LayerCost(
        took.forward, took.backward, took.of_input + deferring_s, took.of_weight, took.bare_forward
    )


def _typical_to_minimum(subjects: Sequence["_MeasuredLayer"]) -> float:
    """Return the mean ratio of typical to minimum times over all layers, at least 1."""
    least_s = taken_s = 0.0
    for subject in subjects:
        for times_s in zip(*subject.times, strict=True):
            least_s += min(times_s)
            taken_s += usual(times_s)
    return max(1.0, taken_s / least_s) if least_s else 1.0


def _later_rounds(
    subjects: Sequence["_MeasuredLayer"], distinct: Sequence["_MeasuredLayer"], rounds: int
) -> Iterator["_MeasuredLayer"]:
    """Yield the layers to measure after the first round, in order.

    `subjects` has one entry per layer, `distinct` one entry for each group of equal layers.
    """
    for _ in range(rounds - 1):
        yield from distinct
    slack_s = _slack_s(subjects)
    if any(subject.spread(slack_s, last=True) for subject in distinct):
        # Measurements were disturbed, maybe those of other layers equally in all rounds.
        for _ in range(rounds):
            yield from distinct
    for _ in range(_MOST_ROUNDS):
        yield from _uncertain(subjects, distinct)


def _first_round(
    layers: Sequence[Layer],
    inputs: Any,
    targets: Any,
    loss_fn: LossFunction | None,
    bench: MeasuringOptions,
) -> list["_MeasuredLayer"]:
    """Run every layer on the output of the one before; return the measurement of each layer."""
    last = {len(layers) - 1: ExampleLoss(loss_fn, targets)} if loss_fn else {}

    def visit(each: LayerVisit) -> VisitResult[_MeasuredLayer]:
        subject = _MeasuredLayer(each, last.get(each.index))
        output, *stashed = subject.run(bench)
        return VisitResult(subject, output, stashed)

    return walk(layers, inputs, visit, alone=last)[0]


@dataclass(eq=False)
class _MeasuredLayer:
    """A layer with its inputs, and its measured times in each round.

    Attributes:
      ordered: host seconds to launch each pass on an accelerator.
      num_bytes: bytes of weights, inputs and outputs that a step accesses.
    """

    visit: LayerVisit
    loss: ExampleLoss | None
    rounds: list[tuple[LayerSeconds, ...]] = field(default_factory=list)
    ordered: list[LayerSeconds] = field(default_factory=list)
    num_bytes: int = 0
    kept_bytes: int | None = None

    def run(self, bench: MeasuringOptions) -> list[Any]:
        """Measure the layer for a round; return its output and stashed values, detached."""
        # In a separate function, so that the layer is freed before the next one is built.
        with bench.built([self.visit], self.loss) as built:
            if self.kept_bytes is None:
                self.kept_bytes = built.kept_bytes()
            results, seconds, ordered = built.measured()
            self.rounds.append(seconds)
            self.ordered += ordered
            self.num_bytes = built.num_bytes(results)
        return results

    @property
    def times(self) -> list[LayerSeconds]:
        """Return the measurements of all rounds."""
        return [times for of_round in self.rounds for times in of_round]

    @property
    def best(self) -> LayerSeconds:
        """Return the minimum seconds of each pass."""
        return _least(self.times)

    def member(self, times: float) -> StretchLayer:
        """Return the layer with typical times, for measuring several layers together.

        `times` is the ratio of typical to minimum times.
        """
        own = LayerSeconds(*(times * least_s for least_s in self.best))
        host = LayerSeconds(*map(median, zip(*self.ordered, strict=True)))
        # Accessed bytes count twice, as weights and inputs have gradients.
        return StretchLayer(
            self.visit, self.loss, own, host, 2 * self.num_bytes + (self.kept_bytes or 0)
        )

    def spread(self, slack_s: float, last: bool = False) -> float:
        """Return the relative gap between the best round and the next best (or the `last`) round.

        Gaps within the tolerance or below `slack_s` seconds count as 0.
        """
        worst = 0.0
        for times in zip(*map(_least, self.rounds), strict=True):
            best, *others = sorted(times)
            missed = others[-1 if last else 0] - best if others else 0.0
            if missed > max(_TOLERANCE * best, slack_s):
                worst = max(worst, missed / best if best else math.inf)
        return worst


def _least(times: Sequence[LayerSeconds]) -> LayerSeconds:
    return LayerSeconds(*map(min, zip(*times, strict=True)))


_TOLERANCE: Final = 0.05  # times that differ by less count as reproduced
_NEGLIGIBLE: Final = 0.005  # of the time of all layers: smaller differences do not matter
_NEGLIGIBLE_S: Final = 20e-6
_MOST_ROUNDS: Final = 10  # additional rounds for layers that remain uncertain
_SHOWN: Final = 8  # layers in a message


def _slack_s(subjects: Sequence[_MeasuredLayer]) -> float:
    whole = sum(subject.best.forward + subject.best.backward for subject in subjects)
    return max(_NEGLIGIBLE_S, _NEGLIGIBLE * whole)


def _uncertain(
    subjects: Sequence[_MeasuredLayer], distinct: Sequence[_MeasuredLayer]
) -> list[_MeasuredLayer]:
    """Return the layers whose best times were not reproduced in a second round."""
    slack_s = _slack_s(subjects)
    return [subject for subject in distinct if subject.spread(slack_s) > 0]


def _warn_if_uncertain(
    subjects: Sequence[_MeasuredLayer], uncertain: Sequence[_MeasuredLayer], spent_s: float
) -> None:
    if not uncertain:
        return
    slack_s = _slack_s(subjects)
    ids = {id(subject) for subject in uncertain}
    indices = [index for index, subject in enumerate(subjects) if id(subject) in ids]
    more = f" and {len(indices) - _SHOWN} more" if len(indices) > _SHOWN else ""
    log.warning(
        "partition: the times of layers %s%s are noisy: after %.0f s of measurement, best times "
        "differ between rounds by more than %.0f %% (up to %.0f %%), because other work keeps "
        "this machine busy; the partition may not be the best: measure on an idle machine, or set "
        "pipeline.partition to a list",
        ", ".join(map(str, indices[:_SHOWN])),
        more,
        spent_s,
        100 * _TOLERANCE,
        100 * max(subject.spread(slack_s) for subject in uncertain),
    )


def _to(nest: Any, device: Device) -> Any:
    return map_tensors(device.to_device, nest)
