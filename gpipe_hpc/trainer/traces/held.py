"""What a rank holds of some steps while a run goes on: when its actions ran."""

from array import array
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from gpipe_hpc.comm.collectives.group import Gathering
from gpipe_hpc.engine.recorder import Moments
from gpipe_hpc.schedule import Event, Schedule, Timeline, parse_action
from gpipe_hpc.trainer.traces.around import Around


class HeldStep(NamedTuple):
    """One step of one rank; `pipeline_s` is what it took all ranks together.

    `around`: what else it did then. `origin_s`: the moment of this rank's clock from which all
    ranks count.
    """

    step: int
    pipeline_s: float
    moments: Moments
    origin_s: float = 0.0
    around: tuple[Around, ...] = ()


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

    def take(self, held: HeldStep) -> None:
        """Hold a step."""
        self._steps.append(held)

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
    """One step of all ranks, in the order of world ranks; `is_median` among those traced.

    `around`: what each did besides, on the same clock as the rows.
    """

    step: int
    pipeline_s: float
    rows: tuple[tuple[Event, ...], ...]
    num_stage_ranks: int
    is_median: bool
    around: tuple[tuple[Around, ...], ...] = ()

    def replicas(self) -> list[tuple[tuple[Event, ...], ...]]:
        """Return the rows of each replica."""
        size = self.num_stage_ranks
        return [self.rows[at : at + size] for at in range(0, len(self.rows), size)]


def gather_steps(
    group: Gathering, held: Sequence[HeldStep], median: HeldStep | None, num_stage_ranks: int
) -> list[TracedStep]:
    """Return the steps of all ranks on world rank 0, nothing elsewhere; the same call everywhere.

    Each rank sends its own rows alone.
    """
    own = [
        (
            list(map(str, each.moments.actions)),
            [m - each.origin_s for m in each.moments.seconds],
            [(name, s - each.origin_s, e - each.origin_s) for name, s, e in each.around],
        )
        for each in held
    ]
    everybody: list[Any] | None = group.gather_object(own, root=0)
    if everybody is None:
        return []
    return [
        TracedStep(
            each.step,
            each.pipeline_s,
            tuple(
                _events(rank % num_stage_ranks, *told[number][:2])
                for rank, told in enumerate(everybody)
            ),
            num_stage_ranks,
            is_median=each is median,
            around=tuple(tuple(Around(*one) for one in told[number][2]) for told in everybody),
        )
        for number, each in enumerate(held)
    ]


def _events(rank: int, actions: Sequence[str], seconds: Sequence[float]) -> tuple[Event, ...]:
    return Moments(tuple(map(parse_action, actions)), array("d", seconds)).events(rank)


def timelines_of(traced: TracedStep, tables: Sequence[Schedule]) -> list[Timeline]:
    """Return a timeline for each replica; `tables`: what each ran."""
    return [
        Timeline(rows, table.num_stages, table.num_microbatches, table.name, table.skips)
        for rows, table in zip(traced.replicas(), tables, strict=True)
    ]
