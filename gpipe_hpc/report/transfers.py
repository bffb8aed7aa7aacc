"""Infer the transfers that ranks waited for from a measured step, as a run does not record them."""

from dataclasses import replace

from gpipe_hpc.schedule import Event, Timeline, arrival, counterpart
from gpipe_hpc.schedule.table.actions import COMPUTE
from gpipe_hpc.schedule.waits import DataFlow


def with_transfers(timeline: Timeline) -> Timeline:
    """Add a ``SEND`` event to the timeline of a rank for each of its waits for a transfer.

    The event lasts from the moment at which the value is computed and the rank is idle, until the
    rank continues.
    """
    flow = DataFlow(timeline)
    rows: list[tuple[Event, ...]] = []
    for rank, row in enumerate(timeline.events):
        free_s = timeline.start_s
        found: list[Event] = []
        for event in row:
            if event.action.op in COMPUTE:
                wait = flow.waited_for(event)
                if wait is not None and wait.maker.rank != rank and wait.send is None:
                    since_s = max(free_s, wait.maker.end_s)
                    if event.start_s > since_s:
                        send = counterpart(arrival(event.action, wait.maker.action.stage))
                        found.append(Event(rank, send, since_s, event.start_s))
                free_s = event.end_s
            found.append(event)
        rows.append(tuple(found))
    return replace(timeline, events=tuple(rows))
