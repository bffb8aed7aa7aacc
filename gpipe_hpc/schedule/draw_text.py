"""A timeline as text: one line a rank."""

from typing import Final

from gpipe_hpc.schedule.actions import COMPUTE, Op
from gpipe_hpc.schedule.timeline import Event, Timeline

# What fills an action's cell behind its label, so that ops differ without colour.
_FILL: Final = {Op.F: "-", Op.B: "=", Op.I: "~", Op.W: "+", Op.R: "*"}
_MEANING: Final = {
    Op.F: "forward",
    Op.B: "backward",
    Op.I: "input gradient",
    Op.W: "weight gradient",
    Op.R: "recompute",
}
_WIDEST: Final = 240
_LONGEST_LEGEND: Final = 92


def draw_text(timeline: Timeline, width: int | None = None) -> str:
    """Draw a line of cells for each rank, dots where it idles, and a legend.

    A cell holds op and micro-batch (`F0`), with stage where a rank holds several (`2F0`), cut off
    where time is too short for it. `width` is the number of columns the time axis takes; None: just
    enough for every label, 240 at most.
    """
    cells = [[event for event in row if event.action.op in COMPUTE] for row in timeline.events]
    with_stage = any(len({event.action.stage for event in row}) > 1 for row in cells)
    columns = width or _natural_width(timeline, cells, with_stage)
    scale = columns / timeline.makespan if timeline.makespan > 0 else 0.0
    margin = len(str(timeline.num_ranks - 1))
    lines = [
        f"rank {rank:>{margin}} {_line(timeline, row, scale, columns, with_stage)}"
        for rank, row in enumerate(cells)
    ]
    return "\n".join([*lines, _legend(timeline, cells)])


def _label(event: Event, with_stage: bool) -> str:
    text = str(event.action)
    return text if with_stage else text[len(str(event.action.stage)) :]


def _natural_width(timeline: Timeline, cells: list[list[Event]], with_stage: bool) -> int:
    """Return the columns at which the tightest label just fits, within bounds."""
    scale = max(
        (
            len(_label(event, with_stage)) / event.duration_s
            for row in cells
            for event in row
            if event.duration_s > 0
        ),
        default=0.0,
    )
    return min(_WIDEST, max(1, round(scale * timeline.makespan)))


def _line(
    timeline: Timeline, row: list[Event], scale: float, columns: int, with_stage: bool
) -> str:
    line = ["."] * columns
    for event in row:
        first = round((event.start_s - timeline.start_s) * scale)
        end = round((event.end_s - timeline.start_s) * scale)
        text = _label(event, with_stage)
        if len(text) > end - first:
            text = event.action.op.value
        line[first:end] = text.ljust(end - first, _FILL[event.action.op])[: end - first]
    return "".join(line)


def _legend(timeline: Timeline, cells: list[list[Event]]) -> str:
    used = {event.action.op for row in cells for event in row}
    ops = [f"{op}{fill} {_MEANING[op]}" for op, fill in _FILL.items() if op in used]
    times = f"makespan {timeline.makespan:g}, bubble {timeline.bubble:.1%} (idle over total)"
    line = f"{', '.join([*ops, '. idle'])}; {times}"
    return line if len(line) <= _LONGEST_LEGEND else line.replace("; ", ";\n")
