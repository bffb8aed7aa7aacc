"""Measurements of each rank, gathered on rank 0, and the causes of idle time."""

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from gpipe_hpc.device.cores.machine import allowed_cpus, cpus_text
from gpipe_hpc.pipeline import Pipeline
from gpipe_hpc.schedule import BubbleCauses, Timeline, explain_measured
from gpipe_hpc.trainer.one_step import StepPartTimes
from gpipe_hpc.trainer.summary.layer_clock import LayerTime
from gpipe_hpc.trainer.traces.recorded_steps import RecordedStep


@dataclass
class TimeSums:
    """Total times of a rank over the steps of a start, in seconds, without its first step.

    The first step, which includes initialization, counts only if it is the only one.
    """

    num_steps: int = 0
    computed_s: float = 0.0
    reading_s: float = 0.0
    clipping_s: float = 0.0
    optimizer_s: float = 0.0

    def add(self, computed_s: float, spent: StepPartTimes) -> None:
        """Add the times of a step."""
        if self.num_steps == 1:
            self.computed_s = self.reading_s = self.clipping_s = self.optimizer_s = 0.0
        self.num_steps += 1
        self.computed_s += computed_s
        self.reading_s += spent.reading_s
        self.clipping_s += spent.clipping_s
        self.optimizer_s += spent.optimizer_s

    def means(self) -> tuple[float | None, float | None, float | None]:
        """Return mean seconds of reading, clipping and optimizer; None before the first step."""
        if not self.num_steps:
            return None, None, None
        counted = max(1, self.num_steps - 1)
        return self.reading_s / counted, self.clipping_s / counted, self.optimizer_s / counted


class RankFigures(NamedTuple):
    """Measurements of one rank; times in seconds.

    Args:
        busy_s: computing time in the median of the traced steps, if any.
        computed_s: total computing time of all steps but the first, which includes initialization.
        reading_s, clipping_s, optimizer_s: means over these steps.
        layers: forward times of layers in a few steps.
    """

    rank: int
    replica: int
    stage_rank: int
    stages: tuple[int, ...]
    host: str
    device: str
    busy_s: float | None
    peak_memory_bytes: int
    memory_before_bytes: int  # in use before the model was built
    computed_s: float = 0.0
    cpus: str | None = None  # allowed CPUs in Linux's list format
    num_threads: int | None = None
    reading_s: float | None = None
    clipping_s: float | None = None
    optimizer_s: float | None = None
    layers: tuple[LayerTime, ...] = ()

    @classmethod
    def of(
        cls,
        pipe: Pipeline,
        median: RecordedStep | None,
        memory_before_bytes: int,
        sums: TimeSums,
        layers: tuple[LayerTime, ...],
    ) -> "RankFigures":
        """Collect the measurements of this rank."""
        device, cpus = pipe.world.device, allowed_cpus()
        return cls(
            pipe.world.rank,
            pipe.replica,
            pipe.stage_rank,
            tuple(pipe.stages),
            socket.gethostname(),
            device.name,
            None if median is None else median.moments.busy_s,
            device.memory_peak(),
            memory_before_bytes,
            sums.computed_s,
            None if cpus is None else cpus_text(cpus),
            torch.get_num_threads(),
            *sums.means(),
            layers,
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the measurements as a dict for summary.json."""
        return self._asdict() | {
            "stages": list(self.stages),
            "layers": [layer._asdict() for layer in self.layers],
        }


def idle_of_ranks(
    ranks: Sequence[RankFigures], pipeline_s: float, replicas: Sequence[Timeline]
) -> list[dict[str, Any]]:
    """Return each rank's busy and idle seconds in a step of `pipeline_s`, and the causes of idling.

    The causes come from the measured timeline of the rank's replica, plus the time before and after
    it, during which other replicas work; they are None if `replicas` is empty.
    """
    causes = [
        _causes(own, timeline, pipeline_s)
        for timeline in replicas
        for own in explain_measured(timeline)
    ]
    return [
        {
            "busy_s": figures.busy_s,
            "idle_s": None if figures.busy_s is None else pipeline_s - figures.busy_s,
            "idle_causes": causes[number] if causes else None,
        }
        for number, figures in enumerate(ranks)
    ]


def _causes(own: BubbleCauses, timeline: Timeline, pipeline_s: float) -> dict[str, float]:
    """Return idle seconds by cause; they add up to the idle time within `pipeline_s`.

    That time ends when all compute actions have run; the rest of an ongoing reduction is not
    counted.
    """
    left_s = pipeline_s - (timeline.makespan - own.reduction_tail)
    if left_s < 0:  # parameters were still being gathered when the first rank computed
        own, left_s = own._replace(transfers=own.transfers + left_s), 0.0
    tail_s = min(own.reduction_tail, left_s)
    seconds = own._replace(reduction_tail=tail_s)._asdict()
    return {f"{name}_s": value for name, value in seconds.items()} | {
        "other_replicas_s": left_s - tail_s
    }
