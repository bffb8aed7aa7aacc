"""Layers that follow each other, timed as a stage runs them: one after the other, without waiting.

Alone, a layer costs more than in a stage: its backward begins anew each time, and what it is given
is no longer in the caches. And the host orders layers for an accelerator in less time one after the
other than each alone: on an H200 in a third to two thirds (`experiments/gpu`).
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from gpipe_hpc.errors import ModelError
from gpipe_hpc.planner.costs.built_layers import Bench, Loss, Seconds, Took, usual
from gpipe_hpc.planner.costs.walk import Visit

log = logging.getLogger("gpipe_hpc.pipeline")


@dataclass(frozen=True)
class Member:
    """A layer as it may come into a stretch.

    `own`: what its parts take the device alone. `host`: what the host takes to order them.
    `num_bytes`: what it takes of the device while a stage trains it on one micro-batch.
    """

    visit: Visit
    loss: Loss | None
    own: Seconds
    host: Seconds
    num_bytes: int

    @property
    def seconds(self) -> float:
        """Return the seconds of its forward and backward."""
        return self.own.forward + self.own.backward


class Part(NamedTuple):
    """What a part of a layer takes in a stage, beside what it takes alone.

    `times`: so many times as long. `saved_s`: so many seconds less, but at least half as long.
    `host`: where a step waits for the host, the share of the host's time for a layer alone that it
    needs in a stage; else 0.
    """

    times: float = 1.0
    saved_s: float = 0.0
    host: float = 0.0

    def seconds(self, own_s: float, host_s: float) -> float:
        """Return the seconds in a stage; alone it takes the device `own_s`, the host `host_s`."""
        return max(self.times * own_s - min(self.saved_s, own_s / 2), self.host * host_s)


class InStage(NamedTuple):
    """The same for a forward, for a backward or a part of one, and for a bare forward."""

    forward: Part = Part()
    backward: Part = Part()
    bare: Part = Part()

    def seconds(self, own: Seconds, host: Seconds) -> Seconds:
        """Return what each part of a layer takes in a stage."""
        parts = (self.forward, *[self.backward] * 3, self.bare, self.forward)
        pairs = zip(parts, own, host, strict=True)
        return Seconds(*(part.seconds(own_s, host_s) for part, own_s, host_s in pairs))


_BY_HALF: Final = Part(host=0.5)
UNKNOWN: Final = InStage(_BY_HALF, _BY_HALF, _BY_HALF)
"""Where no stretch was run: layers cost what they do alone, and a host half its time."""

_MOST_LAYERS: Final = 64
_MOST_S: Final = 0.05  # of one forward and backward of all: longer layers hardly save anything
MOST_STRETCH_BYTES: Final = 2**31
_SHARE: Final = 0.25  # of the device's free memory
_PASSES: Final = 5, 40  # at least, and at most
_ENOUGH_S: Final = 1.5  # of passes
_LATE: Final = 1.05  # times the device's own seconds: it waits for the host
_MOST_TIMES: Final = 1.1  # more than that is other work on the machine
_HALVINGS: Final = 40


def in_stage(members: Sequence[Member], bench: Bench) -> InStage:
    """Find out what layers take in a stage, by the longest stretch of a model that may be run.

    Where layers fail together `UNKNOWN` is returned: the pipeline will say what is wrong.
    """
    chosen = _stretch(members, bench)
    if len(chosen) < (1 if bench.device.is_accelerator else 2):
        return UNKNOWN
    try:
        *trained_s, bare_s = _usual_passes(chosen, bench)
    except ModelError as error:
        log.debug("layers are timed alone, not one after the other: %s", error)
        return UNKNOWN
    forward = [Took(each.own.forward, each.host.forward) for each in chosen]
    backward = [Took(each.own.backward, each.host.backward) for each in chosen]
    bare = _part(bare_s, [Took(each.own.bare_forward, each.host.bare_forward) for each in chosen])
    if len(trained_s) == 1:
        both = _part(trained_s[0], [*forward, *backward])
        return InStage(both, both, bare)
    return InStage(_part(trained_s[0], forward), _part(trained_s[1], backward), bare)


def _stretch(members: Sequence[Member], bench: Bench) -> Sequence[Member]:
    """Return as many layers in a row as may be run together."""
    free = bench.device.memory_free()
    most_bytes = MOST_STRETCH_BYTES if free is None else min(MOST_STRETCH_BYTES, _SHARE * free)
    best: Sequence[Member] = ()
    first = 0
    seconds, num_bytes = 0.0, 0
    for last, member in enumerate(members):
        seconds += member.seconds
        num_bytes += member.num_bytes
        while first <= last and (
            seconds > _MOST_S or num_bytes > most_bytes or last - first >= _MOST_LAYERS
        ):
            seconds -= members[first].seconds
            num_bytes -= members[first].num_bytes
            first += 1
        if last + 1 - first > len(best):
            best = members[first : last + 1]
    return best


def _usual_passes(chosen: Sequence[Member], bench: Bench) -> list[float]:
    """Return the usual seconds of `BuiltLayers.through`, and of a bare forward behind them."""
    rows: list[tuple[float, ...]] = []
    with bench.built([member.visit for member in chosen], chosen[-1].loss) as built:
        began_s = bench.clock.now()
        least, most = _PASSES
        for number in range(1 + most):
            if number > least and bench.clock.now() - began_s >= _ENOUGH_S:
                break
            rows.append((*built.through(), built.bare_through()))
    return [usual(column) for column in zip(*rows[1:], strict=True)]  # the first one warms up


def _part(together_s: float, alone: Sequence[Took]) -> Part:
    """Return what explains that layers take so long together.

    On a CPU no host orders their work. Nor is its time known where layers let it wait.
    """
    device_s, host_s = sum(took.device for took in alone), sum(took.host for took in alone)
    if host_s:
        if together_s <= _LATE * device_s:
            return Part()
        return _explaining(together_s, alone, lambda share: Part(host=share), together_s / host_s)
    if together_s >= device_s:
        return Part(times=min(_MOST_TIMES, together_s / device_s)) if device_s else Part()
    most_s = max(took.device for took in alone) / 2
    return _explaining(together_s, alone, lambda left: Part(saved_s=most_s - left), most_s)


def _explaining(
    together_s: float, alone: Sequence[Took], made: Callable[[float], Part], most: float
) -> Part:
    """Return the part, of those made of numbers up to `most`, with which layers take so long.

    The larger the number, the longer they take.
    """
    low, high = 0.0, most
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if sum(made(middle).seconds(*took) for took in alone) < together_s:
            low = middle
        else:
            high = middle
    return made(high)
