"""Changes of step times since the stored results. Does not import torch."""

import math
from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.figures import FEWEST, Figures, Row

# Difference between two runs of the same program.
_LEAST = 0.02


class Move(NamedTuple):
    """Step time of a cell relative to the floor of its block, now and stored, with both spreads."""

    block: str
    name: str
    now: float
    kept: float
    spread: float

    @property
    def is_beyond(self) -> bool:
        """Return whether the change exceeds the spread."""
        return abs(self.now / self.kept - 1.0) > self.spread

    def __str__(self) -> str:
        return (
            f"{self.block}: {self.name}: {self.now:.3f} of the floor, kept {self.kept:.3f}: "
            f"{self.now / self.kept - 1.0:+.1%}, spread {self.spread:.1%}"
        )


def moves(now: Figures, kept: Figures) -> Iterator[Move]:
    """Yield the cells present in both results, each relative to the floor of the same run.

    Cells with too few undisturbed steps in either are omitted.
    """
    for block, rows in now.blocks.items():
        floors = [_floor(now, block), _floor(kept, block)]
        if not all(floor and floor.is_sound for floor in floors):
            continue
        for row in rows:
            before = kept.find(block, row.name)
            if row.contestant == "floor" or not row.is_sound or not (before and before.is_sound):
                continue
            ratios, spreads = [], []
            for each, floor in zip((row, before), floors, strict=True):
                assert floor is not None and floor.median_s and each.median_s, "checked above"
                ratios.append(each.median_s / floor.median_s)
                spreads.append(math.hypot(each.spread, floor.spread))
            yield Move(block, row.name, ratios[0], ratios[1], max(_LEAST, sum(spreads)))


def _floor(figures: Figures, block: str) -> Row | None:
    return figures.find(block, "floor local")


def report(now: Figures, kept: Figures) -> str:
    """Return text on the changes that exceed the spread, or that there are none."""
    compared = list(moves(now, kept))
    if not compared:
        return (
            f"nothing to compare: no cell has {FEWEST} undisturbed steps both here and in the "
            f"figures that are kept"
        )
    beyond = [move for move in compared if move.is_beyond]
    where = f"kept: {kept.date}, {kept.machine}"
    if not beyond:
        return f"{len(compared)} cells, none moved beyond the spread ({where})"
    lines = [f"{len(beyond)} of {len(compared)} cells moved beyond the spread ({where}):"]
    return "\n".join([*lines, *(f"  {move}" for move in beyond)])
