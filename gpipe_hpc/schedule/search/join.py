"""Join the two halves of split backwards if running them separately saves no time."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain

from gpipe_hpc.schedule.costs import Costs
from gpipe_hpc.schedule.simulator import simulate
from gpipe_hpc.schedule.table.actions import Action, Op
from gpipe_hpc.schedule.table.schedule import Schedule

Fits = Callable[[Schedule], bool]


def join_backwards(schedule: Schedule, costs: Costs, fits: Fits, max_trials: int) -> Schedule:
    """Return a table that is no slower and splits few more backwards than needed to fill bubbles.

    A joined ``W`` moves to its ``I``, and both become a ``B``. Splitting has overhead, whether or
    not `costs` contains it (``B`` cheaper than ``I`` plus ``W``), so on a tie ``B`` wins. Mostly
    the last backwards of a rank are worth splitting. Their number is therefore chosen first, for
    all ranks and then for each; after that, groups of the remaining splits are joined. Runs at most
    `max_trials` simulations.
    """
    search = _Search(schedule, costs, fits, max_trials)
    splits = [[action for action in row if action.op is Op.I] for row in schedule.ranks]
    most = max(map(len, splits), default=0)
    for level in _levels(most):
        search.attempt(chain.from_iterable(_without_last(each, level) for each in splits))
    for _ in range(2):
        for own in splits:
            others = search.joined.difference(own)
            for level in _levels(len(own)):
                search.attempt(chain(others, _without_last(own, level)))
    for own in splits:
        for group in _bisections([action for action in own if action not in search.joined]):
            search.attempt(chain(search.joined, group))
    return search.best


class _Search:
    """The best table so far, and the backwards that are joined in it."""

    def __init__(self, schedule: Schedule, costs: Costs, fits: Fits, max_trials: int) -> None:
        self._schedule, self._costs, self._fits = schedule, costs, fits
        self._num_left = max_trials
        self.best = schedule
        self.joined: frozenset[Action] = frozenset()
        self._makespan = simulate(schedule, costs).makespan

    def attempt(self, actions: Iterator[Action] | chain[Action]) -> None:
        """Try joining the given backwards.

        The table is kept if it is faster, or as fast with fewer splits.
        """
        joined = frozenset(actions)
        if joined == self.joined or not self._num_left:
            return
        self._num_left -= 1
        candidate = _joined(self._schedule, joined)
        if not self._fits(candidate):
            return
        makespan = simulate(candidate, self._costs).makespan
        if (makespan, -len(joined)) < (self._makespan, -len(self.joined)):
            self.best, self.joined, self._makespan = candidate, joined, makespan


def _levels(most: int) -> list[int]:
    """Return numbers below `most` to try: small ones one by one, larger ones in growing steps."""
    levels, level = [], 0
    while level < most:
        levels.append(level)
        level += max(1, level // 4)
    return levels


def _without_last(splits: Sequence[Action], number: int) -> Sequence[Action]:
    return splits[: max(0, len(splits) - number)]


def _bisections(splits: Sequence[Action]) -> Iterator[Sequence[Action]]:
    """Yield all splits, then recursively each half of them, down to single actions."""
    if splits:
        yield splits
    if len(splits) > 1:
        middle = len(splits) // 2
        yield from _bisections(splits[:middle])
        yield from _bisections(splits[middle:])


def _joined(schedule: Schedule, chosen: frozenset[Action]) -> Schedule:
    rows = tuple(
        tuple(
            action._replace(op=Op.B) if action in chosen else action
            for action in row
            if not (action.op is Op.W and action._replace(op=Op.I) in chosen)
        )
        for row in schedule.ranks
    )
    return replace(schedule, ranks=rows)
