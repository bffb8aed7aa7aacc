"""A table of a paper: its figures, those of gpipe_hpc, and the inputs of the latter."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from gpipe_hpc.schedule import Costs, Timeline, build, simulate

WITHIN: Final = 0.10  # tolerance of simulated figures


@dataclass(frozen=True)
class Figure:
    """A figure of a paper and of gpipe_hpc; `is_given`: the paper specifies all inputs."""

    what: str
    paper: float
    ours: float
    is_given: bool = True

    @property
    def error(self) -> float:
        """Return the relative difference from the paper's figure."""
        if self.paper:
            return self.ours / self.paper - 1
        return 0.0 if abs(self.ours) < 1e-9 else math.inf

    @property
    def is_equal(self) -> bool:
        """Return whether both are equal up to floating-point rounding."""
        return math.isclose(self.paper, self.ours, rel_tol=1e-9, abs_tol=1e-9)

    @property
    def is_near(self) -> bool:
        """Return whether the difference is at most a tenth."""
        return abs(self.error) <= WITHIN


@dataclass(frozen=True)
class Table:
    """Figures of one table of a paper, its inputs, and additional assumptions."""

    title: str
    given: str
    assumed: str
    figures: tuple[Figure, ...]
    note: str = ""


@dataclass(frozen=True)
class Paper:
    """The tables of a paper, by kind of comparison.

    `formulas` and `counts` must be equal; formulas take milliseconds, counts build models on the
    meta device. `simulated` figures are compared with a tolerance of a tenth.
    """

    name: str
    title: str
    formulas: Sequence[Callable[[], Table]] = field(default=())
    counts: Sequence[Callable[[], Table]] = field(default=())
    simulated: Sequence[Callable[[], Table]] = field(default=())


def as_printed(value: float, printed: str, unit: float = 1.0) -> tuple[float, float]:
    """Return a printed figure, and a value rounded to the same number of decimals."""
    digits = len(printed.partition(".")[2])
    return float(printed), round(value / unit, digits)


def counted(what: str, printed: str, value: float, unit: float = 1.0) -> Figure:
    """Return a figure that must equal the printed one after rounding."""
    return Figure(what, *as_printed(value, printed, unit))


def timed(
    name: str,
    ranks: int,
    microbatches: int,
    costs: Costs,
    recompute: str = "never",
    **options: Any,
) -> Timeline:
    """Return the simulated step time of a named schedule."""
    table = build(name, ranks=ranks, microbatches=microbatches, recompute=recompute, **options)
    return simulate(table, costs)


def longest_span(timeline: Timeline) -> float:
    """Return the longest time from the first to the last action of a rank."""
    return max(row[-1].end_s - row[0].start_s for row in timeline.events)
