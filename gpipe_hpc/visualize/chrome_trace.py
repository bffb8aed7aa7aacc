"""Convert timelines to Chrome trace events, which Perfetto and chrome://tracing open.

Source: Trace Event Format, Google, 2016.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final

from gpipe_hpc.schedule.memory import live_activations
from gpipe_hpc.schedule.table.actions import COMPUTE, COPIES, REDUCTIONS, Op
from gpipe_hpc.schedule.timeline import Event, Timeline
from gpipe_hpc.schedule.waits import DataFlow, Transfer
from gpipe_hpc.visualize.colours import HUES

TraceEvent = dict[str, Any]
_US_PER_S: Final = 1e6
# Viewers treat thread 0 as idle, and a thread with the number of its process as the main thread.
_PIDS_APART: Final = 1_000_000
_FIRST_TID: Final = 1


def chrome_trace(timelines: Sequence[Timeline]) -> str:
    """Return trace JSON in which each timeline is a process and each of its ranks a thread.

    One unit of the timeline's time becomes one second. Recorded transfers are arrows from maker to
    user and, with their times, a track for each pair of ranks. Host copies, reductions and
    all-gathers are tracks of each rank; live activations are counters.
    """
    events = [
        event
        for number, each in enumerate(timelines, 1)
        for event in _process(number * _PIDS_APART, each)
    ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"))


def _process(pid: int, timeline: Timeline) -> Iterator[TraceEvent]:
    name = timeline.name or "timeline"
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    flow = DataFlow(timeline)
    for rank, row in enumerate(timeline.events):
        place = {"pid": pid, "tid": _FIRST_TID + rank}
        yield {"ph": "M", "name": "thread_name", **place, "args": {"name": f"rank {rank}"}}
        yield {"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": rank}}
        for event in row:
            if event.action.op in COMPUTE:
                yield _slice(pid, event, timeline, flow)
            elif event.action.op in COPIES:
                yield from _span(pid, event, timeline, "copy", f"copies of rank {rank}")
            elif event.action.op is Op.UNSHARD:
                yield from _span(pid, event, timeline, "gather", f"gatherings of rank {rank}")
            elif event.action.op in REDUCTIONS and event.duration_s > 0:
                yield from _span(pid, event, timeline, "reduce", f"reductions of rank {rank}")
        for time_s, live in live_activations(timeline, rank):
            yield {
                "ph": "C",
                "name": f"live activations, rank {rank}",
                "pid": pid,
                "ts": _us(time_s, timeline),
                "args": {"micro-batches of one stage": live},
            }
    # Sorted by time: at equal times, one transfer must end before the next begins.
    transfers = sorted(flow.transfers(), key=lambda each: (each.send.start_s, each.send.end_s))
    for number, transfer in enumerate(transfers):
        yield from _transfer(pid, number, transfer, timeline)


def _slice(pid: int, event: Event, timeline: Timeline, flow: DataFlow) -> TraceEvent:
    op, stage, microbatch, _ = event.action
    wait = flow.waited_for(event)
    return {
        "ph": "X",
        "name": str(event.action),
        "cat": HUES[op].words,
        "pid": pid,
        "tid": _FIRST_TID + event.rank,
        "ts": _us(event.start_s, timeline),
        "dur": round(event.duration_s * _US_PER_S, 3),
        "args": {
            "stage": stage,
            "microbatch": microbatch,
            "waited for": str((wait.send or wait.maker).action) if wait else "nothing",
            "why": wait.thing if wait else "",
        },
    }


def _transfer(
    pid: int, number: int, transfer: Transfer, timeline: Timeline
) -> Iterator[TraceEvent]:
    """Yield the arrow from maker to user, and the span, of a transfer."""
    maker, send, user = transfer
    arrow = {"cat": "transfer", "name": str(send.action), "pid": pid, "id": f"{pid}.{number}"}
    # An arrow is attached to slices: it starts inside the maker's and ends at the user's start.
    leaves = (maker.start_s + maker.end_s) / 2
    yield {**arrow, "ph": "s", "tid": _FIRST_TID + maker.rank, "ts": _us(leaves, timeline)}
    yield {
        **arrow,
        "ph": "f",
        "bp": "e",
        "tid": _FIRST_TID + user.rank,
        "ts": _us(user.start_s, timeline),
    }
    # Transfers over one link do not overlap, so one track per link suffices.
    yield from _span(pid, send, timeline, "transfer", f"rank {send.rank} to {user.rank}")


def _span(pid: int, event: Event, timeline: Timeline, kind: str, link: str) -> Iterator[TraceEvent]:
    """Yield begin and end of an asynchronous action on its own track, unless it took no time."""
    track = {
        "cat": kind,
        "name": str(event.action),
        "pid": pid,
        "tid": _FIRST_TID + event.rank,
        "id2": {"local": link},
        "args": {"link": link},
    }
    if event.end_s <= event.start_s:
        return
    yield {**track, "ph": "b", "ts": _us(event.start_s, timeline)}
    yield {**track, "ph": "e", "ts": _us(event.end_s, timeline)}


def _us(time_s: float, timeline: Timeline) -> float:
    return round((time_s - timeline.start_s) * _US_PER_S, 3)
