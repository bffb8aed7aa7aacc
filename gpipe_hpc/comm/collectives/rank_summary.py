"""Sums, minima and maxima of numbers reported by all ranks, computed by a single all-reduce.

Each rank reports a few numbers. Their buffer has a separate slot for each rank of the all-reducing
group, because minimum and maximum are not sums. In a hierarchical group the slots are merged into
one, which is written to a slot of the next level's group. So thousands of ranks send no more than
eight do: `width` x 4 x `NUM_REPORTED` float64, 2 kB for groups of 8, in at most one group of each
level.
"""

from collections.abc import Sequence
from functools import partial
from typing import Final, NamedTuple

import torch

from gpipe_hpc.comm.collectives.group import ControlGroup
from gpipe_hpc.errors import ConfigError

NUM_REPORTED: Final = 8
"""Largest number of values that a rank may report; always this many are sent."""

_NUM_PARTS: Final = 4
_TOTAL, _LEAST, _GREATEST, _FIRST = range(_NUM_PARTS)


class RankSummary(NamedTuple):
    """Summary of the numbers reported by all ranks, one entry for each number.

    Args:
        totals: sums.
        least: minima.
        greatest: maxima.
        first: lowest rank that reported the maximum.
        each: the numbers of each rank if all ranks are in one group; else empty.
    """

    totals: tuple[float, ...]
    least: tuple[float, ...]
    greatest: tuple[float, ...]
    first: tuple[int, ...]
    each: tuple[tuple[float, ...], ...] = ()


class RankSlots:
    """Layout of one slot per rank of a group in a float64 tensor of `size` elements."""

    def __init__(self, group: ControlGroup, rank: int) -> None:
        self._width, self._position, self._rank = group.width, group.position, rank
        self._is_one_group = group.width == group.size
        self.size = self._width * _NUM_PARTS * NUM_REPORTED

    def of(self, numbers: Sequence[float]) -> list[float]:
        """Return slots that contain this rank's numbers; ConfigError if there are too many."""
        try:
            reported = [float(each) for each in numbers]
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"tell: expected a list of numbers for the other ranks, got {numbers!r}; return "
                f"a list, such as [0.5]"
            ) from error
        if len(reported) > NUM_REPORTED:
            raise ConfigError(
                f"tell: expected at most {NUM_REPORTED} numbers for the other ranks, got "
                f"{len(reported)}; return fewer, or gather the rest after the step"
            )
        own = reported + [0.0] * (NUM_REPORTED - len(reported))
        row = own * 3 + [self._rank + 1.0] * NUM_REPORTED  # 0 means no rank
        before = self._position % self._width
        return [0.0] * before * len(row) + row + [0.0] * (self._width - 1 - before) * len(row)

    def lift(self, slots: torch.Tensor, position: int) -> None:
        """Merge all slots into slot `position` of the next level's group; clear the others."""
        row = self._merge_rows(slots)
        slots.zero_()
        slots.view(-1, _NUM_PARTS, NUM_REPORTED)[position] = row

    def read(self, slots: torch.Tensor) -> RankSummary:
        """Return the summary of all slots; call it after the all-reduce."""
        totals, least, greatest, first = self._merge_rows(slots).tolist()
        ranks = tuple(int(number) - 1 for number in first)
        each: tuple[tuple[float, ...], ...] = ()
        if self._is_one_group:
            rows = slots.view(-1, _NUM_PARTS, NUM_REPORTED)[:, _TOTAL].tolist()
            each = tuple(map(tuple, rows))
        return RankSummary(tuple(totals), tuple(least), tuple(greatest), ranks, each)

    def _merge_rows(self, slots: torch.Tensor) -> torch.Tensor:
        rows = slots.view(-1, _NUM_PARTS, NUM_REPORTED)
        rows = rows[rows[:, _FIRST, 0] > 0]
        greatest = rows[:, _GREATEST].argmax(0, keepdim=True)  # the first of equal values
        return torch.stack(
            [
                rows[:, _TOTAL].cumsum(0)[-1],
                rows[:, _LEAST].amin(0),
                rows[:, _GREATEST].amax(0),
                rows[:, _FIRST].gather(0, greatest)[0],
            ]
        )


def summarise_ranks(numbers: Sequence[float], group: ControlGroup, rank: int) -> RankSummary:
    """Return the summary over the ranks of a group; a collective call."""
    slots = RankSlots(group, rank)
    tensor = torch.tensor(slots.of(numbers), dtype=torch.float64)
    group.all_reduce_hierarchical(tensor, partial(slots.lift, tensor))
    return slots.read(tensor)
