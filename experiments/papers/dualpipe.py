"""DeepSeek-AI, DualPipe and DualPipeV: the README of their repository, and the code's orders.

Legend: p stages (PP), m micro-batches, F forward, B whole backward, W weight gradient, F&B a
forward and a backward that run along with one another.
"""

from collections import Counter
from typing import Final

from experiments.papers.table import Figure, Paper, Table, timed
from gpipe_hpc.schedule import Costs, Op, build

_EQUAL: Final = Costs(forward=1, input_gradient=1, weight_gradient=1)
_HALVES: Final = Costs(forward=0.5, input_gradient=0.5, weight_gradient=0.5)


def idle() -> Table:
    """Idle time at F = I = W."""
    figures: list[Figure] = []
    for p in (4, 8, 16):
        m = 2 * p + 4
        found = timed("dualpipe", p, m, _EQUAL)
        figures.append(Figure(f"DualPipe, p={p}, m={m}: step", 3 * m + p - 2, found.makespan))
        own = found.makespan - max(found.busy)
        figures.append(Figure(f"DualPipe, p={p}, m={m}: idle", p - 2, own))
        found = timed("dualpipe_v", p, m, _HALVES)
        figures.append(Figure(f"DualPipeV, p={p}, m={m}: step", 3 * m + p - 1, found.makespan))
        own = found.makespan - max(found.busy)
        figures.append(Figure(f"DualPipeV, p={p}, m={m}: idle", p - 1, own))
    return Table(
        "The drawn steps at F = I = W",
        "the orders of step() in dualpipe.py and dualpipev.py, and the drawn figure: 66 units for "
        "p = 8 and m = 20, 6 of them idle",
        "F&B takes F + B: computed one after the other, in parallel with transfers",
        tuple(figures),
    )


def activations() -> Table:
    """The README's last column."""
    figures: list[Figure] = []
    for p in (4, 8, 16):
        for name, ours, paper in (
            ("1F1B", "one_f_one_b", p),
            ("ZB1P", "zb_h1", p),
            ("DualPipe", "dualpipe", p + 1),
        ):
            most = max(build(ours, ranks=p, microbatches=4 * p).max_activations or ())
            figures.append(Figure(f"{name}, p={p}", paper, most))
        stages = max(build("dualpipe_v", ranks=p // 2, microbatches=4 * p).max_activations or ())
        figures.append(Figure(f"DualPipeV, {p} stages on {p // 2} devices", p + 1, stages))
    return Table(
        "README: activations of a device",
        "PP for 1F1B and ZB1P, PP + 1 for DualPipe and DualPipeV",
        "nothing; counted in micro-batches of a stage",
        tuple(figures),
    )


def orders() -> Table:
    """Number of actions of each op on a rank of DualPipe."""
    figures: list[Figure] = []
    for p in (4, 8):
        m = 2 * p + 4
        for rank, row in enumerate(build("dualpipe", ranks=p, microbatches=m).ranks):
            counts = Counter(action.op for action in row)
            what = f"p={p}, m={m}, rank {rank}"
            behind = p // 2 - 1 - min(rank, p - 1 - rank)
            split = counts[Op.I]
            figures.append(Figure(f"{what}: forwards", m, counts[Op.F]))
            late = (min(rank, p - 1 - rank) + 1) + 2 * behind
            figures.append(Figure(f"{what}: backwards that leave W for later", late, split))
    return Table(
        "Order of work by rank",
        "the loops of step() in dualpipe.py, steps 1 to 8",
        "nothing",
        tuple(figures),
    )


# (F, I, W) of whole stages; F&B is F + I + W.
TIMES: Final = ((1.0, 1.0, 1.0), (3.0, 3.0, 2.0), (10.4, 10.2, 7.7))


def bubbles() -> Table:
    """The README's formulas for other durations."""
    figures: list[Figure] = []
    for p in (8, 16):
        m = 3 * p
        for f, i, w in TIMES:
            costs = Costs(forward=f, input_gradient=i, weight_gradient=w)
            work, what = m * (f + i + w), f"p={p}, m={m}, F, I, W = {f:g}, {i:g}, {w:g}"
            back = i + w
            for name, ours, paper in (
                ("1F1B", "one_f_one_b", (p - 1) * (f + back)),
                ("ZB1P", "zb_h1", (p - 1) * (f + back - 2 * w)),
                ("DualPipe", "dualpipe", (p / 2 - 1) * (f + back + back - 3 * w)),
            ):
                figures.append(Figure(f"{name}, {what}", paper, _idle(ours, p, m, costs, work)))
    return Table(
        "README: bubbles at other times",
        "(PP - 1)(F + B), (PP - 1)(F + B - 2W), (PP/2 - 1)(F&B + B - 3W)",
        "F&B takes F + B; the last times are close to the zero bubble paper's profile of 28.3 "
        "billion parameters",
        tuple(figures),
    )


def _idle(name: str, p: int, m: int, costs: Costs, work: float) -> float:
    return timed(name, p, m, costs).makespan - work


PAPER: Final = Paper(
    "dualpipe",
    "DualPipe: DeepSeek-AI, 2025",
    formulas=(idle, activations, orders),
    simulated=(bubbles,),
)
