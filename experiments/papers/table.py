"""A table of a paper: its figures beside ours, and what ours were made from."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from gpipe_hpc.schedule import Costs, Timeline, build, simulate

WITHIN: Final = 0.10  # of a paper's figure that gives enough to go by


@dataclass(frozen=True)
class Figure:
    """A figure of a paper and ours; `is_given`: whether the paper has all that it depends on."""

    what: str
    paper: float
    ours: float
    is_given: bool = True

    @property
    def error(self) -> float:
        """Return by which share of the paper's figure ours is larger."""
        if self.paper:
            return self.ours / self.paper - 1
        return 0.0 if abs(self.ours) < 1e-9 else math.inf

    @property
    def is_equal(self) -> bool:
        """Return whether both are one number, but for the rounding of sums of floats."""
        return math.isclose(self.paper, self.ours, rel_tol=1e-9, abs_tol=1e-9)

    @property
    def is_near(self) -> bool:
        """Return whether ours is within a tenth of the paper's."""
        return abs(self.error) <= WITHIN


@dataclass(frozen=True)
class Table:
    """Figures of one table of a paper, what it gives for them and what is assumed beside that."""

    title: str
    given: str
    assumed: str
    figures: tuple[Figure, ...]
    note: str = ""


@dataclass(frozen=True)
class Paper:
    """What is held against a paper, by how it is held.

    `formulas` and `counts` must be equal; formulas take milliseconds, counts build models on the
    meta device. `simulated` are held to a tenth.
    """

    name: str
    title: str
    formulas: Sequence[Callable[[], Table]] = field(default=())
    counts: Sequence[Callable[[], Table]] = field(default=())
    simulated: Sequence[Callable[[], Table]] = field(default=())


def as_printed(value: float, printed: str, unit: float = 1.0) -> tuple[float, float]:
    """Return a printed figure, and a value rounded to as many digits behind the point."""
    digits = len(printed.partition(".")[2])
    return float(printed), round(value / unit, digits)


def counted(what: str, printed: str, value: float, unit: float = 1.0) -> Figure:
    """Return a figure that must be what is printed once it is rounded alike."""
    return Figure(what, *as_printed(value, printed, unit))


def timed(
    name: str,
    ranks: int,
    microbatches: int,
    costs: Costs,
    recompute: str = "never",
    **options: Any,
) -> Timeline:
    """Return the simulated step of a schedule known by name."""
    table = build(name, ranks=ranks, microbatches=microbatches, recompute=recompute, **options)
    return simulate(table, costs)


def longest_span(timeline: Timeline) -> float:
    """Return the longest time that a rank takes from its first action to the end of its last."""
    return max(row[-1].end_s - row[0].start_s for row in timeline.events)
