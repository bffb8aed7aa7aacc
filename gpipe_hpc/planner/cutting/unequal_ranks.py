"""Partition layers into stages with unequal numbers of ranks, or with ranks of unequal speed.

Notation as in `minimax`: n layers, K stages, prefix[j] the cost of the first j layers. Stages have
either q or q + 1 ranks; the objective is the cost of a stage divided by its ranks.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

from gpipe_hpc.planner.cutting.minimax import integers, minimax
from gpipe_hpc.planner.cutting.pins import EndRanges, Pins
from gpipe_hpc.schedule.families.rerouted import num_copies


def cut_for_ranks(
    costs: Sequence[float],
    stages: int,
    ranks: int,
    paces: Sequence[float] = (),
    pins: Pins = (),
) -> list[int]:
    """Return the partition that minimizes the busiest rank's work if several ranks share a stage.

    The ranks are divided evenly over the stages; which stages get one rank less is part of the
    solution. Ranks of a stage share its work so that they finish together. Exact, as `minimax`;
    ties are broken by the smallest sum of squares. No stage is empty.

    Args:
      paces: slowdown of each rank, empty if all are equal.
      pins: layers that must be on given stages.

    Raises PartitionError as `minimax` does, ScheduleError for fewer ranks than stages.
    """
    copies = num_copies(ranks, stages)
    even = minimax(costs, stages, pins=pins)
    are_alike = len(set(paces)) <= 1
    if are_alike and len(set(copies)) == 1:
        return even
    prefix = [0, *accumulate(integers(costs))]
    work = _RankWork.of(prefix, stages, ranks, paces)
    most, _ = work.dealt(even)
    where = EndRanges.where(pins, len(costs), stages)
    found = next(filter(None, (work.best(limit, max, where) for limit in work.limits(most))))
    evenest = work.best(found[0], _plus_square, where)
    assert evenest is not None, "one was just found"
    return evenest[1]


def _plus_square(price: int, work: int) -> int:
    return price + work * work


def cut_for_paces(costs: Sequence[float], paces: Sequence[float], pins: Pins = ()) -> list[int]:
    """Return the partition that minimizes the slowest stage's time, for slowdowns of stages.

    Exact; ties are broken by the smallest sum of squared stage times. No stage is empty, and each
    layer of `pins` is on its stage. Raises PartitionError as `minimax` does.
    """
    even = minimax(costs, len(paces), pins=pins)
    if len(set(paces)) == 1:
        return even
    prefix, weights = [0, *accumulate(integers(costs))], integers(paces)
    ends = [0, *accumulate(even)]
    limit = max(
        (prefix[end] - prefix[start]) * weight
        for (start, end), weight in zip(pairwise(ends), weights, strict=True)
    )
    where = EndRanges.where(pins, len(costs), len(paces))
    limit, _ = _best_of_paces(prefix, weights, where, limit, max)
    return _best_of_paces(prefix, weights, where, limit, _plus_square)[1]


Asked = Callable[[int, int, int], bool]
"""Predicate of a stage index and the range of its layers: start and end (exclusive)."""


class StageConstraint(NamedTuple):
    """Predicates that limit the layers of each stage.

    Attributes:
      fits: whether the stage may have the layers. A longer range may fit though a shorter one does
        not.
      is_spent: whether neither these layers nor any longer range from the same start fits; called
        only if `fits` is false.
    """

    fits: Asked
    is_spent: Asked


NO_CONSTRAINT: Final = StageConstraint(lambda *_: True, lambda *_: False)
_WIDER: Final = (1.0, 1.25, 1.5, 2.0, 4.0)  # multiples of the bottleneck of the unlimited cut


def cut_with_constraint(
    costs: Sequence[float], paces: Sequence[float], room: StageConstraint, pins: Pins = ()
) -> list[int] | None:
    """Return the partition of `cut_for_paces` among those whose stages all fit, or None if none do.

    Exact for any predicates and pins.
    """
    prefix, weights = [0, *accumulate(integers(costs))], integers(paces)
    ends = [0, *accumulate(cut_for_paces(costs, paces, pins))]
    where = EndRanges.where(pins, len(costs), len(paces))
    least = max(
        (prefix[end] - prefix[start]) * weight
        for (start, end), weight in zip(pairwise(ends), weights, strict=True)
    )
    # Start with a low limit and few cuts, because the predicates are slow.
    for limit in (*(int(wider * least) for wider in _WIDER), prefix[-1] * max(weights)):
        found = _best_where(prefix, weights, where, limit, max, room)
        if found is not None:
            evenest = _best_where(prefix, weights, where, found[0], _plus_square, room)
            assert evenest is not None, "one was just found"
            return evenest[1]
    return None


def _best_of_paces(
    prefix: list[int],
    weights: Sequence[int],
    where: EndRanges,
    limit: int,
    plus: Callable[[int, int], int],
) -> tuple[int, list[int]]:
    """Return the best partition and its objective value, if no stage may exceed the limit.

    `plus` adds the work of a stage to an objective value.
    """
    found = _best_where(prefix, weights, where, limit, plus, NO_CONSTRAINT)
    assert found is not None, "at least one cut is within the limit"
    return found


def _best_where(
    prefix: list[int],
    weights: Sequence[int],
    where: EndRanges,
    limit: int,
    plus: Callable[[int, int], int],
    room: StageConstraint,
) -> tuple[int, list[int]] | None:
    """Return the best partition within limit and constraint, and its objective value, or None.

    `plus` adds the work of a stage to an objective value; the objective is minimized.
    """
    num_layers = len(prefix) - 1
    best: dict[int, int] = {0: 0}
    steps: list[dict[int, int]] = []
    for stage, weight in enumerate(weights):
        first, last = where.low[stage + 1], where.high[stage + 1]
        here: dict[int, int] = {}
        came: dict[int, int] = {}
        for start, price in best.items():
            for end in range(max(start + 1, first), last + 1):
                took = (prefix[end] - prefix[start]) * weight
                if took > limit:
                    break
                if not room.fits(stage, start, end):
                    if room.is_spent(stage, start, end):
                        break
                    continue
                total = plus(price, took)
                if end not in here or total < here[end]:
                    here[end], came[end] = total, start
        best = here
        steps.append(came)
    if num_layers not in best:
        return None
    ends = [num_layers]
    for came in reversed(steps):
        ends.append(came[ends[-1]])
    return best[num_layers], [b - a for a, b in pairwise(ends[::-1])]


def copies_for(
    counts: Sequence[int], costs: Sequence[float], ranks: int, paces: Sequence[float] = ()
) -> list[int]:
    """Return the number of ranks of each stage; the cheapest stages get one rank less.

    Ties go to later stages, which keep fewer micro-batches. With unequal `paces` of ranks, the
    choice minimizes the work of the busiest rank.
    """
    stages = len(counts)
    prefix = [0, *accumulate(integers(costs))]
    if len(set(paces)) > 1:
        return _RankWork.of(prefix, stages, ranks, paces).dealt(counts)[1]
    copies = num_copies(ranks, stages)
    ends = [0, *accumulate(counts)]
    amounts = [prefix[end] - prefix[start] for start, end in pairwise(ends)]
    dearest = sorted(range(stages), key=lambda stage: (-amounts[stage], stage))
    found = [0] * stages
    for stage, number in zip(dearest, copies, strict=True):
        found[stage] = number
    return found


def paces_in_rows(copies: Sequence[int], paces: Sequence[float]) -> tuple[float, ...]:
    """Return the mean slowdown of each stage over its micro-batches, for partial replicas.

    `copies`: number of ranks of each stage; `paces`: slowdowns of the ranks, replica by replica.
    """
    numbers = iter(range(len(paces)))
    speeds = [0.0] * len(copies)
    for row in range(max(copies)):
        for stage, count in enumerate(copies):
            if row < count:
                speeds[stage] += 1 / paces[next(numbers)]
    return tuple(count / speed for count, speed in zip(copies, speeds, strict=True))


class _RankWork(NamedTuple):
    """Integer work of ranks: the cost of a stage times a weight that depends on its ranks.

    Ranks are numbered replica by replica: `num_rows` complete replicas, then a partial one with
    `num_high` ranks.

    Attributes:
      of_fewer: weight of each stage without a rank in the partial replica.
      of_more: weights of each stage with a rank in the partial replica, by the number of earlier
        stages that have one too.
      capacity: total cost divided by this is the work of each rank if all are equally busy.
    """

    prefix: list[int]
    num_rows: int
    num_high: int
    of_fewer: list[int]
    of_more: list[list[int]]
    capacity: Fraction

    @classmethod
    def of(cls, prefix: list[int], stages: int, ranks: int, paces: Sequence[float]) -> "_RankWork":
        """Compute the weights for a number of ranks; `paces` are empty if all are equal."""
        low, num_high = divmod(ranks, stages)
        if len(set(paces)) <= 1:
            # Each rank of a stage with fewer ranks has more work.
            of_fewer, of_more = [low + 1] * stages, [[low] * (num_high + 1)] * stages
            return cls(prefix, low, num_high, of_fewer, of_more, Fraction(ranks, low * (low + 1)))
        speeds = [1 / Fraction(pace) for pace in paces]
        whole = [sum(speeds[stage : low * stages : stages], Fraction()) for stage in range(stages)]
        last = speeds[low * stages :]
        fewer = [1 / each for each in whole]
        more = [[1 / (each + speed) for speed in (*last, Fraction())] for each in whole]
        unit = max(fewer) / _FINE
        of_fewer = [max(1, round(each / unit)) for each in fewer]
        of_more = [[max(1, round(each / unit)) for each in row] for row in more]
        return cls(prefix, low, num_high, of_fewer, of_more, sum(speeds, Fraction()) * unit)

    @property
    def stages(self) -> int:
        """Return the number of stages."""
        return len(self.of_fewer)

    def dealt(self, counts: Sequence[int]) -> tuple[int, list[int]]:
        """Return the busiest rank's work in a partition, and the number of ranks of each stage.

        The ranks of the partial replica are assigned to minimize that work; ties go to earlier
        stages.
        """
        best: dict[int, tuple[int, int, list[int]]] = {0: (0, 0, [])}
        for stage, (start, end) in enumerate(pairwise([0, *accumulate(counts)])):
            cost = self.prefix[end] - self.prefix[start]
            here: dict[int, tuple[int, int, list[int]]] = {}
            for num_high, (most, squares, copies) in best.items():
                for is_high, weight in reversed([*self._weights(stage, num_high)]):
                    work, now = cost * weight, num_high + is_high
                    price = max(most, work), squares + work * work
                    if now not in here or price < here[now][:2]:
                        here[now] = *price, [*copies, self.num_rows + is_high]
            best = here
        most, _, copies = best[self.num_high]
        return most, copies

    def _weights(self, stage: int, num_high: int) -> Iterator[tuple[int, int]]:
        """Yield the options of a stage with their weights: 0 or 1 ranks in the partial replica."""
        if self.num_high - num_high < self.stages - stage:
            yield 0, self.of_fewer[stage]
        if num_high < self.num_high:
            yield 1, self.of_more[stage][num_high]

    def limits(self, most: int) -> Iterator[int]:
        """Yield increasing limits of a rank's work to try, from even work up to `most`."""
        least = math.ceil(self.prefix[-1] / self.capacity)
        slack = least // 64
        while least + slack < most:
            yield least + slack
            slack = 2 * slack + 1
        yield most

    def best(
        self, limit: int, plus: Callable[[int, int], int], where: EndRanges
    ) -> tuple[int, list[int]] | None:
        """Return the best partition and its objective value, if no rank may exceed the limit.

        Returns None if there is no such partition with the allowed ends. Dynamic programming over
        stages, the number of them with a rank in the partial replica, and their end; `plus` adds
        the work of a stage to an objective value.
        """
        num_layers, room = len(self.prefix) - 1, self._room(limit)
        best: dict[_State, int] = {(0, 0): 0}
        steps: list[dict[_State, _State]] = []
        for stage in range(self.stages):
            among = where.low[stage + 1], where.high[stage + 1]
            here: dict[_State, int] = {}
            came: dict[_State, _State] = {}
            for state, price in best.items():
                for following, work in self._behind(state, stage, limit, room, among):
                    total = plus(price, work)
                    if following not in here or total < here[following]:
                        here[following], came[following] = total, state
            best = here
            steps.append(came)
        state = last = self.num_high, num_layers
        if state not in best:
            return None
        ends = [num_layers]
        for came in reversed(steps):
            state = came[state]
            ends.append(state[1])
        return best[last], [b - a for a, b in pairwise(ends[::-1])]

    def _room(self, limit: int) -> Callable[[int, int], int]:
        """Return a function that gives the largest total cost of the stages after a given one."""
        of_fewer = [limit // weight for weight in self.of_fewer]
        more = [limit // min(row) - own for row, own in zip(self.of_more, of_fewer, strict=True)]
        behind = [*accumulate(reversed(of_fewer), initial=0)][::-1]
        most_more = [*accumulate(reversed(more), max, initial=0)][::-1]

        def room(stage: int, num_high: int) -> int:
            return behind[stage + 1] + (self.num_high - num_high) * most_more[stage + 1]

        return room

    def _behind(
        self,
        state: "_State",
        stage: int,
        limit: int,
        room: Callable[[int, int], int],
        among: tuple[int, int],
    ) -> Iterator[tuple["_State", int]]:
        """Yield states after one more stage whose end is in `among`, with the work of its ranks.

        States are skipped if the later stages have no `room` for the remaining layers.
        """
        prefix, (num_high, begin), (first, last) = self.prefix, state, among
        for is_high, weight in self._weights(stage, num_high):
            following = num_high + is_high
            least = bisect_left(prefix, prefix[-1] - room(stage, following))
            for end in range(max(begin + 1, first, least), last + 1):
                work = (prefix[end] - prefix[begin]) * weight
                if work > limit:
                    break
                yield (following, end), work


_State = tuple[int, int]
"""State of the first stages: number with a rank in the partial replica, number of layers."""


_FINE: Final = 2**30
"""The largest weight; rounding errors are far below measurement errors."""
