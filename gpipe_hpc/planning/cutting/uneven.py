"""Cut a sequence of layers into stages that unequal numbers of ranks hold.

Legend as in `minimax`: n layers, K stages, prefix[j] the cost of the first j layers. `low` stages
are on one rank less than the `high` ones; what counts is the cost of a stage over its ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

from gpipe_hpc.planning.cutting.minimax import integers, minimax
from gpipe_hpc.schedule.families.rerouted import num_copies


def cut_for_ranks(costs: Sequence[float], stages: int, ranks: int) -> list[int]:
    """Return the layers of each stage for which the busiest of some ranks has least to do.

    Each stage is on as many ranks as any other, or on one less; which ones, the cut chooses. Exact,
    as `minimax` is; among the best the one with the least sum of squares of what ranks have to do.
    No stage is empty. Raises PartitionError as `minimax` does, ScheduleError for fewer ranks than
    stages.
    """
    copies = num_copies(ranks, stages)
    even = minimax(costs, stages)
    if len(set(copies)) == 1:
        return even
    low, num_high = copies[-1], copies.count(copies[0])
    prefix = [0, *accumulate(integers(costs))]
    # Of a stage on fewer ranks each has more.
    work = _Work(prefix, stages, num_high, weights=(low + 1, low))
    most = work.busiest(even, copies_for(even, costs, ranks))
    found = next(filter(None, (work.best(limit, max) for limit in work.limits(most))))
    evenest = work.best(found[0], _plus_square)
    assert evenest is not None, "one was just found"
    return evenest[1]


def _plus_square(price: int, work: int) -> int:
    return price + work * work


def cut_for_paces(costs: Sequence[float], paces: Sequence[float]) -> list[int]:
    """Return the layers of each stage for which the slowest stage is as fast as can be.

    ``paces[stage]`` is how many times as long it takes there. Exact; among the best cuts the one
    with the least sum of squares of what stages take. No stage is empty. Raises PartitionError as
    `minimax` does.
    """
    even = minimax(costs, len(paces))
    if len(set(paces)) == 1:
        return even
    prefix, weights = [0, *accumulate(integers(costs))], integers(paces)
    ends = [0, *accumulate(even)]
    limit = max(
        (prefix[end] - prefix[start]) * weight
        for (start, end), weight in zip(pairwise(ends), weights, strict=True)
    )
    limit, _ = _best_of_paces(prefix, weights, limit, max)
    return _best_of_paces(prefix, weights, limit, _plus_square)[1]


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


def cut_where(costs: Sequence[float], paces: Sequence[float], room: Room) -> list[int] | None:
    """Return the cut as `cut_for_paces` does, of those whose stages all fit; None: there is none.

    Exact, whatever fits.
    """
    prefix, weights = [0, *accumulate(integers(costs))], integers(paces)
    ends = [0, *accumulate(cut_for_paces(costs, paces))]
    least = max(
        (prefix[end] - prefix[start]) * weight
        for (start, end), weight in zip(pairwise(ends), weights, strict=True)
    )
    # Few cuts are looked at first: to ask whether a stage fits takes long.
    for limit in (*(int(wider * least) for wider in _WIDER), prefix[-1] * max(weights)):
        found = _best_where(prefix, weights, limit, max, room)
        if found is not None:
            evenest = _best_where(prefix, weights, found[0], _plus_square, room)
            assert evenest is not None, "one was just found"
            return evenest[1]
    return None


def _best_of_paces(
    prefix: list[int], weights: Sequence[int], limit: int, plus: Callable[[int, int], int]
) -> tuple[int, list[int]]:
    """Return the least price, and its cut, of those in which no stage takes more than a limit."""
    found = _best_where(prefix, weights, limit, plus, ROOM_FOR_ALL)
    assert found is not None, "the limit is that of some cut"
    return found


def _best_where(
    prefix: list[int],
    weights: Sequence[int],
    limit: int,
    plus: Callable[[int, int], int],
    room: Room,
) -> tuple[int, list[int]] | None:
    """Return the same of those whose stages fit; None if there are none."""
    num_layers = len(prefix) - 1
    best: dict[int, int] = {0: 0}
    steps: list[dict[int, int]] = []
    for stage, weight in enumerate(weights):
        left = len(weights) - 1 - stage
        here: dict[int, int] = {}
        came: dict[int, int] = {}
        for start, price in best.items():
            for end in range(start + 1 if left else num_layers, num_layers - left + 1):
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


def copies_for(counts: Sequence[int], costs: Sequence[float], ranks: int) -> list[int]:
    """Return how many of the ranks hold each stage of a cut: the cheapest stages one less.

    Of stages that cost the same the later ones, which keep fewer micro-batches.
    """
    stages = len(counts)
    copies = num_copies(ranks, stages)
    prefix = [0, *accumulate(integers(costs))]
    ends = [0, *accumulate(counts)]
    amounts = [prefix[end] - prefix[start] for start, end in pairwise(ends)]
    dearest = sorted(range(stages), key=lambda stage: (-amounts[stage], stage))
    found = [0] * stages
    for stage, number in zip(dearest, copies, strict=True):
        found[stage] = number
    return found


class _Work(NamedTuple):
    """What ranks have to do, in whole units: the cost of a stage times its weight.

    `weights`: of stages on fewer ranks, and of those on more.
    """

    prefix: list[int]
    stages: int
    num_high: int
    weights: tuple[int, int]

    def busiest(self, counts: Sequence[int], copies: Sequence[int]) -> int:
        """Return what the busiest rank of a cut has to do."""
        ends = [0, *accumulate(counts)]
        high = max(copies)
        return max(
            (self.prefix[end] - self.prefix[start]) * self.weights[number == high]
            for (start, end), number in zip(pairwise(ends), copies, strict=True)
        )

    def limits(self, most: int) -> Iterator[int]:
        """Yield limits to try: from where all ranks are equally busy, the last one is `most`."""
        of_more, of_fewer = sorted(self.weights)
        ranks = of_more * self.stages + self.num_high
        least = -(-self.prefix[-1] * of_more * of_fewer // ranks)
        slack = least // 64
        while least + slack < most:
            yield least + slack
            slack = 2 * slack + 1
        yield most

    def best(self, limit: int, plus: Callable[[int, int], int]) -> tuple[int, list[int]] | None:
        """Return the least price, and its cut, of those in which no rank has more than a limit.

        None if there are none. Dynamic programming over the stages so far, how many of them are on
        more ranks, and their end; `plus` adds a stage's work to a price.
        """
        num_layers = len(self.prefix) - 1
        best: dict[_State, int] = {_State(0, 0): 0}
        steps: list[dict[_State, _State]] = []
        for left in reversed(range(self.stages)):
            here: dict[_State, int] = {}
            came: dict[_State, _State] = {}
            for state, price in best.items():
                for following, work in self._stages_behind(state, limit, num_layers - left):
                    if not self._has_room(following, left, limit):
                        continue
                    total = plus(price, work)
                    if following not in here or total < here[following]:
                        here[following], came[following] = total, state
            best = here
            steps.append(came)
        state = _State(self.num_high, num_layers)
        if state not in best:
            return None
        ends = [num_layers]
        for came in reversed(steps):
            state = came[state]
            ends.append(state.end)
        return best[_State(self.num_high, num_layers)], [b - a for a, b in pairwise(ends[::-1])]

    def _has_room(self, state: "_State", left: int, limit: int) -> bool:
        """Say whether what is left of the layers could be in the stages that are left."""
        num_high = self.num_high - state.num_high
        of_fewer, of_more = (limit // weight for weight in self.weights)
        room = num_high * of_more + (left - num_high) * of_fewer
        return num_high <= left and self.prefix[-1] - self.prefix[state.end] <= room

    def _stages_behind(
        self, state: "_State", limit: int, last: int
    ) -> Iterator[tuple["_State", int]]:
        """Yield where one more stage leads, and what its ranks have to do."""
        for is_high, weight in enumerate(self.weights):
            if state.num_high + is_high > self.num_high:
                continue
            for end in range(state.end + 1, last + 1):
                work = (self.prefix[end] - self.prefix[state.end]) * weight
                if work > limit:
                    break
                yield _State(state.num_high + is_high, end), work


class _State(NamedTuple):
    """The first stages of a cut: how many of them are on more ranks, and the layers they have."""

    num_high: int
    end: int
