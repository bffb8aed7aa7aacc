"""What a rank holds of some steps while a run goes on: when its actions ran."""

from array import array
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from gpipe_hpc.comm.group import Group
from gpipe_hpc.schedule import Action, Event, Schedule, Timeline, parse_action


class HeldStep(NamedTuple):
    """One step of one rank, in little memory; `pipeline_s` is what it took all ranks together.

    `moments` are start and end of each action in turn, in seconds that all ranks count alike.
    """

    step: int
    pipeline_s: float
    actions: tuple[Action, ...]
    moments: "array[float]"  # a class that takes no parameter before Python 3.12

    @property
    def busy_s(self) -> float:
        """Return the time that this rank computed."""
        spans = zip(self.moments[0::2], self.moments[1::2], strict=True)
        return sum(end - start for start, end in spans)


class HeldSteps:
    """The last `most` steps; with `first_step` the first `most` from that one on.

    Every rank holds the same steps, so all know without a word which one is the median.
    """

    def __init__(self, most: int, first_step: int | None = None) -> None:
        self._first_step = first_step
        self._steps: deque[HeldStep] = deque(maxlen=most)

    def wants(self, step: int) -> bool:
        """Say whether a step is to be held."""
        if self._first_step is None:
            return self._steps.maxlen != 0
        return step >= self._first_step and len(self._steps) != self._steps.maxlen

    def take(self, step: int, pipeline_s: float, events: Sequence[Event], origin_s: float) -> None:
        """Hold a step; `origin_s` is the moment from which all ranks count."""
        moments = array("d", (m - origin_s for e in events for m in (e.start_s, e.end_s)))
        self._steps.append(HeldStep(step, pipeline_s, tuple(e.action for e in events), moments))

    @property
    def steps(self) -> tuple[HeldStep, ...]:
        """Return what is held, from the earliest step."""
        return tuple(self._steps)

    @property
    def median(self) -> HeldStep | None:
        """Return the step whose time is the median, of two the faster; None if none is held."""
        ordered = sorted(self._steps, key=lambda held: held.pipeline_s)
        return ordered[(len(ordered) - 1) // 2] if ordered else None


class TracedStep(NamedTuple):
    """One step of all ranks, in the order of world ranks; `is_median` among those traced."""

    step: int
    pipeline_s: float
    rows: tuple[tuple[Event, ...], ...]
    num_stage_ranks: int
    is_median: bool

    def replicas(self) -> list[tuple[tuple[Event, ...], ...]]:
        """Return the rows of each replica."""
        size = self.num_stage_ranks
        return [self.rows[at : at + size] for at in range(0, len(self.rows), size)]


def gather_steps(
    group: Group, held: Sequence[HeldStep], median: HeldStep | None, num_stage_ranks: int
) -> list[TracedStep]:
    """Return the steps of all ranks on world rank 0, nothing elsewhere; the same call everywhere.

    Each rank sends its own rows alone.
    """
    own = [(list(map(str, each.actions)), each.moments.tolist()) for each in held]
    everybody: list[Any] | None = group.gather_object(own, root=0)
    if everybody is None:
        return []
    return [
        TracedStep(
            each.step,
            each.pipeline_s,
            tuple(
                tuple(_events(rank % num_stage_ranks, *told[number]))
                for rank, told in enumerate(everybody)
            ),
            num_stage_ranks,
            is_median=each is median,
        )
        for number, each in enumerate(held)
    ]


def _events(rank: int, actions: Sequence[str], moments: Sequence[float]) -> list[Event]:
    parsed = map(parse_action, actions)
    spans = zip(parsed, moments[0::2], moments[1::2], strict=True)
    return [Event(rank, action, start, end) for action, start, end in spans]


def timelines_of(traced: TracedStep, table: Schedule) -> list[Timeline]:
    """Return a timeline for each replica; all ran the one table."""
    return [
        Timeline(rows, table.num_stages, table.num_microbatches, table.name, table.skips)
        for rows in traced.replicas()
    ]
