"""Write a report as a self-contained HTML page that needs no network."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Final

from gpipe_hpc.report.accounting import PARTS
from gpipe_hpc.report.blocks import (
    Bars,
    Block,
    Curve,
    Grid,
    KeyFigures,
    Paragraph,
    Picture,
    ReportDocument,
    ReportSection,
    Suggestions,
)
from gpipe_hpc.report.number_format import LEAST_S, number, percent, time_text
from gpipe_hpc.report.transfers import with_transfers
from gpipe_hpc.trainer.traces.files import ReadStep
from gpipe_hpc.visualize.colours import BESIDE, TRANSFERS
from gpipe_hpc.visualize.html import render_html
from gpipe_hpc.visualize.layout import layout
from gpipe_hpc.visualize.scene import round_step

_MARK: Final = re.compile(r"\{\{(\w+)\}\}")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 560.0, 220.0, 58.0, 24.0, 8.0
_OF_TRANSFERS: Final = (
    "A pink bar is a transfer for which its rank waited while idle; other transfers are not "
    "recorded."
)
_NUM_COLOURS: Final = 5
_HEADER: Final = 60  # pixels of the buttons above a timeline


def render_page(report: ReportDocument) -> str:
    """Return a report as an HTML page: figures, tables, curves, and timelines that zoom."""
    page = Path(__file__).with_name("page.html").read_text("utf-8")
    parts = {"title": escape(report.title), "body": "\n".join(map(_section, report.sections))}
    return _MARK.sub(lambda mark: parts[mark[1]], page)


def _section(section: ReportSection) -> str:
    body: list[str] = []
    for is_curve, blocks in groupby(section.blocks, lambda block: isinstance(block, Curve)):
        inner = "\n".join("\n".join(_block(block)) for block in blocks)
        body.append(f'<div class="curves">{inner}</div>' if is_curve else inner)
    opened = " open" if section.is_open else ""
    text = "\n".join(body)
    return f"<details{opened}><summary>{escape(section.title)}</summary>\n{text}\n</details>"


def _block(block: Block) -> Iterator[str]:
    match block:
        case Paragraph(text):
            yield f"<p>{escape(text)}</p>"
        case KeyFigures(rows):
            cells = (
                f"<div><dt>{escape(what)}</dt><dd>{escape(value)}</dd></div>"
                for what, value in rows
                if value != "-"
            )
            yield f'<dl class="figures">{"".join(cells)}</dl>'
        case Grid(head, rows):
            yield _table(head, rows)
        case Curve(title, points):
            yield from _curve(title, points)
        case Bars():
            yield from _bars(block)
        case Suggestions(findings, step_s):
            yield "<ol>"
            for each in findings:
                gain = f"{time_text(each.gain_s)} a step, {percent(each.gain_s / step_s)}"
                paste = f"<code>{escape(each.settings)}</code>" if each.settings else ""
                yield (
                    f'<li><b>{escape(each.what)}</b> <span class="gain">{escape(gain)}</span>'
                    f"<br>{escape(each.why)}{paste}</li>"
                )
            yield "</ol>"
        case Picture(step):
            yield f"<p>{_OF_TRANSFERS}</p>"
            yield _timeline(step)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [("th", head), *(("td", row) for row in rows)]
    text = "".join(
        f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"
        for tag, cells in lines
    )
    return f'<div class="wide"><table>{text}</table></div>'


def _bars(block: Bars) -> Iterator[str]:
    longest = max((sum(bar.parts.values()) for bar in block.bars), default=0.0)
    if longest <= 0:
        return
    colours = {name: f"var(--p{place})" for place, name in enumerate(PARTS)}
    for bar in block.bars:
        cells = "".join(
            f'<i style="width:{100 * bar.parts.get(name, 0.0) / longest:.3f}%;background:{colour}" '
            f'title="{escape(name)}: {time_text(bar.parts.get(name, 0.0))}"></i>'
            for name, colour in colours.items()
            if bar.parts.get(name, 0.0) >= LEAST_S
        )
        total = time_text(sum(bar.parts.values()))
        yield (
            f'<div class="bar"><span>{escape(bar.name)}</span><div>{cells}</div>'
            f"<span>{total}</span></div>"
        )
    shown = [n for n in colours if any(bar.parts.get(n, 0.0) >= LEAST_S for bar in block.bars)]
    yield _key({name: colours[name] for name in shown})


def _key(colours: Mapping[str, str]) -> str:
    entries = (
        f'<span><i style="background:{colour}"></i>{escape(name)}</span>'
        for name, colour in colours.items()
    )
    return f'<div class="key">{"".join(entries)}</div>'


def _curve(title: str, series: Mapping[str, Sequence[tuple[float, float]]]) -> Iterator[str]:
    """Yield an SVG chart of values over steps; the legend shows the last value of each series."""
    every = [point for points in series.values() for point in points]
    if not every:
        return
    first, last = min(x for x, _ in every), max(x for x, _ in every)
    low, high = min(y for _, y in every), max(y for _, y in every)
    if not all(map(math.isfinite, (low, high))):
        return
    step = round_step((high - low) / 4) or abs(high) or 1.0
    bottom, top = math.floor(low / step) * step, math.ceil(high / step) * step
    top = top if top > bottom else bottom + step
    wide, tall = _WIDTH - _LEFT - 10, _HEIGHT - _BOTTOM - _TOP

    def at(x: float, y: float) -> str:
        left = _LEFT + wide * ((x - first) / (last - first) if last > first else 0.5)
        return f"{left:.1f},{_TOP + tall * (top - y) / (top - bottom):.1f}"

    yield f"<figure><figcaption>{escape(title)}</figcaption>"
    yield f'<svg viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" role="img" aria-label="{escape(title)}">'
    for row in range(round((top - bottom) / step) + 1):
        value = bottom + row * step
        down = _TOP + tall * (top - value) / (top - bottom)
        yield (
            f'<line x1="{_LEFT:g}" x2="{_WIDTH - 10:g}" y1="{down:.1f}" y2="{down:.1f}" '
            f'stroke="var(--rule)"/><text x="{_LEFT - 6:g}" y="{down + 4:.1f}" text-anchor="end">'
            f"{number(value)}</text>"
        )
    for end, anchor in ((first, "start"), (last, "end")):
        across = at(end, bottom).split(",")[0]
        yield f'<text x="{across}" y="{_HEIGHT - 6:g}" text-anchor="{anchor}">step {end:g}</text>'
    keys: dict[str, str] = {}
    for place, (name, points) in enumerate(series.items()):
        colour = f"var(--s{place % _NUM_COLOURS})"
        keys[f"{name}: last {number(points[-1][1])}"] = colour
        line = " ".join(at(*point) for point in points)
        if len(points) > 1:
            yield (f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        for point in points if len(points) < 30 else ():
            x, y = at(*point).split(",")
            yield (
                f'<circle cx="{x}" cy="{y}" r="2.5" fill="{colour}"><title>step {point[0]:g}: '
                f"{number(point[1])}</title></circle>"
            )
    yield f"</svg>{_key(keys)}</figure>"


def _timeline(step: ReadStep) -> str:
    """Return an HTML frame with the timeline of a step as a sandboxed page."""
    several = len(step.replicas) > 1
    shown = [
        replace(
            with_transfers(timeline),
            name=f"replica {place}, {timeline.name}" if several else timeline.name,
        )
        for place, timeline in enumerate(step.replicas)
    ]
    since_s = min((each.start_s for each in shown if any(each.events)), default=0.0)
    scene = layout(shown, unit="s", since_s=since_s, beside={**BESIDE, **TRANSFERS})
    page = escape(render_html(scene, "one step of all ranks"))
    height = round(scene.height) + _HEADER
    return (
        f'<iframe sandbox="allow-scripts" title="one step of all ranks" height="{height}" '
        f'srcdoc="{page}"></iframe>'
    )
