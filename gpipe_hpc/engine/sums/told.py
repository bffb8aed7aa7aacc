"""What ranks tell of themselves, in sum: as much travels of thousands of ranks as of eight.

Each rank has a row of few numbers. Where ranks add, each has a slot of its own for its row, as many
as meet at once; what the slots of a group hold becomes one row, which takes a slot of the next
level's group.

What that costs: `width` x 4 x `NUM_TOLD` float64 in the sum of a step, 2 kB where groups of 8 add.
Every group sums as much, and a rank is in at most one group of each level. Each rank has a slot, as
the least and the greatest are no sums.
"""

from collections.abc import Sequence
from functools import partial
from typing import Final, NamedTuple

import torch

from gpipe_hpc.comm.group import Gathering
from gpipe_hpc.errors import ConfigError

NUM_TOLD: Final = 8
"""How many numbers a rank may tell; always as many travel."""

_NUM_PARTS: Final = 4
_TOTAL, _LEAST, _GREATEST, _FIRST = range(_NUM_PARTS)


class Overall(NamedTuple):
    """What all ranks tell, number by number: `first` is the lowest rank that has the greatest.

    `each`: by rank what it told, where all add at once; empty where groups of them do.
    """

    totals: tuple[float, ...]
    least: tuple[float, ...]
    greatest: tuple[float, ...]
    first: tuple[int, ...]
    each: tuple[tuple[float, ...], ...] = ()


class Slots:
    """The slots of one group of ranks, all of them or those of a level: float64[`size`]."""

    def __init__(self, group: Gathering, rank: int) -> None:
        self._width, self._position, self._rank = group.width, group.position, rank
        self._is_one_group = group.width == group.size
        self.size = self._width * _NUM_PARTS * NUM_TOLD

    def of(self, numbers: Sequence[float]) -> list[float]:
        """Return slots of which this rank's own is filled; raises ConfigError for too many."""
        try:
            told = [float(each) for each in numbers]
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"tell: expected a list of numbers for the other ranks, got {numbers!r}; return "
                f"one, as [0.5]"
            ) from error
        if len(told) > NUM_TOLD:
            raise ConfigError(
                f"tell: expected at most {NUM_TOLD} numbers for the other ranks, got {len(told)}; "
                f"tell less, or gather the rest behind the step"
            )
        own = told + [0.0] * (NUM_TOLD - len(told))
        row = own * 3 + [self._rank + 1.0] * NUM_TOLD  # 0 stands for nobody
        ahead = self._position % self._width
        return [0.0] * ahead * len(row) + row + [0.0] * (self._width - 1 - ahead) * len(row)

    def lift(self, slots: torch.Tensor, position: int) -> None:
        """Put what the slots hold into the one of a position of the next group, the rest empty."""
        row = self._merged(slots)
        slots.zero_()
        slots.view(-1, _NUM_PARTS, NUM_TOLD)[position] = row

    def read(self, slots: torch.Tensor) -> Overall:
        """Return what all ranks told, once all have added."""
        totals, least, greatest, first = self._merged(slots).tolist()
        ranks = tuple(int(number) - 1 for number in first)
        each: tuple[tuple[float, ...], ...] = ()
        if self._is_one_group:
            rows = slots.view(-1, _NUM_PARTS, NUM_TOLD)[:, _TOTAL].tolist()
            each = tuple(map(tuple, rows))
        return Overall(tuple(totals), tuple(least), tuple(greatest), ranks, each)

    def _merged(self, slots: torch.Tensor) -> torch.Tensor:
        rows = slots.view(-1, _NUM_PARTS, NUM_TOLD)
        rows = rows[rows[:, _FIRST, 0] > 0]
        greatest = rows[:, _GREATEST].argmax(0, keepdim=True)  # the first of equal ones
        return torch.stack(
            [
                rows[:, _TOTAL].cumsum(0)[-1],
                rows[:, _LEAST].amin(0),
                rows[:, _GREATEST].amax(0),
                rows[:, _FIRST].gather(0, greatest)[0],
            ]
        )


def tell_all(numbers: Sequence[float], group: Gathering, rank: int) -> Overall:
    """Return what the ranks of a group tell, at once; the same call on each of them."""
    slots = Slots(group, rank)
    tensor = torch.tensor(slots.of(numbers), dtype=torch.float64)
    group.climb(tensor, partial(slots.lift, tensor))
    return slots.read(tensor)
