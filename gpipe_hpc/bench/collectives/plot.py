"""Times over sizes, by matplotlib: what was measured, and the closed forms."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpipe_hpc.bench.collectives.figures import Found, Timing
from gpipe_hpc.comm.collectives.costs import FORMS
from gpipe_hpc.comm.collectives.menu import BACKEND


def draw(found: Sequence[Found], path: Path) -> bool:
    """Draw a row for each number of ranks and a column for each collective.

    Points are measured, dashed lines are closed forms over the fitted link, the backend's own is
    black. False where matplotlib is missing, or nothing was measured.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        return False
    rows = [each for each in found if each.timings]
    if not rows:
        return False
    figure: Any = Figure(figsize=(4.0 * len(FORMS), 3.4 * len(rows)), layout="constrained")
    grid = figure.subplots(len(rows), len(FORMS), squeeze=False)
    for line, each in zip(grid, rows, strict=True):
        for axes, collective in zip(line, FORMS, strict=True):
            _draw_one(axes, each, collective)
    with rc_context({"svg.fonttype": "none"}):  # letters as letters: a third of the size
        figure.savefig(path)
    return True


def _draw_one(axes: Any, found: Found, collective: str) -> None:
    for number, name in enumerate((BACKEND, *FORMS[collective])):
        timings = _along(found, collective, name)
        if not timings:
            continue
        colour = "black" if name == BACKEND else f"C{number - 1}"
        sizes = [timing.num_bytes for timing in timings]
        measured = [1e3 * timing.median_s for timing in timings]
        axes.plot(sizes, measured, marker=".", linewidth=0.8, color=colour, label=name)
        forms = [(t.num_bytes, 1e3 * t.form_s) for t in timings if t.form_s is not None]
        if forms:
            axes.plot(*zip(*forms, strict=True), linestyle="--", linewidth=0.8, color=colour)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.minorticks_off()  # they were most of the file
    axes.set_title(f"{collective.replace('_', '-')}, {found.ranks} ranks")
    axes.set_xlabel("bytes")
    axes.set_ylabel("ms (dashed: closed form)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="x-small", framealpha=0.4)


def _along(found: Found, collective: str, name: str) -> list[Timing]:
    some = [t for t in found.timings if (t.collective, t.algorithm) == (collective, name)]
    return sorted(some, key=lambda timing: timing.num_bytes)
