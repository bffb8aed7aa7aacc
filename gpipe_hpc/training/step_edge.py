"""The edge of a step: what all ranks then know of it, put together in two small sums."""

import time
from collections.abc import Callable
from typing import Final, NamedTuple

import torch

from gpipe_hpc.comm.clock import clock_identity
from gpipe_hpc.comm.group import Group
from gpipe_hpc.engine.recorder import StepTimes
from gpipe_hpc.schedule import idle_share

_MOST_RANKS: Final = 2**20
_UNIT_BYTES: Final = 1024  # with as many ranks exact up to 8 TiB


class Told(NamedTuple):
    """What one rank says of a step."""

    times: StepTimes
    peak_memory_bytes: int
    wants_to_stop: bool = False
    has_written: bool = True


class Agreed(NamedTuple):
    """What all ranks know of a step.

    `pipeline_s`: seconds from the start of the first action of any rank to the end of the last.
    `bubble`: see `idle_share`, of all ranks of all replicas. `peak_memory_bytes`: of the rank that
    had most so far, and which that is. `is_stopped`: some rank wants to stop. `is_written`: all
    ranks have written.
    """

    pipeline_s: float
    bubble: float
    peak_memory_bytes: int
    peak_memory_rank: int
    is_stopped: bool
    is_written: bool


class StepEdge:
    """Where all ranks meet after each step.

    Ranks on several hosts have several clocks. There each counts its time from the moment at which
    it left the edge before, which all leave together except for the time of a message.
    `origin_s`: the moment of this rank's clock from which all count the step after it.
    """

    def __init__(
        self,
        group: Group,
        *,
        now: Callable[[], float] = time.perf_counter,
        clock: Callable[[], int] = clock_identity,
    ) -> None:
        """Find out whether all share a clock; the same call on every rank."""
        self._group, self._now = group, now
        own = clock()
        most = torch.tensor([own, -own], dtype=torch.float64)
        group.all_reduce_max(most)
        highest, lowest = most[0].item(), -most[1].item()
        self._is_one_clock = highest == lowest
        self.origin_s = self._new_origin()

    def meet(self, told: Told, rank: int) -> Agreed:
        """Return what all ranks say of the step; the same call on every rank."""
        busy_s, start_s, end_s = told.times
        kept = told.peak_memory_bytes // _UNIT_BYTES * _MOST_RANKS + (_MOST_RANKS - 1 - rank)
        total = torch.tensor([busy_s], dtype=torch.float64)
        most = torch.tensor(
            [
                self.origin_s - start_s,
                end_s - self.origin_s,
                kept,
                told.wants_to_stop,
                not told.has_written,
            ],
            dtype=torch.float64,
        )
        pending = self._group.start_all_reduce(total)
        self._group.all_reduce_max(most)
        pending.wait()
        self.origin_s = self._new_origin()
        before_start_s, until_end_s, fullest, stops, misses = most.tolist()
        span_s = max(0.0, before_start_s + until_end_s)
        units, reverse = divmod(int(fullest), _MOST_RANKS)
        return Agreed(
            span_s,
            idle_share(total.item(), self._group.size, span_s),
            units * _UNIT_BYTES,
            _MOST_RANKS - 1 - reverse,
            is_stopped=stops > 0,
            is_written=not misses,
        )

    def _new_origin(self) -> float:
        return 0.0 if self._is_one_clock else self._now()
