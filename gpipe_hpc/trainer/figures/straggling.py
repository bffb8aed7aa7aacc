"""Detection of stragglers: whether this rank computes more slowly than before."""

from collections import deque
from statistics import median
from typing import Final, NamedTuple

SLOW: Final = 1.3
"""Slowdown from which on a rank counts as a straggler."""

_NUM_NEWEST: Final = 5  # consecutive steps that must all be slow, or all normal
_NUM_BEFORE: Final = 50  # steps whose median is the normal time
_LEAST_BEFORE: Final = 10


class Straggling(NamedTuple):
    """Change of state: a rank has become a straggler with slowdown `factor`, or has recovered.

    `first_step` is the first of the steps that show the change.
    """

    first_step: int
    factor: float
    is_over: bool = False


class _StepSample(NamedTuple):
    step: int
    busy_s: float
    others_s: float


class StragglerDetector:
    """Detector that compares this rank's newest computing times with its earlier ones.

    A rank is a straggler if each of the newest steps took 1.3 times as long as the earlier median,
    both absolutely and relative to the other ranks: longer sequences slow down all ranks and make
    none a straggler.
    """

    def __init__(self) -> None:
        self._newest: deque[_StepSample] = deque()
        self._before: deque[_StepSample] = deque(maxlen=_NUM_BEFORE)
        self.factor = 0.0
        """Current slowdown; 0 if the rank is not a straggler."""

    def add(self, step: int, busy_s: float, others_s: float) -> Straggling | None:
        """Add a step's computing times; return a `Straggling` if the state changes, else None.

        `others_s` is the mean computing time of the other ranks, 0 if there are none. The cost does
        not grow with the number of steps.
        """
        self._newest.append(_StepSample(step, busy_s, others_s))
        if len(self._newest) <= _NUM_NEWEST:
            return None
        oldest = self._newest.popleft()
        was_slow = self.factor > 0
        if not was_slow:
            self._before.append(oldest)  # slow steps do not count as normal
        if len(self._before) < _LEAST_BEFORE:
            return None
        usual_s = median(each.busy_s for each in self._before)
        ratio = median(map(_ratio, self._before))
        slow = [
            each.busy_s > SLOW * usual_s and _ratio(each) > SLOW * ratio for each in self._newest
        ]
        factor = median(each.busy_s for each in self._newest) / usual_s if usual_s else 0.0
        first = self._newest[0].step
        if was_slow and not any(slow):
            self.factor = 0.0
            return Straggling(first, factor, is_over=True)
        if all(slow):
            self.factor = factor
        return None if was_slow or not self.factor else Straggling(first, factor)


def _ratio(step: _StepSample) -> float:
    """Return a step's time relative to the other ranks, or the time itself for a single rank."""
    return step.busy_s / step.others_s if step.others_s else step.busy_s
