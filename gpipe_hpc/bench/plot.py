"""Plot the points of a sweep with matplotlib."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpipe_hpc.bench.figures import PointResult
from gpipe_hpc.bench.sweep import varied


def draw(found: Sequence[PointResult], path: Path) -> bool:
    """Plot samples per second over the setting that has the most values.

    There is a line for each combination of other settings. Returns whether a plot was written: not
    if matplotlib is missing or nothing varies.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    measured = [each for each in found if each.steps_s]
    names = list(varied([each.point for each in measured])) if measured else []
    numeric = [name for name in names if name != "backend"]
    if not numeric:
        return False
    along = max(numeric, key=lambda name: len({getattr(e.point, name) for e in measured}))
    lines: dict[str, list[tuple[int, float]]] = {}
    for each in measured:
        label = ", ".join(f"{n} {getattr(each.point, n)}" for n in names if n != along)
        lines.setdefault(label, []).append((getattr(each.point, along), each.samples_per_s))
    figure: Any = Figure(figsize=(6.0, 4.0), layout="constrained")
    axes = figure.subplots()
    for label, pairs in lines.items():
        axes.plot(*zip(*sorted(pairs), strict=True), marker=".", label=label or None)
    axes.set_xlabel(along.replace("_", " "))
    axes.set_ylabel("samples a second")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    if len(lines) > 1:
        axes.legend()
    figure.savefig(path)
    return True
