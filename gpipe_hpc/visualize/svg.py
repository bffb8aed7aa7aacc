"""Render a timeline as a stand-alone SVG picture."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final
from xml.sax.saxutils import escape

from gpipe_hpc.schedule.timeline import Timeline
from gpipe_hpc.visualize.colours import GROUNDS, IDLE, MEMORY, MUTED, PAGE, RULE
from gpipe_hpc.visualize.layout import layout
from gpipe_hpc.visualize.scene import (
    MARK_HEIGHT,
    Axis,
    Box,
    PictureRow,
    Rect,
    Scene,
    Strip,
    TextLine,
    TimeScale,
    ink_of,
    label_fits,
)

# Colours are attributes, which every program reads; CSS classes override them on dark pages.
_DARK: Final = "".join(f".{name}{{fill:{dark}}}" for name, dark in GROUNDS.values())
_STYLE: Final = (
    "text{font-family:Helvetica,Arial,sans-serif}"
    f".cell{{text-anchor:middle}}rect.op{{stroke:{PAGE};stroke-width:0.7}}"
    f"@media (prefers-color-scheme:dark){{{_DARK}"
    f"rect.op{{stroke:{GROUNDS[PAGE].dark}}}path.line{{fill:none;stroke:{GROUNDS[MUTED].dark}}}}}"
)


def draw_svg(
    timeline: Timeline, *, title: str = "", unit: str = "", width: int | None = None
) -> str:
    """Draw a row of boxes for each rank, with idle time in grey and memory curves below.

    The colour of a box is its op, the number its micro-batch; hovering shows action and times.

    Args:
        timeline: the timeline to draw.
        title: title; default: the name of the schedule.
        unit: name of the time unit.
        width: width in pixels; None means as wide as needed, 960 to 1800.
    """
    named = replace(timeline, name=title or timeline.name)
    return render_svg(layout([named], unit=unit, width=width))


def render_svg(scene: Scene) -> str:
    """Return a scene as SVG."""
    size = f'width="{scene.width:g}" height="{scene.height:g}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} '
        f'viewBox="0 0 {scene.width:g} {scene.height:g}" role="img">',
        f"<style>{_STYLE}</style>",
        f"<rect {size} {_fill(PAGE)}/>",
        *(_text(each) if isinstance(each, TextLine) else _rect(each) for each in scene.fixed),
    ]
    for section in scene.sections:
        for row in section.rows:
            lines.extend(_row(scene, row))
        for strip in section.strips:
            lines.extend(_strip(scene, strip))
        for axis in section.axes:
            lines.extend(_axis(scene, axis))
    return "\n".join([*lines, "</svg>"]) + "\n"


def describe(box: Box, clock: TimeScale) -> str:
    """Return the action of a box, its times, and the value that it waited for as text."""
    event, factor = box.event, clock.factor
    text = (
        f"{event.action}, rank {event.rank}: {clock.show(box.start)} to "
        f"{clock.show(box.start + box.duration)} (takes {clock.show(box.duration)})"
    )
    if box.wait is not None:
        maker, send, thing = box.wait
        # Convert to the time axis of the picture.
        over = box.start + (box.wait.over_s - event.start_s) * factor
        last = maker if send is None else send
        text += f"; waited for {last.action} of rank {last.rank} ({thing}), "
        text += f"over at {clock.show(over)}"
    return text


def _text(text: TextLine) -> str:
    anchor = "" if text.anchor == "start" else f' text-anchor="{text.anchor}"'
    weight = ' font-weight="bold"' if text.bold else ""
    return (
        f'<text x="{text.x:.2f}" y="{text.y:.2f}" font-size="{text.size:g}" '
        f"{_fill(text.ink)}{anchor}{weight}>{escape(text.text)}</text>"
    )


def _rect(rect: Rect) -> str:
    return (
        f'<rect x="{rect.x:.2f}" y="{rect.y:.2f}" width="{rect.width:.2f}" '
        f'height="{rect.height:g}" {_fill(rect.fill)}/>'
    )


def _fill(colour: str) -> str:
    """Return the attributes of a colour, with a class if it changes on dark pages."""
    ground = f'class="{GROUNDS[colour].name}" ' if colour in GROUNDS else ""
    return f'{ground}fill="{colour}"'


def _row(scene: Scene, row: PictureRow) -> Iterator[str]:
    yield _rect(Rect(scene.x(0), row.y, row.span * scene.scale, row.height, IDLE))
    for box in row.boxes:
        left, width = scene.x(box.start), box.duration * scene.scale
        # An outline would cover very thin boxes.
        kind = ' class="op"' if width >= 3 else ""
        text = (
            f"<g><title>{escape(describe(box, scene.clock))}</title>"
            f'<rect{kind} x="{left:.2f}" y="{row.y:g}" width="{width:.2f}" '
            f'height="{row.height:g}" fill="{box.fill}"/>'
        )
        if label_fits(box.label, row.label_size, width):
            y = row.y + row.height / 2 + row.label_size * 0.36
            text += (
                f'<text class="cell" x="{left + width / 2:.2f}" y="{y:.2f}" '
                f'font-size="{row.label_size:g}" fill="{ink_of(box)}">{box.label}</text>'
            )
        yield text + "</g>"
    for mark in row.marks:
        end, clock = mark.start + mark.duration, scene.clock
        title = (
            f"{mark.event.action}, rank {row.rank}: {clock.show(mark.start)} to {clock.show(end)}"
        )
        yield (
            f"<g><title>{escape(title)}</title>"
            f'<rect x="{scene.x(mark.start):.2f}" y="{row.mark_y:g}" '
            f'width="{mark.duration * scene.scale:.2f}" height="{MARK_HEIGHT:g}" '
            f'fill="{mark.fill}"/></g>'
        )


def _strip(scene: Scene, strip: Strip) -> Iterator[str]:
    base = strip.y + strip.height
    yield _rect(Rect(scene.x(0), base, strip.span * scene.scale, 0.6, RULE))
    if not strip.steps:
        return
    path = [f"M{scene.x(strip.steps[0].time_s):.2f} {base:g}"]
    for step in strip.steps:
        height = strip.height * step.live / strip.full
        path.append(f"H{scene.x(step.time_s):.2f}V{base - height:.2f}")
    path.append(f"H{scene.x(strip.span):.2f}V{base:g}Z")
    yield f'<path d="{"".join(path)}" {_fill(MEMORY)}/>'


def _axis(scene: Scene, axis: Axis) -> Iterator[str]:
    line = f'class="line" stroke="{MUTED}"'
    yield f'<path d="M{scene.x(0):g} {axis.y:g}H{scene.x(axis.span):.2f}" {line}/>'
    for tick in scene.ticks():
        if tick <= axis.span * 1.000001:
            x = scene.x(tick)
            yield f'<path d="M{x:.2f} {axis.y:g}v4" {line}/>'
            yield _text(TextLine(x, axis.y + 16, f"{tick:.6g}", 11, "middle", ink=MUTED))
