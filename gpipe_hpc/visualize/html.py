"""Render timelines as one self-contained HTML page with zoom, pan and the cause of each wait."""

import json
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, Final

from gpipe_hpc.schedule.table.actions import Action
from gpipe_hpc.schedule.table.dependencies import ValueKind
from gpipe_hpc.schedule.timeline import Event
from gpipe_hpc.visualize.colours import GROUNDS, ink_on
from gpipe_hpc.visualize.scene import (
    LEFT,
    LETTER,
    MARK_HEIGHT,
    RIGHT,
    Box,
    Scene,
    Section,
    TextLine,
)

_MARK: Final = re.compile(r"\{\{(\w+)\}\}")


def render_html(scene: Scene, title: str, table: Sequence[Sequence[str]] = ()) -> str:
    """Return a scene as a self-contained HTML page, with a table above the picture.

    The scene must be laid out without the table. The page is smooth at 8 ranks and 64 micro-batches
    and usable at 64 and 512: it draws only the visible part, and merges boxes thinner than a pixel.
    """
    page = Path(__file__).with_name("page.html").read_text("utf-8")
    # "</" would end the script element that contains the data.
    data = json.dumps(_scene(scene), separators=(",", ":")).replace("</", "<\\/")
    parts = {"title": escape(title), "table": _table(table), "scene": data}
    return _MARK.sub(lambda mark: parts[mark[1]], page)


def _table(table: Sequence[Sequence[str]]) -> str:
    if not table:
        return ""
    rows = [
        "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in line)
        for tag, line in zip(["th", *["td"] * (len(table) - 1)], table, strict=True)
    ]
    return "<table>" + "".join(f"<tr>{row}</tr>" for row in rows) + "</table>"


def _scene(scene: Scene) -> dict[str, Any]:
    """Return a scene as the data that page.html reads; times are in the displayed unit."""
    palette: dict[str, int] = {}
    kinds: dict[str, int] = {}
    sections = [_section(section, scene, palette, kinds) for section in scene.sections]
    fixed = [
        {"t": each.text, "s": each.size, "a": each.anchor, "b": each.bold, "c": _name(each.ink)}
        if isinstance(each, TextLine)
        else {"w": each.width, "h": each.height, "c": _name(each.fill)}
        for each in scene.fixed
    ]
    return {
        "width": scene.width,
        "height": scene.height,
        "left": LEFT,
        "right": RIGHT,
        "letter": LETTER,
        "span": scene.span,
        "unit": scene.clock.unit,
        # Colours that change with the page, by name: on a light and on a dark page.
        "grounds": {each.name: [light, each.dark] for light, each in GROUNDS.items()},
        "markHeight": MARK_HEIGHT,
        "things": list(ValueKind),
        "fixed": [
            {"x": each.x, "y": each.y, **rest}
            for each, rest in zip(scene.fixed, fixed, strict=True)
        ],
        "sections": sections,
        "kinds": list(kinds),
        "palette": list(palette),
        "inks": [ink_on(colour) for colour in palette],
    }


def _name(colour: str) -> str:
    """Return the name of a colour that differs on dark pages, or any other colour unchanged."""
    return GROUNDS[colour].name if colour in GROUNDS else colour


def _section(
    section: Section, scene: Scene, palette: dict[str, int], kinds: dict[str, int]
) -> dict[str, Any]:
    factor = scene.clock.factor
    numbers: dict[Event, int] = {}
    things = list(ValueKind)
    for row in section.rows:
        for box in row.boxes:
            numbers[box.event] = len(numbers)

    def kind(action: Action) -> int:
        """Return the index of an action's text, in which * replaces the micro-batch."""
        peer = "" if action.peer is None else f"@{action.peer}"
        return kinds.setdefault(f"{action.stage}{action.op.value}*{peer}", len(kinds))

    def ahead(box: Box) -> float:
        """Return how long before the start of a box the awaited value arrived; mostly 0."""
        if box.wait is None or box.wait.over_s == box.event.start_s:
            return 0
        return _short((box.event.start_s - box.wait.over_s) * factor)

    def columns(boxes: Sequence[Box]) -> dict[str, list[Any]]:
        """Return the properties of boxes, one list per property.

        This takes a tenth of the space of one object per box.
        """
        waits = [box.wait for box in boxes]
        return {
            "start": [_short(box.start) for box in boxes],
            "took": [_short(box.duration) for box in boxes],
            "kind": [kind(box.event.action) for box in boxes],
            "microbatch": [box.event.action.microbatch for box in boxes],
            "colour": [palette.setdefault(box.fill, len(palette)) for box in boxes],
            "maker": [numbers.get(wait.maker, -1) if wait else -1 for wait in waits],
            "send": [kind(wait.send.action) if wait and wait.send else -1 for wait in waits],
            "why": [things.index(wait.thing) if wait else 0 for wait in waits],
            "ahead": [ahead(box) for box in boxes],
        }

    return {
        "name": section.timeline.name,
        "rows": [
            {
                "rank": row.rank,
                "y": row.y,
                "h": row.height,
                "size": row.label_size,
                "span": row.span,
                **columns(row.boxes),
                "marks": {
                    "y": row.mark_y,
                    "start": [_short(mark.start) for mark in row.marks],
                    "took": [_short(mark.duration) for mark in row.marks],
                    "colour": [palette.setdefault(m.fill, len(palette)) for m in row.marks],
                },
            }
            for row in section.rows
        ],
        "strips": [
            {
                "y": strip.y,
                "h": strip.height,
                "full": strip.full,
                "span": strip.span,
                "time": [_short(step.time_s) for step in strip.steps],
                "live": [step.live for step in strip.steps],
            }
            for strip in section.strips
        ],
        "axes": [{"y": axis.y, "top": axis.top, "span": axis.span} for axis in section.axes],
    }


def _short(number: float) -> float:
    """Round a number to the digits that are visible at any zoom."""
    return float(f"{number:.9g}")
