"""Facts that all ranks exchange at a step boundary: times, memory, requests to stop."""

import time
from collections.abc import Callable
from typing import Final, NamedTuple

import torch

from gpipe_hpc.comm.collectives.group import ControlGroup
from gpipe_hpc.comm.collectives.rank_summary import RankSummary
from gpipe_hpc.device.device import Device
from gpipe_hpc.device.host.machine import clock_identity
from gpipe_hpc.engine import StepMarks, StepTimes
from gpipe_hpc.schedule import idle_share
from gpipe_hpc.trainer.one_step import StepTimestamps

_FEW_RANKS: Final = range(2, 9)  # numbers of ranks for which memory is reported per rank


class TimedStep(NamedTuple):
    """A step of this rank with time marks that may not have been read yet.

    `origin_s` is the reading of this rank's clock from which its times are counted, see
    `StepBoundary`.
    """

    step: int
    marks: StepMarks
    laps: StepTimestamps
    origin_s: float


class RankStepInfo(NamedTuple):
    """Facts about a step that one rank reports to all others.

    Args:
        times: busy seconds of the rank, and the start and end of its pipeline.
        peak_memory_bytes: peak memory of the rank.
        wants_to_stop: whether the rank was asked to stop.
        has_written: whether the rank's part of a background checkpoint is written.
        origin_s: reading of the rank's clock from which times are counted, see `StepBoundary`.
        straggles: slowdown of the rank if it is a straggler, else 0.
    """

    times: StepTimes
    peak_memory_bytes: int
    wants_to_stop: bool = False
    has_written: bool = True
    origin_s: float = 0.0
    straggles: float = 0.0

    def numbers(self) -> tuple[float, ...]:
        """Return the facts as numbers for the all-reduce, with times relative to `origin_s`."""
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


class GlobalStepInfo(NamedTuple):
    """Facts about a step that all ranks know.

    Args:
        pipeline_s: seconds from the first action of any rank to the end of the last.
        bubble: idle share of all ranks of all replicas, see `idle_share`.
        peak_memory_bytes: largest peak memory of any rank.
        peak_memory_rank: the rank with the largest peak.
        least_peak_memory_bytes: smallest peak memory of any rank.
        is_stopped: whether any rank wants to stop.
        is_written: whether all ranks have written their part of a checkpoint.
        busy_s: total computing time of all ranks.
        straggles: the worst slowdown, see `RankStepInfo`.
        straggling_rank: the rank with the worst slowdown.
        peaks_bytes: peak of each rank if there are 2 to 8 ranks that exchange directly; else empty.
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


def agree(told: RankSummary, num_ranks: int) -> GlobalStepInfo:
    """Return the facts that all ranks know, from the all-reduced `RankStepInfo.numbers`."""
    busy_s, starts_s, ends_s, peaks, stops, written, straggles = range(7)
    span_s = max(0.0, told.greatest[ends_s] - told.least[starts_s])
    return GlobalStepInfo(
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


def reports_late(device: Device) -> bool:
    """Return whether ranks report a step's times with the next step instead of synchronizing."""
    return device.is_accelerator


class StepBoundary:
    """Time origin of each step on this rank, comparable between hosts with different clocks.

    If clocks differ, each rank counts a step's times from the moment at which it left the previous
    step's all-reduce, which all ranks leave at the same time up to a message latency. `origin_s` is
    that moment for the next step, or 0 if all ranks share a clock.
    """

    def __init__(
        self,
        group: ControlGroup,
        *,
        now: Callable[[], float] = time.perf_counter,
        clock: Callable[[], int] = clock_identity,
    ) -> None:
        """Determine whether all ranks share a clock. Collective."""
        own = clock()
        most = torch.tensor([own, -own], dtype=torch.float64)
        group.all_reduce_max(most)
        highest, lowest = most[0].item(), -most[1].item()
        self._is_one_clock = highest == lowest
        self.origin_s = 0.0
        self.leave(now())

    def leave(self, left_s: float) -> None:
        """Set the next step's origin: `left_s`, the time at which this rank left the all-reduce."""
        self.origin_s = 0.0 if self._is_one_clock else left_s
