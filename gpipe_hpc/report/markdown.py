"""Write a report as Markdown."""

from collections.abc import Iterator, Sequence

from gpipe_hpc.report.blocks import (
    Bars,
    Block,
    Curve,
    Grid,
    KeyFigures,
    Paragraph,
    Picture,
    ReportDocument,
    Suggestions,
)
from gpipe_hpc.report.number_format import number, percent, time_text
from gpipe_hpc.schedule import Timeline
from gpipe_hpc.visualize import draw_text

_WIDTH = 96  # columns of a timeline
_SHADES = " ▁▂▃▄▅▆▇█"
_POINTS = 60


def render_markdown(report: ReportDocument) -> str:
    """Return a report as Markdown, with block characters for curves and letters for timelines."""
    lines = [f"# {report.title}"]
    for section in report.sections:
        lines += ["", f"## {section.title}"]
        for block in section.blocks:
            lines += ["", *_block(block)]
    return "\n".join(lines) + "\n"


def _block(block: Block) -> Iterator[str]:
    match block:
        case Paragraph(text):
            yield text
        case KeyFigures(rows):
            yield from _table(["what", "value"], rows)
        case Grid(head, rows):
            yield from _table(head, rows)
        case Curve(title, points):
            yield from (f"- {title}, {name}: {_line(own)}" for name, own in points.items())
        case Bars(bars):
            names = list(dict.fromkeys(name for bar in bars for name in bar.parts))
            shown = [n for n in names if any(bar.parts.get(n) for bar in bars)]
            rows = [
                [bar.name, *(time_text(bar.parts.get(name, 0.0)) for name in shown)] for bar in bars
            ]
            yield from _table(["", *shown], rows)
        case Suggestions(findings, step_s):
            for place, each in enumerate(findings, 1):
                share = percent(each.gain_s / step_s)
                yield f"{place}. **{each.what}**: {time_text(each.gain_s)} a step ({share})."
                yield f"   {each.why}"
                if each.settings:
                    yield f"   `{each.settings}`"
        case Picture(step):
            yield "```text"
            yield from _timelines(step.replicas)
            yield "```"


def _timelines(replicas: Sequence[Timeline]) -> Iterator[str]:
    """Yield the timeline of each replica as text, on a common time scale."""
    begin_s = min(each.start_s for each in replicas)
    longest = max(each.makespan for each in replicas)
    for place, timeline in enumerate(replicas):
        if len(replicas) > 1:
            yield f"replica {place}, starting at {time_text(timeline.start_s - begin_s)}:"
        share = timeline.makespan / longest if longest > 0 else 1.0
        yield draw_text(timeline, max(1, round(_WIDTH * share)), "s", None)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield _row(head)
    yield _row(["---"] * len(head))
    yield from map(_row, rows)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(map(_cell, cells))} |"


def _cell(text: str) -> str:
    """Escape text for a table cell, because a bar or a line break would end the cell."""
    return text.replace("|", r"\|").replace("\n", " ")


def _line(points: Sequence[tuple[float, float]]) -> str:
    values = [value for _, value in points]
    size = -(-len(values) // _POINTS)
    means = [
        sum(own) / len(own) for own in (values[i : i + size] for i in range(0, len(values), size))
    ]
    low, high = min(means), max(means)
    steps = len(_SHADES) - 2
    bars = "".join(
        _SHADES[1 + round((m - low) / (high - low) * steps) if high > low else 1] for m in means
    )
    return f"{number(values[0])} {bars} {number(values[-1])}"
