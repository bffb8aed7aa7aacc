"""Render a timeline as text, one line per rank."""

import string
import textwrap
from collections.abc import Iterator, Sequence
from typing import Final

from gpipe_hpc.schedule.memory import LiveCount, live_activations
from gpipe_hpc.schedule.table.actions import COMPUTE, OF_BUCKETS, Op
from gpipe_hpc.schedule.timeline import Event, Timeline
from gpipe_hpc.visualize.colours import BESIDE, HUES
from gpipe_hpc.visualize.scene import clock_for

# Fill characters after the label of an action, so that ops differ without colour.
_FILL: Final = {Op.F: "-", Op.B: "=", Op.I: "~", Op.W: "+", Op.R: "*"}
# Fill character for idle time in which a bucket is reduced or gathered.
_BESIDE_FILL: Final = ":"
_DIGITS: Final = "." + string.digits[1:] + string.ascii_lowercase
_WIDEST: Final = 240
_LEAST_PANEL: Final = 20


def draw_text(
    timeline: Timeline, width: int | None = None, unit: str = "", page: int | None = None
) -> str:
    """Draw a line of cells for each rank, with dots for idle time, and a legend.

    Colons mark idle time in which gradients are reduced or parameters gathered. A cell shows op and
    micro-batch (`F0`), with the stage if a rank holds several (`2F0`), shortened if the action is
    too short.

    Args:
        timeline: the timeline to draw.
        width: columns of the time axis; None means enough for every label, at most 240.
        unit: name of the time unit; times in ``s`` are shown in ms or us if they are short.
        page: columns of the page, including the names of ranks; longer lines continue in panels
            below. None means no limit.
    """
    cells = _cells(timeline)
    with_stage = _with_stage(cells)
    columns = width or num_columns([timeline])
    scale = columns / timeline.makespan if timeline.makespan > 0 else 0.0
    lines = [
        _line(timeline, rank, row, scale, columns, with_stage) for rank, row in enumerate(cells)
    ]
    return "\n".join([*_panels(timeline, lines, page), _fold(_legend(timeline, cells, unit), page)])


def draw_text_memory(timeline: Timeline, width: int | None = None, page: int | None = None) -> str:
    """Draw a line for each rank with the largest number of live activations in each column.

    Activations are counted in micro-batches of one stage. Numbers above 9 are letters (a is 10),
    above 35 ``+``; a dot is 0. Columns and panels are those of `draw_text`.
    """
    columns = width or num_columns([timeline])
    ranks = range(timeline.num_ranks)
    peaks = " ".join(map(str, timeline.peak_activations))
    curves = (live_activations(timeline, rank) for rank in ranks)
    lines = [_memory_line(timeline, curve, columns) for curve in curves]
    words = f"live activations (micro-batches of one stage), peaks {peaks}"
    return "\n".join([*_panels(timeline, lines, page), _fold(words, page)])


def _panels(timeline: Timeline, lines: Sequence[str], page: int | None) -> Iterator[str]:
    """Yield the labelled lines of all ranks, divided into panels of the page's width.

    Panels are separated by a blank line; each names its range of columns.
    """
    names = [f"{_rank(timeline, rank)} " for rank in range(timeline.num_ranks)]
    longest = max(map(len, lines), default=0)
    room = longest
    if page is not None:
        room = max(_LEAST_PANEL, page - max(map(len, names), default=0))
    for first in range(0, max(longest, 1), max(room, 1)):
        if first:
            yield ""
        if longest > room:
            yield f"columns {first} to {min(first + room, longest) - 1} of {longest}:"
        for name, line in zip(names, lines, strict=True):
            yield f"{name}{line[first : first + room]}"


def _fold(words: str, page: int | None) -> str:
    return words if page is None else textwrap.fill(words, max(_LEAST_PANEL, page))


def num_columns(timelines: Sequence[Timeline]) -> int:
    """Return the width in columns at which all labels of all timelines fit; at most 240.

    This is the width of the longest timeline; on the same scale, others are narrower in proportion
    to their makespan.
    """
    longest = max((timeline.makespan for timeline in timelines), default=0.0)
    scale = max(map(_tightest_scale, timelines), default=0.0)
    return min(_WIDEST, max(1, round(scale * longest)))


def _cells(timeline: Timeline) -> list[list[Event]]:
    return [[event for event in row if event.action.op in COMPUTE] for row in timeline.events]


def _with_stage(cells: list[list[Event]]) -> bool:
    return any(len({event.action.stage for event in row}) > 1 for row in cells)


def _rank(timeline: Timeline, rank: int) -> str:
    return f"rank {rank:>{len(str(timeline.num_ranks - 1))}}"


def _label(event: Event, with_stage: bool) -> str:
    text = str(event.action)
    return text if with_stage else text[len(str(event.action.stage)) :]


def _tightest_scale(timeline: Timeline) -> float:
    """Return the columns per unit of time at which every label fits."""
    cells = _cells(timeline)
    with_stage = _with_stage(cells)
    return max(
        (
            len(_label(event, with_stage)) / event.duration_s
            for row in cells
            for event in row
            if event.duration_s > 0
        ),
        default=0.0,
    )


def _of_buckets(row: Sequence[Event]) -> list[Event]:
    """Return the reductions and all-gathers that took time."""
    return [event for event in row if event.action.op in OF_BUCKETS and event.duration_s > 0]


def _columns(timeline: Timeline, event: Event, scale: float) -> tuple[int, int]:
    """Return the first column of an event and the column after its last one."""
    ends = event.start_s, event.end_s
    first, end = (round((moment_s - timeline.start_s) * scale) for moment_s in ends)
    return first, end


def _line(
    timeline: Timeline, rank: int, row: list[Event], scale: float, columns: int, with_stage: bool
) -> str:
    line = ["."] * columns
    for event in _of_buckets(timeline.events[rank]):
        first, end = _columns(timeline, event, scale)
        line[first:end] = _BESIDE_FILL * (end - first)
    for event in row:
        first, end = _columns(timeline, event, scale)
        text = _label(event, with_stage)
        if len(text) > end - first:
            text = event.action.op.value
        line[first:end] = text.ljust(end - first, _FILL[event.action.op])[: end - first]
    return "".join(line)


def _memory_line(timeline: Timeline, steps: list[LiveCount], columns: int) -> str:
    scale = columns / timeline.makespan if timeline.makespan > 0 else 0.0
    most = [0] * columns
    ends = [*(step.time_s for step in steps[1:]), timeline.start_s + timeline.makespan]
    for (start_s, live), end_s in zip(steps, ends, strict=True):
        first = round((start_s - timeline.start_s) * scale)
        end = round((end_s - timeline.start_s) * scale)
        for column in range(first, end):
            most[column] = max(most[column], live)
    return "".join(_DIGITS[number] if number < len(_DIGITS) else "+" for number in most)


def _legend(timeline: Timeline, cells: list[list[Event]], unit: str) -> str:
    used = {event.action.op for row in cells for event in row}
    ops = [f"{op}{fill} {HUES[op].words}" for op, fill in _FILL.items() if op in used]
    beside = {event.action.op for row in timeline.events for event in _of_buckets(row)}
    words = [hue.words for op, hue in BESIDE.items() if op in beside]
    ops += [f"{_BESIDE_FILL} {' or '.join(words)}"] if words else []
    clock = clock_for(timeline.makespan, unit)
    makespan = f"{timeline.makespan * clock.factor:g} {clock.unit}".rstrip()
    return (
        f"{', '.join([*ops, '. idle'])}; makespan {makespan}, "
        f"bubble {timeline.bubble:.1%} (idle over total)"
    )
