"""What an event waited for, read off the data flow and the times of a timeline."""

from collections.abc import Iterator
from operator import itemgetter
from typing import NamedTuple

from gpipe_hpc.schedule.table.actions import COMPUTE, SENDS, Action, Op
from gpipe_hpc.schedule.table.dependencies import (
    CONSUMERS,
    arrival,
    counterpart,
    dependencies,
    provides,
)
from gpipe_hpc.schedule.timeline import Event, Timeline


class Transfer(NamedTuple):
    """A value that crossed ranks: who made it, its ``SEND``, who used it."""

    maker: Event
    send: Event
    user: Event


class Wait(NamedTuple):
    """A dependency: who made the value and, if recorded, the ``SEND`` or ``FETCH`` it came by."""

    maker: Event
    send: Event | None

    @property
    def over_s(self) -> float:
        """Return when the value was there."""
        return self.maker.end_s if self.send is None else self.send.end_s


class DataFlow:
    """The events of a timeline by what they provide."""

    def __init__(self, timeline: Timeline) -> None:
        """Index all events but reductions, which nobody waits for."""
        self._timeline = timeline
        self._makers: dict[Action, Event] = {}
        for row in timeline.events:
            for event in row:
                if event.action.op is not Op.REDUCE_GRAD:
                    self._makers.update(dict.fromkeys(provides(event.action), event))

    def waited_for(self, event: Event) -> Wait | None:
        """Return the last of an event's dependencies to finish; None if it has none."""
        last: Wait | None = None
        for maker in self._needs(event):
            wait = self._wait(event, maker)
            if last is None or wait.over_s >= last.over_s:
                last = wait
        return last

    def _wait(self, event: Event, maker: Event) -> Wait:
        """Return the wait for what `maker` made; of what was fetched, its forward made it."""
        if maker.action.op is Op.FETCH:
            forward = self._makers.get(maker.action._replace(op=Op.F))
            return Wait(maker, None) if forward is None else Wait(forward, maker)
        return Wait(maker, self._sender(event, maker))

    def transfers(self) -> Iterator[Transfer]:
        """Yield the transfers whose ``SEND`` was recorded, by their user."""
        for row in self._timeline.events:
            for event in row:
                if event.action.op in CONSUMERS:
                    for maker in self._needs(event):
                        send = self._sender(event, maker)
                        if send is not None:
                            yield Transfer(maker, send, event)

    def _needs(self, event: Event) -> Iterator[Event]:
        if event.action.op not in COMPUTE:
            return
        of = self._timeline
        for need in dependencies(event.action, of.num_stages, of.num_microbatches, of.skips):
            maker = self._makers.get(need)
            if maker is not None:
                yield maker

    def _sender(self, event: Event, maker: Event) -> Event | None:
        if maker.rank == event.rank or event.action.op not in CONSUMERS:
            return None
        send = self._makers.get(counterpart(arrival(event.action, maker.action.stage)))
        assert send is None or send.action.op in SENDS
        return send


class Step(NamedTuple):
    """From `time_s` on, `live` micro-batches of a stage are kept."""

    time_s: float
    live: int


def memory_curve(row: tuple[Event, ...]) -> list[Step]:
    """Return how many micro-batches of one stage a rank keeps over time.

    One counts from the start of its ``F`` to the end of its ``B`` or ``W``, without either to the
    end of its ``F``, and not from the end of its ``OFFLOAD`` to the start of its ``FETCH``. Without
    those, which run beside compute, the peak is `Timeline.peak_activations`.
    """
    freed = {(e.action.stage, e.action.microbatch) for e in row if e.action.op in (Op.B, Op.W)}
    changes: list[tuple[float, int]] = []
    for event in row:
        op, stage, microbatch, _ = event.action
        if op in (Op.F, Op.FETCH):
            changes.append((event.start_s, 1))
            if (stage, microbatch) not in freed:
                changes.append((event.end_s, -1))
        elif op in (Op.B, Op.W, Op.OFFLOAD):
            changes.append((event.end_s, -1))
    changes.sort(key=itemgetter(0))
    steps: list[Step] = []
    live = 0
    for time_s, by in changes:
        live += by
        if steps and steps[-1].time_s == time_s:
            steps.pop()
        if not steps or steps[-1].live != live:
            steps.append(Step(time_s, live))
    return steps
