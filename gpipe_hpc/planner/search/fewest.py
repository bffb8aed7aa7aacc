"""The least number of ranks on which a model fits into the memory of each."""

import math
from collections.abc import Callable
from typing import Final, NamedTuple

from gpipe_hpc.errors import ConfigError, GpipeError
from gpipe_hpc.planner.search.bounds import Ways, least_bytes
from gpipe_hpc.planner.search.candidates import Candidate, Space
from gpipe_hpc.planner.search.ground import Ground
from gpipe_hpc.planner.search.ranking import most_bytes
from gpipe_hpc.planner.search.trial import Choices, Laid, TooMuch, lay_out_in_memory
from gpipe_hpc.units import bytes_text

_THRIFTY: Final = ("one_f_one_b", "v_half", "zb_v", "interleaved")
_MOST_RANKS: Final = 4096


class Fewest(NamedTuple):
    """The least number of ranks for which some layout of those tried fits.

    `layout`: one that fits, not the fastest. `first`: the least number that was tried; weights,
    gradients and optimizer alone need as many. `nearest`: what of the next smaller number comes
    nearest, if any was laid out. `schedules`: those that were tried.
    """

    num_ranks: int
    layout: Candidate
    first: int
    nearest: TooMuch | None = None
    schedules: tuple[str, ...] = ()

    def fewer_text(self) -> str:
        """Say what is known of fewer ranks; nothing where there are none."""
        if self.num_ranks == 1:
            return ""
        if self.num_ranks == self.first:
            return "weights, gradients and optimizer alone need as many"
        if not self.schedules:
            return "on fewer no layout was tried, as the settings allow none"
        tried = ", ".join(self.schedules)
        return (
            f"no layout that was tried fits on fewer (tried: {tried}, as much recomputed as fits)"
        )


def fewest_ranks(space_of: Callable[[int], Space], ground_of: Callable[[int], Ground]) -> Fewest:
    """Return the least number of equal ranks on which some layout fits; ConfigError if none does.

    `space_of`, `ground_of`: for so many ranks. Tried are the schedules that keep least, with as
    little recomputation as fits, for all sizes of micro-batches.
    """
    limit = most_bytes(space_of(1).base)
    assert limit is not None, "asked for within a memory"
    first = _first(space_of(1), ground_of(1), limit)
    nearest: TooMuch | None = None
    tried: dict[str, None] = {}
    most = min(_MOST_RANKS, max(len(ground_of(1).layers), first) * 2)
    for num_ranks in range(first, most + 1):
        closest: TooMuch | None = None
        for candidate in _thrifty(space_of(num_ranks)):
            found = _lay_out(candidate, ground_of(num_ranks), space_of(num_ranks))
            if isinstance(found, Laid):
                return Fewest(num_ranks, found.candidate, first, nearest, tuple(tried))
            tried[candidate.schedule] = None
            if found and (closest is None or found.excess_bytes < closest.excess_bytes):
                closest = found
        nearest = closest or nearest
    lacking = (
        ""
        if nearest is None
        else (
            f"; what comes nearest is {' '.join(nearest.candidate.overrides())}, whose rank "
            f"{nearest.rank} needs {bytes_text(nearest.nbytes)}"
        )
    )
    raise ConfigError(
        f"pipeline.memory_bytes: no layout that was tried on up to {most} ranks fits, expected "
        f"room for the model, got {bytes_text(limit)} a rank{lacking}; allow more memory, or take "
        f"a smaller batch, shorter samples or a model of smaller layers"
    )


def _first(space: Space, ground: Ground, limit: float) -> int:
    """Return the least number of ranks that could do; ConfigError where one layer is too much."""
    samples = space.batch_size
    ground.gauge(1)
    ways = Ways(by_host=False, divided="flat" in Choices.of(space.base, space.fixed, 1).shards)
    mean, largest = least_bytes(
        ground, space.base.kept_states.among(1), samples if ways.divided else 1
    )
    if largest > limit:
        raise ConfigError(
            f"pipeline.memory_bytes: one layer alone, with its gradient and optimizer, needs "
            f"{bytes_text(largest)}, expected at most the {bytes_text(limit)} of a rank, got more "
            f"by {bytes_text(largest - limit)} on any number of ranks; allow more memory, or split "
            f"the layer"
        )
    return max(1, math.ceil(mean / limit))


def _thrifty(space: Space) -> list[Candidate]:
    """Return the layouts of a space that keep least, those of small micro-batches first."""
    is_fixed = "schedule" in space.fixed
    found = [each for each in space if each.written.schedule in _THRIFTY or is_fixed]
    return sorted(found, key=lambda each: (-each.stages, -each.microbatches))


def _lay_out(candidate: Candidate, ground: Ground, space: Space) -> Laid | TooMuch | None:
    choices = Choices.of(space.base, space.fixed, 1)
    try:
        return lay_out_in_memory(candidate, ground, space.base, choices)
    except GpipeError:
        return None
