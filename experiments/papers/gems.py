"""Jain et al., GEMS, SC 2020: two copies of a model in opposite directions.

Legend: D ranks, F and B the time of a stage's forward and whole backward.
"""

from typing import Final

from experiments.papers.table import Figure, Paper, Table, timed
from gpipe_hpc.schedule import Costs, build, idle_share

_DOUBLE: Final = Costs(forward=1, backward=2)
_EQUAL: Final = Costs(forward=1, backward=1)


def pairs() -> Table:
    """Time of a pair of micro-batches in the steady state, and of a single pair."""
    figures: list[Figure] = []
    for d in (2, 4, 8, 16):
        for name, costs, period in (
            ("B = 2F", _DOUBLE, 4 * d + 2),
            ("B = F", _EQUAL, 2 * d + 2),
        ):
            one, two = (timed("gems", d, m, costs).makespan for m in (6, 8))
            figures.append(Figure(f"D={d}, {name}: a further pair", period, two - one))
        alone = timed("gems", d, 2, _DOUBLE).makespan
        figures.append(Figure(f"D={d}, B = 2F: a pair alone", 5 * d + 1, alone))
        one, two = (timed("gems", d, m, _DOUBLE).makespan for m in (6, 8))
        bubble = idle_share(2 * 3 * d, d, two - one)
        figures.append(Figure(f"D={d}: bubble (D - 1) / (D + 1/2)", (d - 1) / (d + 0.5), bubble))
    return Table(
        "MAST's steady state, and its bubble in Chimera's table 2",
        "the order of work, and the bubble (D - 1) / (D + 1/2) (Li and Hoefler, SC 2021, table 2)",
        "equal stages; free transfers. The times of a pair are derived, not printed",
        tuple(figures),
    )


def memory() -> Table:
    """Memory of a rank, for any number of replications."""
    figures: list[Figure] = []
    for d in (4, 8):
        for m in (2, 8, 32):
            most = max(build("gems", ranks=d, microbatches=m).max_activations or ())
            figures.append(Figure(f"D={d}, {m} micro-batches: kept by a rank", 1, most))
        for passes in (1, 2, 4):
            table = build("gems", ranks=d, microbatches=16, replications=passes)
            most = max(table.max_activations or ())
            what = f"D={d}, 16 micro-batches, {passes} replications: kept by a rank"
            figures.append(Figure(what, 16 // (2 * passes), most))
    return Table(
        "Memory does not grow with the replications",
        "one pass is kept at a time, for any number of passes (MASTER)",
        "nothing; counted in micro-batches of a stage",
        tuple(figures),
    )


PAPER: Final = Paper("gems", "GEMS: Jain et al., SC 2020", formulas=(pairs, memory))
