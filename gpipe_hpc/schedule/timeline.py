"""The timeline of a step, simulated or measured: when each rank ran each action."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from gpipe_hpc.schedule.table.actions import COMPUTE, Action
from gpipe_hpc.schedule.table.lifetimes import peak_activations
from gpipe_hpc.schedule.table.schedule import Skip


def idle_share(busy: float, num_ranks: int, span: float) -> float:
    """Return the bubble: idle time of all ranks divided by their total time.

    `busy` is the compute time of all ranks together; `span` is the time from the first action of
    any rank to the end of the last action of any. Returns 0 if no time passed. Some papers divide
    by the ideal time instead, which gives larger numbers.
    """
    total = num_ranks * span
    return 1.0 - busy / total if total > 0 else 0.0


class Event(NamedTuple):
    """One executed action, with start and end in seconds or in the unit of the simulated costs."""

    rank: int
    action: Action
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        """Return the duration."""
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Timeline:
    """The events of one step, rank by rank, in the order of the table.

    Communication may overlap with compute. A ``SEND`` lasts as long as its transfer, a ``RECV``
    from its post to the arrival. The origin of the time axis is arbitrary.
    """

    events: tuple[tuple[Event, ...], ...]
    num_stages: int
    num_microbatches: int
    name: str = ""
    skips: tuple[Skip, ...] = ()

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks."""
        return len(self.events)

    @cached_property
    def start_s(self) -> float:
        """Return the start of the first event."""
        return min((event.start_s for row in self.events for event in row), default=0.0)

    @cached_property
    def makespan(self) -> float:
        """Return the time from the start of the first event to the end of the last."""
        ends = (event.end_s for row in self.events for event in row)
        return max(ends, default=self.start_s) - self.start_s

    @cached_property
    def end_of_compute(self) -> float:
        """Return the end of the last compute action."""
        ends = (e.end_s for row in self.events for e in row if e.action.op in COMPUTE)
        return max(ends, default=self.start_s)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Return the compute time of each rank."""
        return tuple(
            sum(event.duration_s for event in row if event.action.op in COMPUTE)
            for row in self.events
        )

    @property
    def bubble(self) -> float:
        """Return the idle share of the total time of all ranks; see `idle_share`."""
        return idle_share(sum(self.busy), self.num_ranks, self.makespan)

    @cached_property
    def peak_activations(self) -> tuple[int, ...]:
        """Return the largest number of kept (stage, micro-batch) pairs per rank.

        Counted in table order, from ``F`` to the end of ``B`` or ``W``.
        """
        return tuple(peak_activations([event.action for event in row]).size for row in self.events)
