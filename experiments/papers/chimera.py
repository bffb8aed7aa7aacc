"""Li and Hoefler, Chimera, SC 2021.

Legend: D stages, N micro-batches a worker, f pairs of directions, F and B as everywhere.
"""

from typing import Final

from experiments.papers.table import Figure, Paper, Table, timed
from gpipe_hpc.models import count_parameters
from gpipe_hpc.models.zoo.names import build_model
from gpipe_hpc.schedule import Costs

_EQUAL: Final = Costs(forward=1, backward=1)
_DOUBLE: Final = Costs(forward=1, backward=2)


def bubbles() -> Table:
    """Table 2."""
    figures: list[Figure] = []
    for d in (4, 8, 16):
        for n in (d, 2 * d):
            fill = (d - 1) / (n + d - 1)
            what = f"D={d}, N={n}"
            for name, ours in (("GPipe", "gpipe"), ("DAPPLE", "one_f_one_b")):
                figures.append(Figure(f"{name}, {what}", fill, timed(ours, d, n, _EQUAL).bubble))
            both = (d - 2) / (2 * n + d - 2)
            figures.append(Figure(f"Chimera, {what}", both, timed("chimera", d, n, _EQUAL).bubble))
        unit = timed("chimera", d, d, _DOUBLE).makespan
        what = f"Chimera, D=N={d}, B = 2F: D F + (2D - 2) B"
        figures.append(Figure(what, d + 2 * (2 * d - 2), unit))
    return Table(
        "Table 2: bubble ratios",
        "(D - 1) / (N + D - 1) for GPipe and DAPPLE, (D - 2) / (2N + D - 2) for Chimera at F = B; "
        "D F + (2D - 2) B for N = D (performance model)",
        "nothing; the bubble is idle time over total time",
        tuple(figures),
    )


def activations() -> Table:
    """Tables 2 and 3: smallest and largest number of activations of a worker."""
    figures: list[Figure] = []
    for d in (4, 8, 16):
        for name, ours, least, most in (
            ("GPipe", "gpipe", 2 * d, 2 * d),
            ("DAPPLE", "one_f_one_b", 1, d),
            ("Chimera", "chimera", d // 2 + 1, d),
        ):
            peaks = timed(ours, d, 2 * d, _EQUAL).peak_activations
            figures.append(Figure(f"{name}, D={d}, N={2 * d}: least", least, min(peaks)))
            figures.append(Figure(f"{name}, D={d}, N={2 * d}: most", most, max(peaks)))
    return Table(
        "Table 2: activations of a worker, in M_a",
        "N for GPipe, 1 to D for DAPPLE, D/2 + 1 to D for Chimera",
        "nothing",
        tuple(figures),
    )


def more_pipelines() -> Table:
    """Table 3: 2f pipelines."""
    figures: list[Figure] = []
    for d, f in ((8, 2), (16, 2), (16, 4)):
        found = timed("chimera", d, d, _EQUAL, pipelines=2 * f)
        what = f"D=N={d}, f={f}"
        left = d - 2 * f
        figures.append(Figure(f"{what}: bubble", left / (2 * f * d + left), found.bubble))
        peaks = found.peak_activations
        figures.append(Figure(f"{what}: least activations", d - d // (2 * f) + 1, min(peaks)))
        figures.append(Figure(f"{what}: most activations", d, max(peaks)))
    return Table(
        "Table 3: 2f pipelines",
        "(D - 2f) / (2fN + D - 2f), D - D / 2f + 1 to D activations",
        "nothing",
        tuple(figures),
    )


def parameters() -> Table:
    """Table 4."""
    figures = [
        Figure(name, printed, count_parameters(build_model(ours)))
        for name, ours, printed in (
            ("Bert-48", "bert48", 669_790_012),
            ("GPT-2-64", "gpt2_64", 1_389_327_360),
        )
    ]
    return Table("Table 4: parameters", "the models' sizes", "nothing", tuple(figures))


# Figure 1, GPT-2 on 2,048 nodes, a mini-batch of 2,048 sequences: scheme -> (ours, stages, bubble
# read off the chart, speedup of Chimera over it, does it recompute).
FIGURE_1: Final = {
    "GPipe": ("gpipe", 8, 0.45, 1.42, True),
    "GEMS": ("gems", 8, 0.83, 2.34, False),
    "DAPPLE": ("one_f_one_b", 16, 0.49, 1.38, True),
}


def _step(name: str, d: int, recomputes: bool) -> float:
    """Return the step time of D micro-batches in D stages, in forwards of the whole model."""
    costs = Costs(forward=1 / d, backward=2 / d, recompute=1 / d)
    return timed(name, d, d, costs, recompute="always" if recomputes else "never").makespan


def at_scale() -> Table:
    """Figure 1."""
    figures = [Figure("Chimera, D=32: bubble", 0.32, timed("chimera", 32, 32, _EQUAL).bubble)]
    chimera = _step("chimera", 32, recomputes=False)
    for name, (ours, d, bubble, speedup, recomputes) in FIGURE_1.items():
        costs = _DOUBLE if name == "GEMS" else _EQUAL
        found = timed(ours, d, d, costs).bubble
        figures.append(Figure(f"{name}, D={d}: bubble", bubble, found))
        gain = _step(ours, d, recomputes) / chimera
        figures.append(Figure(f"Chimera over {name}, D={d}", speedup, gain))
    return Table(
        "Figure 1: GPT-2 (1.39 billion parameters) on 2,048 nodes of Piz Daint",
        "the stages of each scheme and which of them recompute; bubbles are read off a chart",
        "one sequence per micro-batch, so N = D; B = 2F and a recomputation is one F; free "
        "transfers and reductions. Bubbles at F = B, as in the paper's formulas; GEMS at B = 2F",
        tuple(figures),
        "GEMS is too slow in ours. Micro-batches of one sequence are our inference. GEMS keeps one "
        "at a time, so its micro-batches may have been larger; their size is not given",
    )


PAPER: Final = Paper(
    "chimera",
    "Chimera: Li and Hoefler, SC 2021",
    formulas=(bubbles, activations, more_pipelines),
    counts=(parameters,),
    simulated=(at_scale,),
)
