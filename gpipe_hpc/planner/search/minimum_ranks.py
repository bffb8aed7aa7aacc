"""Find the smallest number of ranks on which a model fits in memory."""

import math
from collections.abc import Callable
from typing import Final, NamedTuple

from gpipe_hpc.errors import ConfigError, GpipeError
from gpipe_hpc.planner.search.bounds import CombiningOptions, least_bytes
from gpipe_hpc.planner.search.cache import SearchCache
from gpipe_hpc.planner.search.candidates import Candidate, Space
from gpipe_hpc.planner.search.ranking import most_bytes
from gpipe_hpc.planner.search.trial import (
    CandidateTable,
    CombiningChoices,
    MemoryExcess,
    lay_out_in_memory,
)
from gpipe_hpc.units import bytes_text

_THRIFTY: Final = ("one_f_one_b", "v_half", "zb_v", "interleaved")
_MOST_RANKS: Final = 4096


class MinimumRanks(NamedTuple):
    """The smallest number of ranks for which some tried layout fits in memory.

    Attributes:
      layout: a layout that fits, not necessarily the fastest.
      first: the first number tried, a lower bound from weights, gradients and optimizer state.
      nearest: of the next smaller number of ranks, the layout that exceeds the memory least.
      schedules: schedules that were tried.
    """

    num_ranks: int
    layout: Candidate
    first: int
    nearest: MemoryExcess | None = None
    schedules: tuple[str, ...] = ()

    def fewer_text(self) -> str:
        """Describe why fewer ranks do not suffice; empty if there are none."""
        if self.num_ranks == 1:
            return ""
        if self.num_ranks == self.first:
            return "weights, gradients and optimizer state alone need that many ranks"
        if not self.schedules:
            return "the settings allow no layout on fewer ranks"
        tried = ", ".join(self.schedules)
        return (
            f"no layout tried on fewer ranks fits (tried: {tried}, with all useful recomputation)"
        )


def find_minimum_ranks(
    space_of: Callable[[int], Space], cache_of: Callable[[int], SearchCache]
) -> MinimumRanks:
    """Return the smallest number of equal ranks on which some layout fits in memory.

    `space_of` and `ground_of` return the search space and cache for a number of ranks. The
    schedules that keep the fewest micro-batches are tried with minimal recomputation for all
    micro-batch sizes. Raises ConfigError if no layout fits.
    """
    limit = most_bytes(space_of(1).base)
    assert limit is not None, "called only with a memory limit"
    first = _first(space_of(1), cache_of(1), limit)
    nearest: MemoryExcess | None = None
    tried: dict[str, None] = {}
    most = min(_MOST_RANKS, max(len(cache_of(1).layers), first) * 2)
    for num_ranks in range(first, most + 1):
        closest: MemoryExcess | None = None
        for candidate in _thrifty(space_of(num_ranks)):
            found = _lay_out(candidate, cache_of(num_ranks), space_of(num_ranks))
            if isinstance(found, CandidateTable):
                return MinimumRanks(num_ranks, found.candidate, first, nearest, tuple(tried))
            tried[candidate.schedule] = None
            if found and (closest is None or found.excess_bytes < closest.excess_bytes):
                closest = found
        nearest = closest or nearest
    lacking = (
        ""
        if nearest is None
        else (
            f"; the closest is {' '.join(nearest.candidate.overrides())}, whose rank "
            f"{nearest.rank} needs {bytes_text(nearest.nbytes)}"
        )
    )
    raise ConfigError(
        f"pipeline.memory_bytes: no layout that was tried on up to {most} ranks fits in "
        f"{bytes_text(limit)} a rank{lacking}; allow more memory, or use a smaller batch, shorter "
        f"samples or a model with smaller layers"
    )


def _first(space: Space, cache: SearchCache, limit: float) -> int:
    """Return a lower bound of the number of ranks; raise ConfigError if one layer does not fit."""
    samples = space.batch_size
    cache.cost_model(1)
    ways = CombiningOptions(
        by_host=False, divided="flat" in CombiningChoices.of(space.base, space.fixed, 1).shards
    )
    mean, largest = least_bytes(
        cache, space.base.kept_states.among(1), samples if ways.divided else 1
    )
    if largest > limit:
        raise ConfigError(
            f"pipeline.memory_bytes: one layer alone, with its gradient and optimizer state, needs "
            f"{bytes_text(largest)}, {bytes_text(largest - limit)} more than the "
            f"{bytes_text(limit)} of a rank, on any number of ranks; allow more memory, or split "
            f"the layer"
        )
    return max(1, math.ceil(mean / limit))


def _thrifty(space: Space) -> list[Candidate]:
    """Return the layouts of a space that need the least memory, small micro-batches first."""
    is_fixed = "schedule" in space.fixed
    found = [each for each in space if each.written.schedule in _THRIFTY or is_fixed]
    return sorted(found, key=lambda each: (-each.stages, -each.microbatches))


def _lay_out(
    candidate: Candidate, cache: SearchCache, space: Space
) -> CandidateTable | MemoryExcess | None:
    choices = CombiningChoices.of(space.base, space.fixed, 1)
    try:
        return lay_out_in_memory(candidate, cache, space.base, choices)
    except GpipeError:
        return None
