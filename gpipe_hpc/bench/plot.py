"""Lines over micro-batches as a stand-alone SVG picture. Loads no torch."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final
from xml.sax.saxutils import escape

_COLOURS: Final = (
    "#d1495b",
    "#2370b4",
    "#3a8f5c",
    "#8b4381",
    "#c98a1b",
    "#4fb0c6",
    "#7a6a5a",
    "#222222",
    "#e07ba8",
    "#7f9c2b",
)
_WIDTH: Final = 330.0
_HEIGHT: Final = 250.0
_LEFT: Final = 52.0
_TOP: Final = 34.0
_GAP: Final = 26.0
_PER_ROW: Final = 3

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Panel:
    """One diagram: series by name; x is logarithmic, y as told. `dashed` lines go with series."""

    title: str
    series: Mapping[str, Points]
    y_label: str
    x_label: str = "micro-batches"
    is_log: bool = False
    dashed: Mapping[str, Points] = field(default_factory=dict)


def draw_panels(panels: Sequence[Panel], *, title: str = "") -> str:
    """Draw panels beside one another with one legend; a name has one colour in all."""
    names = list(dict.fromkeys(name for panel in panels for name in panel.series))
    colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(names)}
    num_rows = math.ceil(len(panels) / _PER_ROW)
    width = min(len(panels), _PER_ROW) * (_WIDTH + _GAP) + _GAP
    legend_y = 40.0 + num_rows * (_HEIGHT + _GAP)
    num_columns = max(1, int((width - 2 * _GAP) // 210))
    height = legend_y + 18.0 * math.ceil(len(names) / num_columns) + 12
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}" role="img" font-family="Helvetica,Arial,sans-serif">',
        f'<rect width="{width:g}" height="{height:g}" fill="#ffffff"/>',
        _text(_GAP, 22, title, 14, weight="bold"),
    ]
    for number, panel in enumerate(panels):
        row, column = divmod(number, _PER_ROW)
        x, y = _GAP + column * (_WIDTH + _GAP), 34 + row * (_HEIGHT + _GAP)
        lines.append(f'<g transform="translate({x:g} {y:g})">')
        lines.extend(_panel(panel, colours))
        lines.append("</g>")
    for number, name in enumerate(names):
        row, column = divmod(number, num_columns)
        x, y = _GAP + 210.0 * column, legend_y + 18.0 * row
        lines.append(_line([(x, y), (x + 22, y)], colours[name]))
        lines.append(_text(x + 28, y + 4, name, 12))
    return "\n".join([*lines, "</svg>"]) + "\n"


class _Scale:
    """From values to pixels."""

    def __init__(self, values: Sequence[float], start: float, end: float, is_log: bool) -> None:
        self.is_log, self.start, self.end = is_log, start, end
        self.least, self.most = min(values), max(values)
        if self.most <= self.least:
            self.most = self.least * 2 if is_log else self.least + 1.0

    def __call__(self, value: float) -> float:
        """Return where a value stands."""
        if self.is_log:
            share = math.log(value / self.least) / math.log(self.most / self.least)
        else:
            share = (value - self.least) / (self.most - self.least)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Return round values within the range."""
        if self.is_log:
            first, last = math.floor(math.log10(self.least)), math.ceil(math.log10(self.most))
            candidates = [10.0**power for power in range(first, last + 1)]
        else:
            rough = (self.most - self.least) / 5
            unit = 10.0 ** math.floor(math.log10(rough))
            step = next(m * unit for m in (1, 2, 5, 10) if m * unit >= rough)
            first = math.ceil(self.least / step)
            candidates = [step * n for n in range(first, first + 12)]
        return [each for each in candidates if self.least <= each <= self.most * 1.0001]


def _panel(panel: Panel, colours: Mapping[str, str]) -> Iterator[str]:
    every = [*panel.series.values(), *panel.dashed.values()]
    points = [point for series in every for point in series]
    yield _text(_LEFT, 20, panel.title, 13, weight="bold")
    if not points:
        return
    bottom = _HEIGHT - 30
    xs = sorted({x for x, _ in points})
    x_at = _Scale(xs, _LEFT + 10, _WIDTH - 6, is_log=True)
    ys = [y for _, y in points]
    if not panel.is_log:
        ys = [*ys, min(ys) - 0.06 * (max(ys) - min(ys))]
    y_at = _Scale(ys, bottom, _TOP, panel.is_log)
    for tick in y_at.ticks():
        y = y_at(tick)
        yield f'<path d="M{_LEFT:g} {y:.1f}H{_WIDTH:g}" stroke="#e4e4e4"/>'
        yield _text(_LEFT - 6, y + 4, f"{tick:g}", 11, anchor="end")
    for x in xs:
        yield f'<path d="M{x_at(x):.1f} {bottom:g}v4" stroke="#888888"/>'
        yield _text(x_at(x), bottom + 16, f"{x:g}", 11, anchor="middle")
    yield f'<path d="M{_LEFT:g} {_TOP:g}V{bottom:g}H{_WIDTH:g}" stroke="#888888" fill="none"/>'
    yield _text(_WIDTH, _HEIGHT - 1, panel.x_label, 11, anchor="end")
    yield _text(_WIDTH, 20, panel.y_label, 11, anchor="end")
    for name, series in panel.dashed.items():
        placed = [(x_at(x), y_at(y)) for x, y in sorted(series)]
        yield _line(placed, colours[name], ' stroke-dasharray="5 3"')
    for name, series in panel.series.items():
        placed = [(x_at(x), y_at(y)) for x, y in sorted(series)]
        yield _line(placed, colours[name])
        for (x, y), (_, value) in zip(placed, sorted(series), strict=True):
            yield (
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{colours[name]}">'
                f"<title>{escape(name)}: {value:.4g}</title></circle>"
            )


def _line(points: Points, colour: str, more: str = "") -> str:
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    return f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.8"{more}/>'


def _text(
    x: float, y: float, text: str, size: int, *, anchor: str = "start", weight: str = "normal"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" '
        f'font-weight="{weight}" fill="#333333">{escape(text)}</text>'
    )
