"""Draw lines over the number of micro-batches as SVG, with matplotlib."""

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

_COLUMNS: Final = 3
_PANEL_INCHES: Final = (3.6, 2.7)

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Panel:
    """One diagram: series by name; x is logarithmic. `dashed` lines belong to series."""

    title: str
    series: Mapping[str, Points]
    y_label: str
    x_label: str = "micro-batches"
    is_log: bool = False
    dashed: Mapping[str, Points] = field(default_factory=dict)


def draw_panels(panels: Sequence[Panel], *, title: str = "") -> str:
    """Draw panels side by side with a common legend; a name has the same colour in all.

    The output is deterministic.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(name for panel in panels for name in panel.series))
    colours = {name: f"C{number}" for number, name in enumerate(names)}
    columns = min(len(panels), _COLUMNS)
    rows = math.ceil(len(panels) / columns)
    width, height = _PANEL_INCHES
    with rc_context({"svg.hashsalt": "gpipe_hpc", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(columns * width, rows * height + 1.0), layout="constrained")
        figure.suptitle(title)
        axes = figure.subplots(rows, columns, squeeze=False).flatten()
        for place, panel in zip(axes, panels, strict=False):
            _draw(place, panel, colours)
        for place in axes[len(panels) :]:
            place.set_axis_off()
        handles = {
            label: handle
            for place in axes
            for handle, label in zip(*place.get_legend_handles_labels(), strict=True)
        }
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def _draw(axes: Any, panel: Panel, colours: Mapping[str, str]) -> None:
    axes.set_title(panel.title)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    axes.grid(axis="y", alpha=0.3)
    for is_dashed, lines in ((True, panel.dashed), (False, panel.series)):
        for name, points in lines.items():
            if not points:
                continue
            x, y = zip(*sorted(points), strict=True)
            style: dict[str, Any] = {"linestyle": "--"} if is_dashed else {"marker": "."}
            axes.plot(x, y, color=colours[name], label=None if is_dashed else name, **style)
    ticks = sorted(
        {x for lines in (panel.series, panel.dashed) for p in lines.values() for x, _ in p}
    )
    if ticks:
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    if panel.is_log:
        axes.set_yscale("log")
