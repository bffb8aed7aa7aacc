"""Plot the growth of a step over the number of ranks as SVG, with matplotlib."""

import io
from collections.abc import Callable, Sequence
from typing import Any, Final

from experiments.scale.simulation.jobs import Row

_PANELS: Final[Sequence[tuple[str, Callable[[Row], float]]]] = (
    ("step time, s", lambda row: row.step_s),
    ("bubble, % of total", lambda row: 100 * row.bubble),
    ("share of reductions, % of the step", lambda row: 100 * row.reduction_share),
    ("CPU seconds to simulate", lambda row: row.simulation_cpu_s),
)
_STYLES: Final = {"even": "--", "described": "-"}


def draw(rows: Sequence[Row]) -> str:
    """Draw four panels over the number of ranks, a line for each schedule and cluster."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.hashsalt": "gpipe_hpc", "svg.fonttype": "none", "font.size": 9}):
        figure: Any = Figure(figsize=(9.0, 7.0), layout="constrained")
        for axes, (label, value) in zip(figure.subplots(2, 2).flat, _PANELS, strict=True):
            schedules = list(dict.fromkeys(row.schedule for row in rows))
            for at, schedule in enumerate(schedules):
                for cluster, style in _STYLES.items():
                    own = [r for r in rows if (r.schedule, r.cluster) == (schedule, cluster)]
                    axes.plot(
                        [row.ranks for row in own],
                        [value(row) for row in own],
                        style,
                        marker=".",
                        color=f"C{at}",
                        label=f"{schedule}, {cluster} cluster",
                    )
            axes.set_xscale("log")
            if "seconds" in label:
                axes.set_yscale("log")
            else:
                axes.set_ylim(bottom=0)
            axes.set_xlabel("ranks")
            axes.set_title(label)
            axes.grid(alpha=0.3)
        figure.legend(
            *figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3
        )
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()
