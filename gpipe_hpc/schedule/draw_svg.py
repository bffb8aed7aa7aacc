"""A timeline as a stand-alone SVG picture."""

import math
from typing import Final
from xml.sax.saxutils import escape

from gpipe_hpc.schedule.actions import COMPUTE, Op
from gpipe_hpc.schedule.timeline import Event, Timeline

_COLOURS: Final = {
    Op.F: ("#8ecae6", "forward"),
    Op.B: ("#95d5b2", "backward"),
    Op.I: ("#52b788", "input gradient"),
    Op.W: ("#ffd166", "weight gradient"),
    Op.R: ("#f4a582", "recompute"),
}
_LEFT, _TOP, _ROW, _GAP, _BELOW = 64.0, 44.0, 26.0, 4.0, 64.0
_STYLE: Final = (
    "text{font-family:Helvetica,Arial,sans-serif;font-size:12px;fill:#1b1b1b}"
    ".title{font-size:15px;font-weight:bold}.cell{font-size:11px;text-anchor:middle}"
    ".rank{text-anchor:end}.tick{text-anchor:middle;fill:#555;font-size:11px}"
    "rect.op{stroke:#ffffff;stroke-width:0.6}"
)


def draw_svg(timeline: Timeline, *, title: str = "", unit: str = "", width: int = 960) -> str:
    """Draw a row of boxes for each rank: colour by op, micro-batch in the box, bubbles grey.

    Hovering a box shows its action and times. `title` defaults to the schedule's name, `unit` names
    the unit of time on the axis, `width` is in pixels.
    """
    right = 16.0
    scale = (width - _LEFT - right) / timeline.makespan if timeline.makespan > 0 else 0.0
    bottom = _TOP + timeline.num_ranks * (_ROW + _GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{bottom + _BELOW:g}" '
        f'viewBox="0 0 {width} {bottom + _BELOW:g}" role="img">',
        f"<style>{_STYLE}</style>",
        f'<rect width="{width}" height="{bottom + _BELOW:g}" fill="#ffffff"/>',
        _heading(timeline, title or timeline.name, unit),
    ]
    for rank, row in enumerate(timeline.events):
        parts.extend(_rank(timeline, rank, row, scale, unit))
    parts.extend(_axis(timeline, scale, bottom, unit))
    parts.extend(_legend(timeline, bottom + 44))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _heading(timeline: Timeline, title: str, unit: str) -> str:
    span = f"makespan {_time(timeline.makespan, unit)}"
    text = f"{title}: {span}" if title else span
    text += f", bubble {timeline.bubble:.1%} (idle over total)"
    return f'<text class="title" x="{_LEFT:g}" y="26">{escape(text)}</text>'


def _time(value: float, unit: str) -> str:
    return f"{value:.4g} {unit}".rstrip()


def _rank(
    timeline: Timeline, rank: int, row: tuple[Event, ...], scale: float, unit: str
) -> list[str]:
    """Return the label, the grey of the bubbles and the boxes of one rank."""
    top = _TOP + rank * (_ROW + _GAP)
    middle = top + _ROW / 2 + 4
    with_stage = len({event.action.stage for event in row}) > 1
    parts = [
        f'<text class="rank" x="{_LEFT - 8:g}" y="{middle:g}">rank {rank}</text>',
        f'<rect x="{_LEFT:g}" y="{top:g}" width="{timeline.makespan * scale:.2f}" '
        f'height="{_ROW:g}" fill="#eeeeee"/>',
    ]
    for event in row:
        if event.action.op in COMPUTE:
            parts.append(_box(timeline, event, top, scale, with_stage, unit))
    return parts


def _box(
    timeline: Timeline, event: Event, top: float, scale: float, with_stage: bool, unit: str
) -> str:
    start, end = event.start_s - timeline.start_s, event.end_s - timeline.start_s
    left, span = _LEFT + start * scale, event.duration_s * scale
    tip = escape(
        f"{event.action}, rank {event.rank}: {_time(start, unit)} to {_time(end, unit)} "
        f"(takes {_time(event.duration_s, unit)})"
    )
    colour = _COLOURS[event.action.op][0]
    box = (
        f'<g><title>{tip}</title><rect class="op" x="{left:.2f}" y="{top:g}" '
        f'width="{span:.2f}" height="{_ROW:g}" fill="{colour}"/>'
    )
    label = str(event.action.microbatch)
    if with_stage:
        label = f"{event.action.stage}:{label}"
    if len(label) * 6.5 + 2 <= span:
        x, y = left + span / 2, top + _ROW / 2 + 4
        box += f'<text class="cell" x="{x:.2f}" y="{y:g}">{label}</text>'
    return box + "</g>"


def _axis(timeline: Timeline, scale: float, bottom: float, unit: str) -> list[str]:
    """Return the time axis with ticks at round numbers."""
    end = _LEFT + timeline.makespan * scale
    line = 'stroke="#555" stroke-width="1"'
    parts = [f'<path d="M{_LEFT:g} {bottom:g}H{end:.2f}" {line}/>']
    step = _round_step(timeline.makespan / 10)
    ticks = math.floor(timeline.makespan / step + 1e-9) if step > 0 else 0
    for index in range(ticks + 1):
        x = _LEFT + index * step * scale
        parts.append(f'<path d="M{x:.2f} {bottom:g}v4" {line}/>')
        parts.append(
            f'<text class="tick" x="{x:.2f}" y="{bottom + 17:g}">{index * step:.6g}</text>'
        )
    name = escape(f"time ({unit})" if unit else "time")
    parts.append(f'<text class="rank" x="{_LEFT - 8:g}" y="{bottom + 17:g}">{name}</text>')
    return parts


def _round_step(least: float) -> float:
    """Return the smallest of 1, 2, 5 times a power of ten that is not below a value."""
    if least <= 0:
        return 0.0
    power: float = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * 0.999999)


def _legend(timeline: Timeline, top: float) -> list[str]:
    used = {event.action.op for row in timeline.events for event in row}
    entries = [entry for op, entry in _COLOURS.items() if op in used] + [("#eeeeee", "idle")]
    parts: list[str] = []
    x = _LEFT
    for colour, text in entries:
        parts.append(
            f'<rect x="{x:g}" y="{top - 10:g}" width="14" height="12" fill="{colour}"/>'
            f'<text x="{x + 20:g}" y="{top:g}">{text}</text>'
        )
        x += 44 + 6.5 * len(text)
    return parts
