"""Cut a sequence of layers into stages that unequal numbers of ranks hold.

Legend as in `minimax`: n layers, K stages, prefix[j] the cost of the first j layers. `low` stages
are on one rank less than the `high` ones; what counts is the cost of a stage over its ranks.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

from gpipe_hpc.planner.cutting.minimax import integers, minimax
from gpipe_hpc.planner.cutting.pins import Ends, Pins
from gpipe_hpc.schedule.families.rerouted import num_copies


def cut_for_ranks(
    costs: Sequence[float],
    stages: int,
    ranks: int,
    paces: Sequence[float] = (),
    pins: Pins = (),
) -> list[int]:
    """Return the layers of each stage for which the busiest of some ranks has least to do.

    Each stage is on as many ranks as any other, or on one less; which ones, the cut chooses.
    ``paces[rank]`` is how many times as long a rank takes, empty where all are alike; those of a
    stage share its work so that they end together. Exact, as `minimax` is; among the best the one
    with the least sum of squares of what ranks have to do. No stage is empty, and each layer of
    `pins` is on its stage. Raises PartitionError as `minimax` does, ScheduleError for fewer ranks
    than stages.
    """
    copies = num_copies(ranks, stages)
    even = minimax(costs, stages, pins=pins)
    are_alike = len(set(paces)) <= 1
    if are_alike and len(set(copies)) == 1:
        return even
    prefix = [0, *accumulate(integers(costs))]
    work = _Work.of(prefix, stages, ranks, paces)
    most, _ = work.dealt(even)
    where = Ends.where(pins, len(costs), stages)
    found = next(filter(None, (work.best(limit, max, where) for limit in work.limits(most))))
    evenest = work.best(found[0], _plus_square, where)
    assert evenest is not None, "one was just found"
    return evenest[1]


def _plus_square(price: int, work: int) -> int:
    return price + work * work


def cut_for_paces(costs: Sequence[float], paces: Sequence[float], pins: Pins = ()) -> list[int]:
    """Return the layers of each stage for which the slowest stage is as fast as can be.

    ``paces[stage]`` is how many times as long it takes there. Exact; among the best cuts the one
    with the least sum of squares of what stages take. No stage is empty. Each layer of `pins` is on
    its stage. Raises PartitionError as `minimax` does.
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
    where = Ends.where(pins, len(costs), len(paces))
    limit, _ = _best_of_paces(prefix, weights, where, limit, max)
    return _best_of_paces(prefix, weights, where, limit, _plus_square)[1]


Asked = Callable[[int, int, int], bool]
"""Says something of a stage, by its number, with the layers from a start to ahead of an end."""


class Room(NamedTuple):
    """Which layers there is room for in each stage.

    `fits`: whether it may have them; with more layers behind them it may fit again. `is_spent`:
    whether it may have neither them nor them with any more behind; asked of what does not fit.
    """

    fits: Asked
    is_spent: Asked


ROOM_FOR_ALL: Final = Room(lambda *_: True, lambda *_: False)
_WIDER: Final = (1.0, 1.25, 1.5, 2.0, 4.0)  # times the bottleneck of a cut that need not fit


def cut_where(
    costs: Sequence[float], paces: Sequence[float], room: Room, pins: Pins = ()
) -> list[int] | None:
    """Return the cut as `cut_for_paces` does, of those whose stages all fit; None: there is none.

    Exact, whatever fits and is pinned.
    """
    prefix, weights = [0, *accumulate(integers(costs))], integers(paces)
    ends = [0, *accumulate(cut_for_paces(costs, paces, pins))]
    where = Ends.where(pins, len(costs), len(paces))
    least = max(
        (prefix[end] - prefix[start]) * weight
        for (start, end), weight in zip(pairwise(ends), weights, strict=True)
    )
    # Few cuts are looked at first: to ask whether a stage fits takes long.
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
    where: Ends,
    limit: int,
    plus: Callable[[int, int], int],
) -> tuple[int, list[int]]:
    """Return the least price, and its cut, of those in which no stage takes more than a limit."""
    found = _best_where(prefix, weights, where, limit, plus, ROOM_FOR_ALL)
    assert found is not None, "the limit is that of some cut"
    return found


def _best_where(
    prefix: list[int],
    weights: Sequence[int],
    where: Ends,
    limit: int,
    plus: Callable[[int, int], int],
    room: Room,
) -> tuple[int, list[int]] | None:
    """Return the same of those whose stages fit; None if there are none."""
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
    """Return how many of the ranks hold each stage of a cut: the cheapest stages one less.

    Of stages that cost the same the later ones, which keep fewer micro-batches. With unequal
    `paces` of ranks, whichever stages leave the busiest rank least to do.
    """
    stages = len(counts)
    prefix = [0, *accumulate(integers(costs))]
    if len(set(paces)) > 1:
        return _Work.of(prefix, stages, ranks, paces).dealt(counts)[1]
    copies = num_copies(ranks, stages)
    ends = [0, *accumulate(counts)]
    amounts = [prefix[end] - prefix[start] for start, end in pairwise(ends)]
    dearest = sorted(range(stages), key=lambda stage: (-amounts[stage], stage))
    found = [0] * stages
    for stage, number in zip(dearest, copies, strict=True):
        found[stage] = number
    return found


def paces_in_rows(copies: Sequence[int], paces: Sequence[float]) -> tuple[float, ...]:
    """Return how many times as long stages in rows take, on the average of their micro-batches.

    `copies`: how many ranks hold each stage; `paces`: those of the ranks, row by row.
    """
    numbers = iter(range(len(paces)))
    speeds = [0.0] * len(copies)
    for row in range(max(copies)):
        for stage, count in enumerate(copies):
            if row < count:
                speeds[stage] += 1 / paces[next(numbers)]
    return tuple(count / speed for count, speed in zip(copies, speeds, strict=True))


class _Work(NamedTuple):
    """What ranks have to do, in whole units: the cost of a stage times its weight.

    Ranks are numbered row by row; behind `num_rows` rows of all stages the last one, of `num_high`
    ranks, has holes. `of_fewer` are the weights of stages without a rank in that row,
    `of_more[stage]` of those with one, by how many stages ahead have one, too: each next has the
    next rank, and behind the last there is none. All ranks are equally busy where each has the cost
    of all layers over `capacity`.
    """

    prefix: list[int]
    num_rows: int
    num_high: int
    of_fewer: list[int]
    of_more: list[list[int]]
    capacity: Fraction

    @classmethod
    def of(cls, prefix: list[int], stages: int, ranks: int, paces: Sequence[float]) -> "_Work":
        """Return that of some ranks; `paces` are empty where all are alike."""
        low, num_high = divmod(ranks, stages)
        if len(set(paces)) <= 1:
            # Of a stage on fewer ranks each has more.
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
        """Return what the busiest rank of a cut has to do, and how many ranks hold each stage.

        The ranks of the last row are with the stages where that is least; of equals with the first.
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
        """Yield whether a stage may have a rank in the last row, and its weight."""
        if self.num_high - num_high < self.stages - stage:
            yield 0, self.of_fewer[stage]
        if num_high < self.num_high:
            yield 1, self.of_more[stage][num_high]

    def limits(self, most: int) -> Iterator[int]:
        """Yield limits to try: from where all ranks are equally busy, the last one is `most`."""
        least = math.ceil(self.prefix[-1] / self.capacity)
        slack = least // 64
        while least + slack < most:
            yield least + slack
            slack = 2 * slack + 1
        yield most

    def best(
        self, limit: int, plus: Callable[[int, int], int], where: Ends
    ) -> tuple[int, list[int]] | None:
        """Return the least price, and its cut, of those in which no rank has more than a limit.

        None if there are none that end `where` they may. Dynamic programming over the stages so
        far, how many of them are on more ranks, and their end; `plus` adds a stage's work to a
        price.
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
        """Return what tells how much the stages behind one could cost together, at the most."""
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
        """Yield where one more stage leads, which ends among two numbers, and its ranks' work.

        Only where the stages behind it have `room` for what is left.
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
"""The first stages of a cut: how many of them are on more ranks, and the layers they have."""


_FINE: Final = 2**30
"""The largest weight: what is rounded off is far less than what can be measured."""
