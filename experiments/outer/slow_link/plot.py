"""Losses over time as an SVG picture, by matplotlib."""

import io
from collections.abc import Mapping
from typing import Any, Final

Curve = list[tuple[float, float]]

_INCHES: Final = (5.2, 4.2)


def draw(panels: Mapping[str, Mapping[str, Curve]], x_label: str, y_label: str, title: str) -> str:
    """Draw named curves in panels beside one another; the same curves give the same text."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    width, height = _INCHES
    with rc_context({"svg.hashsalt": "gpipe_hpc", "svg.fonttype": "none", "font.size": 9}):
        figure: Any = Figure(figsize=(len(panels) * width, height), layout="constrained")
        figure.suptitle(title)
        row = figure.subplots(1, len(panels), squeeze=False, sharex=True, sharey=True)[0]
        for axes, (what, curves) in zip(row, panels.items(), strict=True):
            for name, curve in curves.items():
                axes.plot(*zip(*curve, strict=True), marker=".", label=name)
            axes.set_title(what)
            axes.set_xlabel(x_label)
            axes.grid(alpha=0.3)
            axes.legend()
        row[0].set_ylabel(y_label)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()
