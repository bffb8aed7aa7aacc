"""Best-first search over layouts: bound all, simulate the most promising, rank the best.

A layout whose lower bound cannot beat the best one found is never laid out. The search ends with
the optimum, or at a limit of simulated actions; then it reports how much faster than the best one
found any other layout could be.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from gpipe_hpc.errors import GpipeError, PartitionError
from gpipe_hpc.planner.cutting.simulated import has_shared_ranks
from gpipe_hpc.planner.request import Request
from gpipe_hpc.planner.search.bounds import Bound, CombiningOptions, bound
from gpipe_hpc.planner.search.cache import SearchCache
from gpipe_hpc.planner.search.candidates import Candidate, Space
from gpipe_hpc.planner.search.trial import (
    CandidateEvaluation,
    CombiningChoices,
    MemoryExcess,
    try_out,
)

MOST_ACTIONS: Final = 1_000_000
"""Limit over all tables that a search simulates: a million actions take 10 to 20 seconds."""
_LARGEST: Final = 400_000  # actions of one table
_ENOUGH: Final = 24  # trials that always run, before only the bound decides
_FEW: Final = 6
_CUT_AGAIN: Final = 12  # number of best layouts that get a simulated cut, half a second each
_WORTH_CUTTING: Final = 0.99  # a simulated cut must save at least 1 % of the time
_AS_GOOD: Final = 0.99  # layouts that could gain less than 1 % are not tried


@dataclass(frozen=True)
class Ranking:
    """Result of a search: the layouts that fit, the fastest first, and counts of the others.

    Attributes:
      num_layouts: size of the space.
      num_refused: layouts that cannot be built.
      num_large: layouts whose table is too large to simulate.
      num_too_much: layouts that need too much memory.
      least_s: lower bound of the time of layouts that were not simulated; None if they cannot be
        faster.
      nearest: of the layouts that do not fit, the one that exceeds the memory least.
      num_unpinned: layouts whose stages cannot satisfy the pins.
      is_of_even_cuts: whether the bound holds only for partitions with even stages, because some
        layouts whose ranks hold several stages were not tried with simulated partitions.
    """

    trials: tuple[CandidateEvaluation, ...]
    num_layouts: int
    num_simulated: int
    num_refused: int
    num_large: int
    num_too_much: int
    least_s: float | None = None
    nearest: MemoryExcess | None = None
    refusal: str = ""
    num_unpinned: int = 0
    is_of_even_cuts: bool = False

    @property
    def distance(self) -> float:
        """Return the share of the best layout's time that an untried layout could save at most."""
        if not self.trials or self.least_s is None:
            return 0.0
        return max(0.0, 1.0 - self.least_s / self.trials[0].step_s)


def merged(rankings: Sequence[Ranking]) -> Ranking:
    """Merge the rankings of several search spaces into one."""
    nearest = [each.nearest for each in rankings if each.nearest is not None]
    least = [each.least_s for each in rankings if each.least_s is not None]
    return Ranking(
        tuple(sorted((t for each in rankings for t in each.trials), key=_by_time)),
        sum(each.num_layouts for each in rankings),
        sum(each.num_simulated for each in rankings),
        sum(each.num_refused for each in rankings),
        sum(each.num_large for each in rankings),
        sum(each.num_too_much for each in rankings),
        min(least, default=None),
        min(nearest, key=lambda each: each.excess_bytes, default=None),
        next((each.refusal for each in rankings if each.refusal), ""),
        sum(each.num_unpinned for each in rankings),
        any(each.is_of_even_cuts for each in rankings),
    )


def _by_time(trial: CandidateEvaluation) -> tuple[float, int]:
    return trial.step_s, trial.nbytes


@dataclass
class _Tally:
    """Results that a search has collected so far.

    Attributes:
      asked: for each trial's candidate, the candidate from which it was made (recomputation open).
      impossible: candidates that cannot be built.
    """

    trials: list[CandidateEvaluation] = field(default_factory=list)
    refused: list[GpipeError] = field(default_factory=list)
    unpinned: list[PartitionError] = field(default_factory=list)
    num_too_much: int = 0
    num_actions: int = 0
    nearest: MemoryExcess | None = None
    asked: dict[Candidate, Candidate] = field(default_factory=dict)
    impossible: set[Candidate] = field(default_factory=set)

    @property
    def best_s(self) -> float:
        return min((each.step_s for each in self.trials), default=float("inf"))

    def add(
        self, candidate: Candidate, trial: Callable[[], CandidateEvaluation | MemoryExcess]
    ) -> None:
        """Try a layout and record the result."""
        self.num_actions += num_actions(candidate)
        try:
            found = trial()
        except GpipeError as error:
            self.refused.append(error)
            self.impossible.add(candidate)
            return
        if isinstance(found, CandidateEvaluation):
            self.trials.append(found)
            self.asked[found.candidate] = candidate
            return
        self.num_too_much += 1
        if self.nearest is None or found.excess_bytes < self.nearest.excess_bytes:
            self.nearest = found


def num_actions(candidate: Candidate) -> int:
    """Estimate the number of compute actions of a layout's table."""
    return 3 * candidate.num_stages * candidate.microbatches


def most_bytes(base: Request) -> float | None:
    """Return the largest memory limit of any rank, or None without limits."""
    given = base.memory_bytes
    assert not isinstance(given, str), "the settings were read"
    if given is None or isinstance(given, int | float):
        return given
    return max(float(each) for each in given)


def search(space: Space, cache: SearchCache, most_actions: int = MOST_ACTIONS) -> Ranking:
    """Rank the layouts of a space that fit in memory by step time, then by memory.

    Layouts are compared with partitions of even stages. The best few are then tried with simulated
    partitions, unless the command line sets the partition; a layout that gets faster includes the
    setting for that. The search stops after `most_actions` simulated actions. Raises PartitionError
    if no layout satisfies the pins.
    """
    choices = CombiningChoices.of(space.base, space.fixed, len(cache.machine.cluster.hosts))
    limit = most_bytes(space.base)
    tally = _Tally()
    bounded: list[tuple[Bound, Candidate]] = []
    hopeless: list[tuple[Bound, Candidate]] = []
    large: list[tuple[Bound, Candidate]] = []
    num_layouts = 0
    for candidate in space:
        num_layouts += 1
        try:
            cache.check_pins(candidate.num_stages)
        except PartitionError as error:
            tally.unpinned.append(error)
            continue
        except GpipeError as error:
            tally.refused.append(error)
            continue
        try:
            ways = CombiningOptions("host" in choices.hierarchies, "flat" in choices.shards)
            found = bound(candidate, cache, space.base, ways)
        except GpipeError as error:
            tally.refused.append(error)
            continue
        if limit is not None and found.nbytes > limit:
            hopeless.append((found, candidate))
        elif num_actions(candidate) > min(_LARGEST, most_actions):
            large.append((found, candidate))
        else:
            bounded.append((found, candidate))
    if tally.unpinned and len(tally.unpinned) == num_layouts:
        raise tally.unpinned[-1]
    left = _simulate(bounded, cache, space, choices, tally, most_actions) + large
    if tally.nearest is None and not tally.trials:
        tally.nearest = _nearest(hopeless, cache, space, choices)
    tally.trials.sort(key=_by_time)
    asks_for_cuts = cache.cuts_by_time and not (cache.simulates_cuts or "partition" in space.fixed)
    uncut: list[tuple[Bound, Candidate]] = []
    if cache.simulates_cuts or asks_for_cuts:
        done = {tally.asked[each.candidate] for each in tally.trials[:_CUT_AGAIN]}
        done |= tally.impossible
        behind = ((known, each) for known, each in (*bounded, *large) if each not in done)
        uncut = [pair for pair in behind if has_shared_ranks(cache.placement(pair[1]))]
        _cut_again(tally, cache, space, choices)
    if cache.simulates_cuts:
        left += uncut  # tried or not: their bounds are valid for any cut
    return Ranking(
        tuple(tally.trials),
        num_layouts,
        len(tally.trials),
        len(tally.refused),
        len(large),
        len(hopeless) + tally.num_too_much,
        min((each.seconds for each, _ in left if each.seconds < tally.best_s), default=None),
        tally.nearest,
        str((tally.refused or tally.unpinned or [""])[0]),
        len(tally.unpinned),
        asks_for_cuts and bool(uncut),
    )


def _cut_again(tally: _Tally, cache: SearchCache, space: Space, choices: CombiningChoices) -> None:
    """Time the best layouts with simulated partitions if ranks hold several stages.

    If runs simulate partitions anyway, these times replace the others; else a layout requests a
    simulated partition if the gain is large enough.
    """
    opened = cache.with_open_cuts()
    worth = math.inf if cache.simulates_cuts else _WORTH_CUTTING
    for at, trial in enumerate(tally.trials[:_CUT_AGAIN]):
        if not has_shared_ranks(cache.placement(trial.candidate)):
            continue
        asking = replace(trial.candidate, simulates_cut=not cache.simulates_cuts)
        with suppress(GpipeError):  # keep the cut that fits
            found = try_out(asking, opened, space.base, choices)
            if isinstance(found, CandidateEvaluation) and found.step_s < worth * trial.step_s:
                tally.trials[at] = found
    tally.trials.sort(key=_by_time)


def _nearest(
    hopeless: Sequence[tuple[Bound, Candidate]],
    cache: SearchCache,
    space: Space,
    choices: CombiningChoices,
) -> MemoryExcess | None:
    """Return, of layouts that cannot fit, the one that exceeds the memory least."""
    by_need = sorted(hopeless, key=lambda each: (each[0].nbytes, -each[1].microbatches))
    tally = _Tally()
    for _, candidate in by_need[:_FEW]:
        tally.add(candidate, partial(try_out, candidate, cache, space.base, choices))
    return tally.nearest


def _simulate(
    bounded: Sequence[tuple[Bound, Candidate]],
    cache: SearchCache,
    space: Space,
    choices: CombiningChoices,
    tally: _Tally,
    most_actions: int,
) -> list[tuple[Bound, Candidate]]:
    """Simulate layouts, the most promising first; return those that were not tried."""

    def run(candidate: Candidate) -> None:
        tally.add(candidate, partial(try_out, candidate, cache, space.base, choices))

    by_guess = sorted(bounded, key=lambda each: each[0].probably_s)
    left = []
    for number, (known, candidate) in enumerate(by_guess):
        is_due = len(tally.trials) < _ENOUGH or known.seconds < _AS_GOOD * tally.best_s
        if is_due and tally.num_actions < most_actions:
            run(candidate)
        elif known.seconds < tally.best_s:
            left += [by_guess[number]]
    return left
