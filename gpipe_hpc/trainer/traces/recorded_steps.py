"""Events of recent steps, kept in memory on each rank and gathered when a run ends."""

from array import array
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from gpipe_hpc.comm.collectives.group import ControlGroup
from gpipe_hpc.engine import ActionTimes
from gpipe_hpc.schedule import Event, Schedule, Timeline, parse_action
from gpipe_hpc.trainer.traces.files import OutsideActivity


class RecordedStep(NamedTuple):
    """The events of one step on one rank.

    `pipeline_s` is the pipeline time of all ranks; `around` lists activities outside the pipeline;
    `origin_s` is the reading of this rank's clock from which times are counted.
    """

    step: int
    pipeline_s: float
    moments: ActionTimes
    origin_s: float = 0.0
    around: tuple[OutsideActivity, ...] = ()


class RecordedSteps:
    """Store of the last `most` steps, or of the first `most` steps from `first_step` on.

    Every rank stores the same steps, so all choose the same median without communication.
    """

    def __init__(self, most: int, first_step: int | None = None) -> None:
        self._first_step = first_step
        self._steps: deque[RecordedStep] = deque(maxlen=most)

    def wants(self, step: int) -> bool:
        """Return whether a step is to be stored."""
        if self._first_step is None:
            return self._steps.maxlen != 0
        return step >= self._first_step and len(self._steps) != self._steps.maxlen

    def take(self, held: RecordedStep) -> None:
        """Store a step."""
        self._steps.append(held)

    @property
    def steps(self) -> tuple[RecordedStep, ...]:
        """Return the stored steps, earliest first."""
        return tuple(self._steps)

    @property
    def median(self) -> RecordedStep | None:
        """Return the step with the median time (the faster of two); None if none is stored."""
        ordered = sorted(self._steps, key=lambda held: held.pipeline_s)
        return ordered[(len(ordered) - 1) // 2] if ordered else None


class TracedStep(NamedTuple):
    """One step of all ranks: `rows` contains the events of each world rank.

    `is_median` is set for the median of the traced steps; `around` lists each rank's activities
    outside the pipeline, on the same clock.
    """

    step: int
    pipeline_s: float
    rows: tuple[tuple[Event, ...], ...]
    is_median: bool
    around: tuple[tuple[OutsideActivity, ...], ...] = ()


def gather_steps(
    group: ControlGroup,
    held: Sequence[RecordedStep],
    median: RecordedStep | None,
    num_stage_ranks: int,
) -> list[TracedStep]:
    """Gather steps of all ranks on rank 0; return an empty list elsewhere. Collective."""
    own = [
        (
            list(map(str, each.moments.actions)),
            [m - each.origin_s for m in each.moments.seconds],
            [(name, s - each.origin_s, e - each.origin_s) for name, s, e in each.around],
        )
        for each in held
    ]
    gathered: list[Any] | None = group.gather_object(own, root=0)
    if gathered is None:
        return []
    return [
        TracedStep(
            each.step,
            each.pipeline_s,
            tuple(
                _events(rank % num_stage_ranks, *told[number][:2])
                for rank, told in enumerate(gathered)
            ),
            is_median=each is median,
            around=tuple(
                tuple(OutsideActivity(*one) for one in told[number][2]) for told in gathered
            ),
        )
        for number, each in enumerate(held)
    ]


def _events(rank: int, actions: Sequence[str], seconds: Sequence[float]) -> tuple[Event, ...]:
    return ActionTimes(tuple(map(parse_action, actions)), array("d", seconds)).events(rank)


def timelines_of(traced: TracedStep, tables: Sequence[Schedule]) -> list[Timeline]:
    """Return a timeline for each replica of a traced step; `tables` are the replicas' schedules."""
    size = len(traced.rows) // len(tables)
    return [
        Timeline(
            traced.rows[number * size : (number + 1) * size],
            table.num_stages,
            table.num_microbatches,
            table.name,
            table.skips,
        )
        for number, table in enumerate(tables)
    ]
