"""The edge of a step: what all ranks then know of it, told where they meet behind the pipeline."""

import time
from collections.abc import Callable
from typing import Final, NamedTuple

import torch

from gpipe_hpc.comm.collectives.group import Gathering
from gpipe_hpc.comm.collectives.rank_summary import RankSummary
from gpipe_hpc.device.device import Device
from gpipe_hpc.device.host.clock import clock_identity
from gpipe_hpc.engine.recorder import StepMarks, StepTimes
from gpipe_hpc.schedule import idle_share
from gpipe_hpc.trainer.one_step import Laps

_FEW_RANKS: Final = range(2, 9)  # whose memory is told rank by rank


class TimedStep(NamedTuple):
    """A step of this rank, with marks that are still to be read.

    `origin_s`: the moment of its clock from which all ranks count, see `StepEdge`.
    """

    step: int
    marks: StepMarks
    laps: Laps
    origin_s: float


class Told(NamedTuple):
    """What one rank says of a step.

    `origin_s`: the moment of its clock from which all ranks count, see `StepEdge`. `straggles`:
    how many times as long as before it computes, 0 unless it is a straggler.
    """

    times: StepTimes
    peak_memory_bytes: int
    wants_to_stop: bool = False
    has_written: bool = True
    origin_s: float = 0.0
    straggles: float = 0.0

    def numbers(self) -> tuple[float, ...]:
        """Return it as numbers, moments since the origin; `agree` reads their sums."""
        busy_s, start_s, end_s = self.times
        return (
            busy_s,
            start_s - self.origin_s,
            end_s - self.origin_s,
            float(self.peak_memory_bytes),
            float(self.wants_to_stop),
            float(self.has_written),
            self.straggles,
        )


class Agreed(NamedTuple):
    """What all ranks know of a step.

    `pipeline_s`: seconds from the start of the first action of any rank to the end of the last.
    `bubble`: see `idle_share`, of all ranks of all replicas.
    `peak_memory_bytes`: of the rank that had most so far, and which that is;
    `least_peak_memory_bytes`: of the one that had least. `is_stopped`: some rank wants to stop.
    `is_written`: all ranks have written. `busy_s`: what all ranks together computed. `straggles`:
    see `Told`, of the worst rank, and which that is. `peaks_bytes`: of each rank, where there are 2
    to 8 of them and they add at once; else empty.
    """

    pipeline_s: float
    bubble: float
    peak_memory_bytes: int
    peak_memory_rank: int
    least_peak_memory_bytes: int
    is_stopped: bool
    is_written: bool
    busy_s: float = 0.0
    straggles: float = 0.0
    straggling_rank: int = 0
    peaks_bytes: tuple[int, ...] = ()


def agree(told: RankSummary, num_ranks: int) -> Agreed:
    """Return what all ranks say of the step; `told`: their numbers, in sum."""
    busy_s, starts_s, ends_s, peaks, stops, written, straggles = range(7)
    span_s = max(0.0, told.greatest[ends_s] - told.least[starts_s])
    return Agreed(
        span_s,
        idle_share(told.totals[busy_s], num_ranks, span_s),
        int(told.greatest[peaks]),
        told.first[peaks],
        int(told.least[peaks]),
        is_stopped=told.greatest[stops] > 0,
        is_written=told.least[written] > 0,
        busy_s=told.totals[busy_s],
        straggles=told.greatest[straggles],
        straggling_rank=told.first[straggles],
        peaks_bytes=tuple(int(e[peaks]) for e in told.each) if num_ranks in _FEW_RANKS else (),
    )


def is_told_late(device: Device) -> bool:
    """Say whether ranks tell the times of a step behind the next: its clock would be waited for."""
    return device.is_accelerator


class StepEdge:
    """From when on ranks count the time of a step.

    Ranks on several hosts have several clocks. There each counts its time from the moment at which
    it left the meeting before, which all leave together except for the time of a message.
    `origin_s`: the moment of this rank's clock from which all count the step after it.
    """

    def __init__(
        self,
        group: Gathering,
        *,
        now: Callable[[], float] = time.perf_counter,
        clock: Callable[[], int] = clock_identity,
    ) -> None:
        """Find out whether all share a clock; the same call on every rank."""
        own = clock()
        most = torch.tensor([own, -own], dtype=torch.float64)
        group.all_reduce_max(most)
        highest, lowest = most[0].item(), -most[1].item()
        self._is_one_clock = highest == lowest
        self.origin_s = 0.0
        self.leave(now())

    def leave(self, left_s: float) -> None:
        """Count the next step from the moment at which this rank left the meeting of this one."""
        self.origin_s = 0.0 if self._is_one_clock else left_s
