"""Measure consecutive layers together, as a stage runs them, to correct times of single layers.

Alone, a layer takes longer than in a stage: each backward starts separately, and the inputs have
left the caches. The host also launches consecutive layers faster than single ones: on an H200 in a
third to two thirds of the time (`experiments/gpu`).
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from gpipe_hpc.errors import ModelError
from gpipe_hpc.planner.costs.built_layers import (
    ExampleLoss,
    LayerSeconds,
    MeasuringOptions,
    PassSeconds,
    usual,
)
from gpipe_hpc.planner.costs.walk import LayerVisit

log = logging.getLogger("gpipe_hpc.pipeline")


@dataclass(frozen=True)
class StretchLayer:
    """A layer with its times alone, which may be measured together with its neighbours.

    Attributes:
      own: device seconds of its passes when measured alone.
      host: host seconds to launch these passes.
      num_bytes: device memory while a stage trains the layer on one micro-batch.
    """

    visit: LayerVisit
    loss: ExampleLoss | None
    own: LayerSeconds
    host: LayerSeconds
    num_bytes: int

    @property
    def seconds(self) -> float:
        """Return the device seconds of the layer's forward and backward."""
        return self.own.forward + self.own.backward


class PassCorrection(NamedTuple):
    """Correction from the time of a pass alone to its time in a stage.

    Attributes:
      times: factor on the device time.
      saved_s: seconds to subtract, at most half of the time.
      host: if the step waits for the host, the factor on the host time of the layer alone; else 0.
    """

    times: float = 1.0
    saved_s: float = 0.0
    host: float = 0.0

    def seconds(self, own_s: float, host_s: float) -> float:
        """Return the corrected seconds, given device and host seconds of the layer alone."""
        return max(self.times * own_s - min(self.saved_s, own_s / 2), self.host * host_s)


class StageCorrection(NamedTuple):
    """Corrections for a forward, a backward or its halves, and a forward without a graph."""

    forward: PassCorrection = PassCorrection()
    backward: PassCorrection = PassCorrection()
    bare: PassCorrection = PassCorrection()

    def seconds(self, own: LayerSeconds, host: LayerSeconds) -> LayerSeconds:
        """Return the corrected seconds of each pass of a layer."""
        parts = (self.forward, *[self.backward] * 3, self.bare, self.forward)
        pairs = zip(parts, own, host, strict=True)
        return LayerSeconds(*(part.seconds(own_s, host_s) for part, own_s, host_s in pairs))


_BY_HALF: Final = PassCorrection(host=0.5)
UNKNOWN: Final = StageCorrection(_BY_HALF, _BY_HALF, _BY_HALF)
"""Correction if nothing was measured: device times unchanged, host times halved."""

_MOST_LAYERS: Final = 64
_MOST_S: Final = 0.05  # of one forward and backward: longer layers hardly gain from neighbours
MOST_STRETCH_BYTES: Final = 2**31
_SHARE: Final = 0.25  # of the device's free memory
_PASSES: Final = 5, 40  # at least, and at most
_ENOUGH_S: Final = 1.5  # of measured passes
_LATE: Final = 1.05  # above this multiple of its own seconds the device waits for the host
_MOST_TIMES: Final = 1.1  # larger factors are due to other work on the machine
_HALVINGS: Final = 40


def in_stage(members: Sequence[StretchLayer], bench: MeasuringOptions) -> StageCorrection:
    """Measure how much faster layers run in a stage than alone, on consecutive layers.

    As many consecutive layers are run together as the limits of time and memory allow. Returns
    `UNKNOWN` if they fail when run together; the pipeline will report the error.
    """
    chosen = _stretch(members, bench)
    if len(chosen) < (1 if bench.device.is_accelerator else 2):
        return UNKNOWN
    try:
        *trained_s, bare_s = _usual_passes(chosen, bench)
    except ModelError as error:
        log.debug("layers are timed separately, not in sequence: %s", error)
        return UNKNOWN
    forward = [PassSeconds(each.own.forward, each.host.forward) for each in chosen]
    backward = [PassSeconds(each.own.backward, each.host.backward) for each in chosen]
    bare = _part(
        bare_s, [PassSeconds(each.own.bare_forward, each.host.bare_forward) for each in chosen]
    )
    if len(trained_s) == 1:
        both = _part(trained_s[0], [*forward, *backward])
        return StageCorrection(both, both, bare)
    return StageCorrection(_part(trained_s[0], forward), _part(trained_s[1], backward), bare)


def _stretch(members: Sequence[StretchLayer], bench: MeasuringOptions) -> Sequence[StretchLayer]:
    """Return the longest sequence of consecutive layers within the time and memory limits."""
    free = bench.device.memory_free()
    most_bytes = MOST_STRETCH_BYTES if free is None else min(MOST_STRETCH_BYTES, _SHARE * free)
    best: Sequence[StretchLayer] = ()
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


def _usual_passes(chosen: Sequence[StretchLayer], bench: MeasuringOptions) -> list[float]:
    """Return the typical seconds of `BuiltLayers.through`, followed by those of a bare forward."""
    rows: list[tuple[float, ...]] = []
    with bench.built([member.visit for member in chosen], chosen[-1].loss) as built:
        began_s = bench.clock.now()
        least, most = _PASSES
        for number in range(1 + most):
            if number > least and bench.clock.now() - began_s >= _ENOUGH_S:
                break
            rows.append((*built.through(), built.bare_through()))
    return [usual(column) for column in zip(*rows[1:], strict=True)]  # the first row is warm-up


def _part(together_s: float, alone: Sequence[PassSeconds]) -> PassCorrection:
    """Return the correction with which the times of single layers add up to the time together.

    On a CPU there is no host time; it is also unknown if layers make the host wait.
    """
    device_s, host_s = sum(took.device for took in alone), sum(took.host for took in alone)
    if host_s:
        if together_s <= _LATE * device_s:
            return PassCorrection()
        return _explaining(
            together_s, alone, lambda share: PassCorrection(host=share), together_s / host_s
        )
    if together_s >= device_s:
        return (
            PassCorrection(times=min(_MOST_TIMES, together_s / device_s))
            if device_s
            else PassCorrection()
        )
    most_s = max(took.device for took in alone) / 2
    return _explaining(
        together_s, alone, lambda left: PassCorrection(saved_s=most_s - left), most_s
    )


def _explaining(
    together_s: float,
    alone: Sequence[PassSeconds],
    made: Callable[[float], PassCorrection],
    most: float,
) -> PassCorrection:
    """Return the correction, made from a number up to `most`, that yields the time together.

    Found by bisection, as the corrected total time grows with the number.
    """
    low, high = 0.0, most
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if sum(made(middle).seconds(*took) for took in alone) < together_s:
            low = middle
        else:
            high = middle
    return made(high)
