"""Measure what each layer costs on the device and micro-batch at hand."""

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

from gpipe_hpc.device.device import Device, HostDevice
from gpipe_hpc.models import Layer, LossFunction
from gpipe_hpc.planner.costs.built_layers import Bench, Loss, Seconds, usual
from gpipe_hpc.planner.costs.clock import Clock
from gpipe_hpc.planner.costs.stretch import Member, in_stage
from gpipe_hpc.planner.costs.walk import Passed, Visit, walk
from gpipe_hpc.pytree import map_tensors

log = logging.getLogger("gpipe_hpc.pipeline")


@dataclass(frozen=True)
class LayerCost:
    """What one layer costs for one micro-batch; seconds are as in a step, see `measure_layers`.

    ``forward_s`` and ``backward_s`` are seconds without recomputation, ``input_s`` and ``weight_s``
    those of a backward that is split in two, ``bare_forward_s`` those of a forward that keeps
    nothing for a backward. A forward takes longer where its backward will be split, as it puts the
    gradients of weights off: that counts in ``input_s``. Bytes are counted, not measured: see
    `LayerCount`.
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
    """Return the cost of every layer, run on one micro-batch.

    How much one layer costs beside another is told by the least of each one's times: other work on
    the machine moves these least. But a step is a sum of usual times, 12 to 23 % longer than the
    least ones on two shared cores. So all costs are multiplied by one factor: how much longer than
    their least times all layers took together, on average. A time above 1.5 times the least is left
    out of that average, as other work had the machine.

    Then layers that follow each other are run one after the other, as a stage runs them, for up to
    some 1.5 seconds beyond `budget_s`. What they take less, or more, changes all costs: on a CPU by
    at most half and by a tenth; on an accelerator, which takes more where it waits for the host.
    See `in_stage`.

    All layers are measured in turn, then all again, so that other work on the machine disturbs
    none more than another. After `rounds` rounds that agree it is done. Else there are as many
    more, and at most ten for layers whose best times did not come again in another round, until
    they do or `budget_s` seconds have passed since the start. What is uncertain even then is told
    in the log.

    One layer at a time is built (`build_layer` with ``seed``) and dropped again, but for those that
    are run one after the other; inputs stay from round to round. Equal specs whose inputs have
    equal structure are measured once. Without ``loss_fn`` the last layer's backward starts from
    ones; with it the loss counts for the last layer. ``example_inputs`` is any nest of tensors.
    Modules that come built are copied, so neither their buffers nor their gradients change, and
    random states are left as they were. Purely local: no communication.

    Raises `ModelError`, naming the layer, when it does not run on what the layer before gives.
    """
    target = device or HostDevice()
    bench = Bench(seed, target, repetitions, warmup, clock or Clock())
    began = bench.clock.now()
    goal = _to(example_targets, target)
    subjects = _first_round(layers, _to(example_inputs, target), goal, loss_fn, bench)
    distinct = list({id(subject): subject for subject in subjects}.values())
    always = (rounds - 1) * len(distinct)
    for turn, subject in enumerate(_turns(subjects, distinct, rounds)):
        if turn >= always and bench.clock.now() - began >= budget_s:
            break
        subject.run(bench)
    _tell(subjects, _uncertain(subjects, distinct), bench.clock.now() - began)
    times = _times_of_least(subjects)
    members = [subject.member(times) for subject in subjects]
    stage = in_stage(members, bench)
    return [_cost(stage.seconds(member.own, member.host)) for member in members]


def _cost(took: Seconds) -> LayerCost:
    deferring_s = max(0.0, took.split_forward - took.forward)
    return LayerCost(
        took.forward, took.backward, took.of_input + deferring_s, took.of_weight, took.bare_forward
    )


def _times_of_least(subjects: Sequence["_Subject"]) -> float:
    """Return how many times as long as at the least the layers took on average, at least 1."""
    least_s = taken_s = 0.0
    for subject in subjects:
        for times_s in zip(*subject.times, strict=True):
            least_s += min(times_s)
            taken_s += usual(times_s)
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
    bench: Bench,
) -> list["_Subject"]:
    """Run every layer on what the one before gives; return for each what was measured for it."""
    last = {len(layers) - 1: Loss(loss_fn, targets)} if loss_fn else {}

    def visit(each: Visit) -> Passed[_Subject]:
        subject = _Subject(each, last.get(each.index))
        output, *stashed = subject.run(bench)
        return Passed(subject, output, stashed)

    return walk(layers, inputs, visit, alone=last)[0]


@dataclass(eq=False)
class _Subject:
    """A layer, what it is run on, and its times in each round.

    `ordered`: how long the host took to order each part for an accelerator. `num_bytes`: of its
    weights, what it is given and what it gives, as a step touches them.
    """

    visit: Visit
    loss: Loss | None
    rounds: list[tuple[Seconds, ...]] = field(default_factory=list)
    ordered: list[Seconds] = field(default_factory=list)
    num_bytes: int = 0
    kept_bytes: int | None = None

    def run(self, bench: Bench) -> list[Any]:
        """Measure the layer for a round; return its output and stashes, detached."""
        # In a function of its own, so that the layer is gone before the next one is built.
        with bench.built([self.visit], self.loss) as built:
            if self.kept_bytes is None:
                self.kept_bytes = built.kept_bytes()
            results, seconds, ordered = built.measured()
            self.rounds.append(seconds)
            self.ordered += ordered
            self.num_bytes = built.num_bytes(results)
        return results

    @property
    def times(self) -> list[Seconds]:
        """Return what was measured, of all rounds."""
        return [times for of_round in self.rounds for times in of_round]

    @property
    def best(self) -> Seconds:
        """Return the least seconds of each part."""
        return _least(self.times)

    def member(self, times: float) -> Member:
        """Return what the layer takes alone, usually: `times` as long as at the least."""
        own = Seconds(*(times * least_s for least_s in self.best))
        host = Seconds(*map(median, zip(*self.ordered, strict=True)))
        # What it touches counts twice, as weights and what is given have gradients.
        return Member(self.visit, self.loss, own, host, 2 * self.num_bytes + (self.kept_bytes or 0))

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


def _least(times: Sequence[Seconds]) -> Seconds:
    return Seconds(*map(min, zip(*times, strict=True)))


_TOLERANCE: Final = 0.05  # of a time: it came again
_NEGLIGIBLE: Final = 0.005  # of the time of all layers
_NEGLIGIBLE_S: Final = 20e-6
_MOST_ROUNDS: Final = 10  # more for layers that stay uncertain
_SHOWN: Final = 8  # layers in a message


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


def _to(nest: Any, device: Device) -> Any:
    return map_tensors(device.bring, nest)
