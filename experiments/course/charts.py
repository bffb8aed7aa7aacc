"""Small SVG charts for light and dark pages, with a description for screen readers.

Series differ in dashes and markers as well as in colour. The description lists the values.
"""

import html
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

_STYLE: Final = """<style>
text{font-family:Helvetica,Arial,sans-serif;font-size:12px;fill:#1b1b1b}
.page{fill:#ffffff}.axis{stroke:#666666;fill:none}.grid{stroke:#dddddd;fill:none}
.title{font-size:15px;font-weight:bold}.muted{fill:#666666}
.c0{stroke:#0b62a8;fill:#0b62a8}.c1{stroke:#b34700;fill:#b34700}.c2{stroke:#0a7a4b;fill:#0a7a4b}
.c3{stroke:#8a3ea0;fill:#8a3ea0}.c4{stroke:#555555;fill:#555555}.line{fill:none;stroke-width:2}
@media (prefers-color-scheme:dark){
text{fill:#ececf1}.page{fill:#17171b}.axis{stroke:#a6a6b2}.grid{stroke:#33333b}.muted{fill:#a6a6b2}
.c0{stroke:#6db6f2;fill:#6db6f2}.c1{stroke:#ff9e57;fill:#ff9e57}.c2{stroke:#5fd39b;fill:#5fd39b}
.c3{stroke:#d49be6;fill:#d49be6}.c4{stroke:#bbbbbb;fill:#bbbbbb}.line{fill:none}
}</style>"""
_DASHES: Final = ("", "7 4", "2 3", "10 3 2 3", "1 5")
_WIDTH: Final = 760

Points = Sequence[tuple[float, float]]


def bars(title: str, unit: str, rows: Mapping[str, float | tuple[float, float, float]]) -> str:
    """Draw a horizontal bar for each row, with a line between the quartiles if they are given.

    Args:
        title: title of the chart
        unit: unit of the values
        rows: a value, or (first quartile, median, third quartile), by label
    """
    triples = {name: v if isinstance(v, tuple) else (v, v, v) for name, v in rows.items()}
    most = max(high for _, _, high in triples.values()) or 1.0
    left, step = 8 + 7 * max(len(name) for name in rows), 30
    scale = (_WIDTH - left - 190) / most
    body = []
    for number, (name, (low, middle, high)) in enumerate(triples.items()):
        y = 48 + number * step
        text = f"{_text(middle)} {unit}"
        if low < high:
            text += f" ({_text(low)} to {_text(high)})"
            span = f"M{left + low * scale:.1f},{y + 9}H{left + high * scale:.1f}"
            body.append(f'<path class="axis" stroke-width="3" d="{span}"/>')
        bar = f'x="{left}" y="{y}" width="{middle * scale:.1f}" height="18"'
        body.insert(0, f'<rect class="c0" {bar}/>')
        body.append(f'<text x="{left - 8}" y="{y + 13}" text-anchor="end">{_safe(name)}</text>')
        body.append(f'<text x="{left + high * scale + 8:.1f}" y="{y + 13}">{_safe(text)}</text>')
    told = "; ".join(f"{name}: {_text(v[1])} {unit}" for name, v in triples.items())
    return _page(title, told, 60 + step * len(rows), body)


def lines(
    title: str,
    x_label: str,
    y_label: str,
    series: Mapping[str, Points],
    *,
    log: bool = False,
    dots: Iterable[str] = (),
) -> str:
    """Draw lines with markers.

    Args:
        title: title of the chart
        x_label: label of the horizontal axis, with its unit
        y_label: label of the vertical axis, with its unit
        series: points by name
        log: whether both axes are logarithmic; otherwise the vertical one starts at 0
        dots: names of series drawn as markers only, for example measured ones
    """
    xs = [x for points in series.values() for x, _ in points]
    ys = [y for points in series.values() for _, y in points]
    left, right, top, bottom = 70, _WIDTH - 200, 44, 330
    x_of = _scale(min(xs), max(xs), left, right, log)
    y_of = _scale(min(ys) if log else min(0.0, *ys), max(ys), bottom, top, log)
    body = []
    for x in _ticks(min(xs), max(xs), log):
        body.append(f'<path class="grid" d="M{x_of(x):.1f},{top}V{bottom}"/>')
        label = f'<text x="{x_of(x):.1f}" y="{bottom + 16}" text-anchor="middle">'
        body.append(f"{label}{_text(x)}</text>")
    for y in _ticks(min(ys) if log else 0.0, max(ys), log):
        body.append(f'<path class="grid" d="M{left},{y_of(y):.1f}H{right}"/>')
        label = f'<text x="{left - 6}" y="{y_of(y) + 4:.1f}" text-anchor="end">'
        body.append(f"{label}{_text(y)}</text>")
    body.append(f'<path class="axis" d="M{left},{top}V{bottom}H{right}"/>')
    body.append(f'<text class="muted" x="{left}" y="{top - 6}">{_safe(y_label)}</text>')
    middle = (left + right) / 2
    where = f'x="{middle}" y="{bottom + 34}" text-anchor="middle"'
    body.append(f'<text class="muted" {where}>{_safe(x_label)}</text>')
    for number, (name, points) in enumerate(series.items()):
        colour, dash = f"c{number % 5}", _DASHES[number % len(_DASHES)]
        path = "M" + "L".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in points)
        if name not in dots:
            body.append(f'<path class="{colour} line" stroke-dasharray="{dash}" d="{path}"/>')
        body += [_marker(number, colour, x_of(x), y_of(y)) for x, y in points]
        y = top + 10 + number * 20
        if name not in dots:
            d = f"M{right + 8},{y}h26"
            body.append(f'<path class="{colour} line" stroke-dasharray="{dash}" d="{d}"/>')
        body.append(_marker(number, colour, right + 21, y))
        body.append(f'<text x="{right + 40}" y="{y + 4}">{_safe(name)}</text>')
    told = "; ".join(
        f"{name}: " + ", ".join(f"{_text(y)} at {_text(x)}" for x, y in points)
        for name, points in series.items()
    )
    return _page(title, f"{y_label} over {x_label}. {told}", bottom + 46, body)


def _page(title: str, description: str, height: int, body: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img"'
    size = f'width="{_WIDTH}" height="{height}"'
    parts = [
        f'{head} {size} aria-label="{_safe(title)}">',
        f"<title>{_safe(title)}</title><desc>{_safe(description)}</desc>{_STYLE}",
        f'<rect class="page" {size}/>',
        f'<text class="title" x="12" y="22">{_safe(title)}</text>',
        *body,
        "</svg>\n",
    ]
    return "\n".join(parts)


def _scale(
    low: float, high: float, start: float, end: float, log: bool
) -> Callable[[float], float]:
    if log:
        low, high = math.log(low), math.log(high)
        low, high = low - 0.04 * (high - low), high + 0.04 * (high - low)
    span = (high - low) or 1.0
    return lambda v: start + ((math.log(v) if log else v) - low) / span * (end - start)


def _ticks(low: float, high: float, log: bool) -> list[float]:
    if log:
        factors = (1, 2, 5) if high / low < 1e3 else (1,)
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        ticks = [factor * 10.0**power for power in powers for factor in factors]
        return [tick for tick in ticks if low * 0.999 <= tick <= high * 1.001]
    rough = (high - low) / 5 or 1.0
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * f for f in (1, 2, 5, 10) if unit * f >= rough)
    return [step * n for n in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _marker(number: int, colour: str, x: float, y: float) -> str:
    shape = (
        f'<circle class="{colour}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>',
        f'<rect class="{colour}" x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8"/>',
        f'<path class="{colour}" d="M{x:.1f},{y - 5:.1f}l5,9h-10z"/>',
        f'<path class="{colour}" d="M{x:.1f},{y - 6:.1f}l5,6l-5,6l-5,-6z"/>',
    )
    return shape[number % len(shape)]


def _text(value: float) -> str:
    if value and (abs(value) >= 1e8 or abs(value) < 1e-3):
        return f"{value:.2g}"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"


def _safe(text: str) -> str:
    return html.escape(text, quote=True)
