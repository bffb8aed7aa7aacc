"""The layout of a picture: positions of all elements, shared by SVG, PNG and HTML."""

import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from gpipe_hpc.schedule.memory import LiveCount, live_activations
from gpipe_hpc.schedule.table.actions import COMPUTE, Op
from gpipe_hpc.schedule.timeline import Timeline, idle_share
from gpipe_hpc.schedule.waits import DataFlow
from gpipe_hpc.visualize.colours import BESIDE, HUES, IDLE, MUTED, Hue, Tints, fill
from gpipe_hpc.visualize.scene import (
    LEFT,
    LETTER,
    MARK_HEIGHT,
    RIGHT,
    AsyncMark,
    Axis,
    Box,
    PictureRow,
    Rect,
    Scene,
    Section,
    Strip,
    TextLine,
    clock_for,
)

_TICK_SIZE: Final = 11.0
_NARROWEST, _WIDEST = 960.0, 1800.0
_LEGEND_LINE: Final = 18.0
_WORD_LETTER: Final = 6.6  # average width of a letter in pixels
_SMALL_LABEL: Final = 8.0


def layout(
    timelines: Sequence[Timeline],
    *,
    unit: str = "",
    width: float | None = None,
    table: Sequence[Sequence[str]] = (),
    since_s: float | None = None,
    beside: Mapping[Op, Hue] = BESIDE,
) -> Scene:
    """Lay out timelines below each other on one time scale, with a legend and a table of text.

    Args:
        timelines: the timelines to draw.
        unit: name of the time unit; times in ``s`` are shown in ms or us if they are short.
        width: width in pixels; None means wide enough for most numbers in the boxes, 960 to 1800.
        table: rows of text for a table below the picture.
        since_s: time at the left edge, for timelines with a common clock; None means that each
            starts with its first event.
        beside: ops that are drawn as bars below a row, with their colours.
    """
    longest = max((_end(timeline, since_s) for timeline in timelines), default=0.0)
    clock = clock_for(longest, unit)
    scene = Scene(width or _natural_width(timelines, longest), longest * clock.factor, clock)
    scene.height = 8.0
    shown: list[Legend] = []
    for timeline in timelines:
        tints = Tints(timeline)
        _add_heading(scene, timeline)
        legend = _legend(timeline, tints, beside)
        if legend not in shown:
            _add_legend(scene, legend)
            shown.append(legend)
        _add_section(scene, timeline, tints, since_s, beside)
    _add_table(scene, table)
    scene.height += 8
    return scene


def _natural_width(timelines: Sequence[Timeline], longest: float) -> float:
    """Return the width, within bounds, at which nine of ten boxes have space for their number."""
    size = _label_size(_row_height(max((each.num_ranks for each in timelines), default=1)))
    scales = sorted(
        (len(str(event.action.microbatch)) * size * LETTER + 2) / event.duration_s
        for timeline in timelines
        for row in timeline.events
        for event in row
        if event.action.op in COMPUTE and event.duration_s > 0
    )
    wanted = scales[int(0.9 * (len(scales) - 1))] * longest if scales else 0.0
    return min(_WIDEST, max(_NARROWEST, math.ceil(LEFT + RIGHT + wanted)))


def _row_height(num_ranks: int) -> float:
    return float(min(24, max(3, 768 // max(1, num_ranks))))


def _label_size(row_height: float) -> float:
    return min(11.0, row_height - 2)


def _add_heading(scene: Scene, timeline: Timeline) -> None:
    clock = scene.clock
    text = f"makespan {clock.show(timeline.makespan * clock.factor)}"
    text = f"{timeline.name}: {text}" if timeline.name else text
    text += f", bubble {timeline.bubble:.1%} (idle over total)"
    scene.fixed.append(TextLine(LEFT, scene.height + 18, text, 15, bold=True))
    scene.fixed.append(TextLine(LEFT, scene.height + 36, _size_and_peaks(timeline), ink=MUTED))
    scene.height += 46


def _size_and_peaks(timeline: Timeline) -> str:
    size = (
        f"{_count(timeline.num_ranks, 'rank')}, {_count(timeline.num_stages, 'stage')}, "
        f"{_count(timeline.num_microbatches, 'micro-batch', 'es')}"
    )
    peaks = timeline.peak_activations
    listed = " ".join(map(str, peaks)) if len(peaks) <= 16 else f"{min(peaks)} to {max(peaks)}"
    return f"{size}; peak activations by rank: {listed} ({_unit_of_memory(timeline)})"


def _unit_of_memory(timeline: Timeline) -> str:
    """Return the unit of activations as text, which depends on the number of stages."""
    of = "one stage" if timeline.num_stages == 1 else f"one of {timeline.num_stages} stages"
    return f"micro-batches of {of}"


def _count(number: int, word: str, plural: str = "s") -> str:
    return f"{number} {word}{'' if number == 1 else plural}"


class Legend(NamedTuple):
    """The legend of a picture: colour patches with labels, and the meaning of tints."""

    entries: tuple[tuple[tuple[str, ...], str], ...]
    tints: str


def _legend(timeline: Timeline, tints: Tints, hues: Mapping[Op, Hue]) -> Legend:
    """Return the legend of the ops and tints in a timeline."""
    used = {event.action.op for row in timeline.events for event in row}
    entries = [
        (tuple(fill(op, tint, len(tints)) for tint in range(len(tints))), hue.words)
        for op, hue in HUES.items()
        if op in used
    ]
    marks = _marks(timeline, TimeOrigin(0.0, 1.0), hues)
    beside = {mark.event.action.op for row in marks for mark in row}
    entries.append(((IDLE,), "idle"))
    entries += [((hue.light,), hue.words) for op, hue in hues.items() if op in beside]
    return Legend(tuple(dict.fromkeys(entries)), tints.words)


def _add_legend(scene: Scene, legend: Legend) -> None:
    """Add the legend, with line breaks where the width requires them."""
    x = LEFT

    def make_room(width: float) -> float:
        if x > LEFT and x + width > scene.width - 8:
            scene.height += _LEGEND_LINE
            return LEFT
        return x

    for colours, words in legend.entries:
        x = make_room(14 * len(colours) + 6 + _WORD_LETTER * len(words))
        for colour in colours:
            scene.fixed.append(Rect(x, scene.height, 14, 12, colour))
            x += 14
        scene.fixed.append(TextLine(x + 6, scene.height + 10, words))
        x += 26 + _WORD_LETTER * len(words)
    if legend.tints:
        x = make_room(_WORD_LETTER * len(legend.tints))
        scene.fixed.append(TextLine(x, scene.height + 10, legend.tints, ink=MUTED))
    scene.height += _LEGEND_LINE + 4


class TimeOrigin(NamedTuple):
    """Time origin of a picture, and its number of displayed units per unit of the timeline."""

    moment: float
    factor: float

    def place(self, time: float) -> float:
        """Convert a time of the timeline to the picture's time axis."""
        return (time - self.moment) * self.factor


def _end(timeline: Timeline, since_s: float | None) -> float:
    """Return the end of a timeline, relative to its first event or to a given time."""
    begun = timeline.start_s if since_s is None else since_s
    return timeline.start_s - begun + timeline.makespan


def _add_section(
    scene: Scene,
    timeline: Timeline,
    tints: Tints,
    since_s: float | None,
    hues: Mapping[Op, Hue],
) -> None:
    """Add the rows of a timeline, their time axis, and memory curves with their axis."""
    clock, top = scene.clock, scene.height
    since = TimeOrigin(timeline.start_s if since_s is None else since_s, clock.factor)
    height = _row_height(timeline.num_ranks)
    gap = 3.0 if height >= 16 else 1.0 if height >= 6 else 0.0
    marks = _marks(timeline, since, hues) if height >= 16 else [()] * timeline.num_ranks
    if any(marks):
        gap = MARK_HEIGHT + 4
    pitch = height + gap
    span = _end(timeline, since_s) * clock.factor
    boxes = _boxes(timeline, tints, since)
    size = _fitting_size(boxes, height, scene)
    rows: list[PictureRow] = []
    for rank, (own, beside) in enumerate(zip(boxes, marks, strict=True)):
        y = top + rank * pitch
        rows.append(PictureRow(rank, y, height, size, span, own, beside))
        share = idle_share(timeline.busy[rank], 1, timeline.makespan)
        _label(scene, rank, y, height, pitch, f"{share:.0%} idle")
    scene.height += timeline.num_ranks * pitch
    axes = [_add_axis(scene, top, span)]
    strips = _add_strips(scene, timeline, height, span, since)
    if strips:
        axes.append(_add_axis(scene, strips[0].y, span))
    scene.sections.append(Section(timeline, tuple(rows), strips, tuple(axes)))
    scene.height += 12


def _label(scene: Scene, rank: int, y: float, height: float, pitch: float, right: str) -> None:
    """Label a rank left and right of its row; if rows are thin, only every few rows."""
    if rank % max(1, math.ceil(12 / pitch)):
        return
    base = y + height / 2 + 4
    size = min(12.0, max(9.0, height - 2))
    scene.fixed.append(TextLine(LEFT - 8, base, f"rank {rank}", size, "end"))
    scene.fixed.append(TextLine(scene.width - RIGHT + 8, base, right, min(11, size), ink=MUTED))


def _boxes(timeline: Timeline, tints: Tints, since: TimeOrigin) -> list[tuple[Box, ...]]:
    """Return the boxes of each rank's compute actions."""
    flow, factor = DataFlow(timeline), since.factor
    rows: list[tuple[Box, ...]] = []
    for row in timeline.events:
        free_at = since.moment
        boxes: list[Box] = []
        for event in row:
            op, stage, microbatch, _ = event.action
            if op not in COMPUTE:
                continue
            boxes.append(
                Box(
                    since.place(event.start_s),
                    event.duration_s * factor,
                    max(0.0, event.start_s - free_at) * factor,
                    fill(op, tints.of(stage, microbatch), len(tints)),
                    str(microbatch),
                    event,
                    flow.waited_for(event),
                )
            )
            free_at = event.end_s
        rows.append(tuple(boxes))
    return rows


def _fitting_size(boxes: Sequence[tuple[Box, ...]], height: float, scene: Scene) -> float:
    """Return the font size, within bounds, at which all labels fit; one size for all boxes."""
    fitting = [
        (box.duration * scene.scale - 2) / (len(box.label) * LETTER)
        for row in boxes
        for box in row
        if box.duration > 0
    ]
    usual = _label_size(height)
    return min(usual, max(_SMALL_LABEL, min(fitting, default=usual)))


def _marks(
    timeline: Timeline, since: TimeOrigin, hues: Mapping[Op, Hue]
) -> list[tuple[AsyncMark, ...]]:
    """Return marks for the actions of each rank that ran in parallel with compute."""
    return [
        tuple(
            AsyncMark(
                since.place(event.start_s),
                event.duration_s * since.factor,
                hues[event.action.op].light,
                event,
            )
            for event in row
            if event.action.op in hues and event.duration_s > 0
        )
        for row in timeline.events
    ]


def _add_axis(scene: Scene, top: float, span: float) -> Axis:
    """Add a time axis below the last element."""
    axis = Axis(scene.height, top, span)
    name = f"time ({scene.clock.unit})" if scene.clock.unit else "time"
    scene.fixed.append(TextLine(LEFT - 8, axis.y + 15, name, _TICK_SIZE, "end", ink=MUTED))
    scene.height += 26
    return axis


def _add_strips(
    scene: Scene, timeline: Timeline, row_height: float, span: float, since: TimeOrigin
) -> tuple[Strip, ...]:
    """Add the memory curve of every rank, all to the same scale, unless no memory is kept."""
    curves = [live_activations(timeline, rank) for rank in range(timeline.num_ranks)]
    full = max((step.live for curve in curves for step in curve), default=0)
    if not full:
        return ()
    words = f"live activations ({_unit_of_memory(timeline)})"
    scene.fixed.append(TextLine(LEFT, scene.height + 10, words, 12, bold=True))
    scene.height += 18
    height = max(2.0, round(row_height * 0.75))
    pitch = height + (4.0 if height >= 12 else 1.0 if height >= 5 else 0.0)
    strips: list[Strip] = []
    for rank, curve in enumerate(curves):
        steps = tuple(LiveCount(since.place(step.time_s), step.live) for step in curve)
        strips.append(Strip(rank, scene.height, height, full, span, steps))
        peak = f"peak {timeline.peak_activations[rank]}"
        _label(scene, rank, scene.height, height, pitch, peak)
        scene.height += pitch
    return tuple(strips)


def _add_table(scene: Scene, table: Sequence[Sequence[str]]) -> None:
    """Add a table: first column left-aligned, others right-aligned, first and last row bold."""
    if not table:
        return
    right = LEFT
    edges: list[float] = []
    for column in zip(*table, strict=True):
        right += max(map(len, column)) * 7.2 + 22
        edges.append(right - 22)
    for index, line in enumerate(table):
        y = scene.height + 16
        for column_index, (edge, text) in enumerate(zip(edges, line, strict=True)):
            bold = index in (0, len(table) - 1)
            if column_index == 0:
                scene.fixed.append(TextLine(LEFT, y, text, bold=bold))
            else:
                scene.fixed.append(TextLine(edge, y, text, anchor="end", bold=bold))
        scene.height += 18
