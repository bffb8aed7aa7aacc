"""Plot of goodput over failure rates as SVG, with matplotlib."""

import io
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from experiments.resilience.inputs import DAY_S


class Line(NamedTuple):
    """One line of a plot: mean and spread of the goodput by mean time between failures, in s."""

    label: str
    points: Mapping[float, tuple[float, float]]


def draw(panels: Mapping[str, Sequence[Line]]) -> str:
    """Draw two panels side by side; a band shows the standard deviation over seeds."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.hashsalt": "gpipe_hpc", "svg.fonttype": "none", "font.size": 9}):
        figure: Any = Figure(figsize=(11.0, 5.6), layout="constrained")
        for axes, (title, lines) in zip(
            figure.subplots(1, len(panels)), panels.items(), strict=True
        ):
            for at, line in enumerate(lines):
                days = [seconds / DAY_S for seconds in line.points]
                means = [mean for mean, _ in line.points.values()]
                low, high = (
                    [mean + sign * spread for mean, spread in line.points.values()]
                    for sign in (-1, 1)
                )
                style = "-" if at < 10 else "--"
                axes.plot(days, means, style, marker=".", color=f"C{at % 10}", label=line.label)
                axes.fill_between(days, low, high, color=f"C{at % 10}", alpha=0.2, linewidth=0)
            axes.set_xscale("log")
            axes.set_ylim(0, 1)
            axes.set_xlabel("mean time between failures of a host, days")
            axes.set_title(title)
            axes.grid(alpha=0.3)
            axes.legend(loc="lower right", fontsize=8)
        figure.axes[0].set_ylabel("goodput of all hosts, spare ones included")
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()
