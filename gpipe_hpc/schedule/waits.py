"""Causes of waiting in a timeline: which value each event waited for, and when it was available."""

from collections.abc import Iterator
from typing import NamedTuple

from gpipe_hpc.schedule.table.actions import COMPUTE, COPIES, OF_BUCKETS, SENDS, Action, Op
from gpipe_hpc.schedule.table.dependencies import (
    CONSUMERS,
    Need,
    ValueKind,
    arrival,
    counterpart,
    needs,
    provides,
)
from gpipe_hpc.schedule.timeline import Event, Timeline


class Transfer(NamedTuple):
    """A value sent between ranks: its maker, its ``SEND``, and the event that used it."""

    maker: Event
    send: Event
    user: Event


class Wait(NamedTuple):
    """A dependency of an event on a value.

    Attributes:
        maker: the event that made the value.
        send: the recorded ``SEND`` or ``FETCH`` that delivered the value, or None. If the event
            waited for memory to be freed by an offload: the ``OFFLOAD``.
        thing: the kind of value.
    """

    maker: Event
    send: Event | None
    thing: ValueKind

    @property
    def over_s(self) -> float:
        """Return the time from which the value was available."""
        return self.maker.end_s if self.send is None else self.send.end_s


class DataFlow:
    """The data flow between the recorded events of a timeline."""

    def __init__(self, timeline: Timeline) -> None:
        """Index all events except reductions, for which no other event waits."""
        self._timeline = timeline
        self._gathers: dict[tuple[int, int], list[Event]] = {}
        self._makers: dict[Action, Event] = {}
        self._of_kind: dict[tuple[Op, int], tuple[Need, ...]] = {}
        self._offloads: dict[Action, Event] = {}  # offload that a compute action waits for
        for row in timeline.events:
            last: Event | None = None  # offload since the last compute action
            due: Event | None = None  # offload before that
            for event in row:
                if event.action.op is Op.UNSHARD:
                    place = event.action.stage, event.rank
                    self._gathers.setdefault(place, []).append(event)
                if event.action.op is Op.OFFLOAD:
                    last = event
                elif event.action.op in COMPUTE:
                    if due is not None:
                        self._offloads[event.action] = due
                    last, due = None, last
                if event.action.op not in OF_BUCKETS:
                    self._makers.update(dict.fromkeys(provides(event.action), event))

    def waits(self, event: Event) -> Iterator[Wait]:
        """Yield the recorded dependencies of an event."""
        for maker, thing in self._needs(event):
            # The maker of fetched activations is their forward.
            forward = None
            if maker.action.op is Op.FETCH:
                forward = self._makers.get(maker.action._replace(op=Op.F))
            if forward is not None:
                yield Wait(forward, maker, thing)
            else:
                yield Wait(maker, self._sender(event, maker), thing)
        offload = self._offloads.get(event.action)
        if offload is not None:
            forward = self._makers.get(offload.action._replace(op=Op.F))
            if forward is not None:
                yield Wait(forward, offload, ValueKind.COPY)

    def waited_for(self, event: Event) -> Wait | None:
        """Return the dependency of an event that became available last; None if it has none."""
        last: Wait | None = None
        for wait in self.waits(event):
            if last is None or wait.over_s >= last.over_s:
                last = wait
        return last

    def transfers(self) -> Iterator[Transfer]:
        """Yield the transfers whose ``SEND`` was recorded, in the order of their users."""
        for row in self._timeline.events:
            for event in row:
                if event.action.op in CONSUMERS:
                    for maker, _ in self._needs(event):
                        send = self._sender(event, maker)
                        if send is not None:
                            yield Transfer(maker, send, event)

    def _needs(self, event: Event) -> Iterator[tuple[Event, ValueKind]]:
        op, stage, microbatch, _ = event.action
        if op not in COMPUTE and op not in COPIES:
            return
        of = self._timeline
        # The same for all micro-batches.
        kind = self._of_kind.get((op, stage))
        if kind is None:
            kind = needs(event.action, of.num_stages, of.num_microbatches, of.skips)
            self._of_kind[op, stage] = kind
        for need, things in kind:
            if need.op is Op.UNSHARD:
                for gather in self._gathers.get((stage, event.rank), ()):
                    yield gather, things[0]
                continue
            maker = self._makers.get(Action(need.op, need.stage, microbatch))
            if maker is not None:
                yield maker, things[0]

    def _sender(self, event: Event, maker: Event) -> Event | None:
        if maker.rank == event.rank or event.action.op not in CONSUMERS:
            return None
        send = self._makers.get(counterpart(arrival(event.action, maker.action.stage)))
        assert send is None or send.action.op in SENDS
        return send
