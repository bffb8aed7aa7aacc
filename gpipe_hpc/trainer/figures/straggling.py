"""Whether this rank takes longer to compute than it did: noticed while a run goes on."""

from collections import deque
from statistics import median
from typing import Final, NamedTuple

SLOW: Final = 1.3
"""Times as long as before, from which on a rank counts as a straggler."""

_NUM_NEWEST: Final = 5  # steps that are all slow, or all as before, until that is said
_NUM_BEFORE: Final = 50  # steps whose median is what a rank takes
_LEAST_BEFORE: Final = 10


class Straggling(NamedTuple):
    """A rank has begun to straggle, `factor` times as long as before, or is as before again.

    `first_step`: of those that are so.
    """

    first_step: int
    factor: float
    is_over: bool = False


class _Step(NamedTuple):
    step: int
    busy_s: float
    others_s: float


class Watched:
    """What one rank computed in its newest steps, and in those before.

    A rank straggles when each of the newest steps took it longer than the median before, also
    beside what the other ranks took: longer sequences make all slower, and none a straggler.
    """

    def __init__(self) -> None:
        self._newest: deque[_Step] = deque()
        self._before: deque[_Step] = deque(maxlen=_NUM_BEFORE)
        self.factor = 0.0
        """How many times as long as before steps take, as last seen; 0 if it does not straggle."""

    def add(self, step: int, busy_s: float, others_s: float) -> Straggling | None:
        """Take a step in; return what has changed. `others_s`: the mean of the other ranks.

        0 without other ranks. The time this takes does not grow with the run.
        """
        self._newest.append(_Step(step, busy_s, others_s))
        if len(self._newest) <= _NUM_NEWEST:
            return None
        oldest = self._newest.popleft()
        was_slow = self.factor > 0
        if not was_slow:
            self._before.append(oldest)  # what is slow is never what is usual
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


def _ratio(step: _Step) -> float:
    """Return what a step took beside what it took the others; of one rank alone its time."""
    return step.busy_s / step.others_s if step.others_s else step.busy_s
