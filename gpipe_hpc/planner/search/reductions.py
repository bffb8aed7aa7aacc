"""Completion time of gradient all-reduces after the simulated compute of a step.

Equivalent to lowering the table and simulating its reductions, but faster, so that several ways to
combine the gradients of replicas can be compared.
"""

from collections.abc import Sequence
from typing import NamedTuple

from gpipe_hpc.schedule import Cluster, Placement, ReductionTime, Timeline
from gpipe_hpc.schedule.table.lifetimes import ENDS_BACKWARD


class LastBackward(NamedTuple):
    """Start and end, in seconds, of the last backward of a stage on a rank."""

    start_s: float
    end_s: float


def endings(timelines: Sequence[Timeline]) -> list[set[LastBackward]]:
    """Return the last backwards of each stage, over all its ranks and timelines."""
    found: list[set[LastBackward]] = [set() for _ in range(timelines[0].num_stages)]
    for timeline in timelines:
        for row in timeline.events:
            last: dict[int, LastBackward] = {}
            for event in row:
                if event.action.op in ENDS_BACKWARD:
                    last[event.action.stage] = LastBackward(event.start_s, event.end_s)
            for stage, own in last.items():
                found[stage].add(own)
    return found


def copies_of(
    placement: Placement, stage: int, num_replicas: int, num_ranks: int
) -> tuple[int, ...]:
    """Return the world ranks that hold a stage, over all replicas."""
    holders = placement.holders(stage)
    return tuple(r * num_ranks + each for r in range(num_replicas) for each in holders)


def reductions_time(
    cluster: Cluster, ranks: Sequence[int], nbytes: float, num_buckets: int, *, by_host: bool
) -> ReductionTime:
    """Return the time of an all-reduce, flat or in two levels.

    `by_host`: first inside each host, then between hosts; the two levels are pipelined over
    buckets.
    """
    if not by_host:
        return cluster.reduction_time(ranks, nbytes, num_buckets)
    groups: dict[int, list[int]] = {}
    for rank in ranks:
        groups.setdefault(cluster.host_of(rank), []).append(rank)
    within = [cluster.reduction_time(own, nbytes, num_buckets) for own in groups.values()]
    leaders = [own[0] for own in groups.values()]
    between = cluster.reduction_time(leaders, nbytes, num_buckets)
    slowest = max(within, key=lambda each: each.latency_s * num_buckets + each.bytes_s)
    return ReductionTime(slowest.latency_s + between.latency_s, slowest.bytes_s + between.bytes_s)


class StageReduction(NamedTuple):
    """Time of the all-reduce of a stage's gradients, and the bytes of each bucket."""

    time: ReductionTime
    buckets: tuple[int, ...]

    @property
    def whole_s(self) -> float:
        """Return the seconds of all buckets one after another."""
        return self.time.bytes_s + len(self.buckets) * self.time.latency_s

    def halved(self) -> "StageReduction":
        """Return half of the all-reduce: only the reduce-scatter or only the all-gather."""
        return self._replace(time=ReductionTime(*(part / 2 for part in self.time)))


def reduced_at(
    placement: Placement,
    ends: Sequence[set[LastBackward]],
    sums: Sequence[StageReduction],
    *,
    overlaps: bool,
) -> float:
    """Return the time at which the last gradient bucket has been all-reduced.

    Each rank reduces one bucket after another, stages in the order in which they are ready. With
    `overlaps`, a bucket starts within the stage's last backward, as soon as its gradients are
    complete.
    """
    free_at = [0.0] * placement.num_ranks
    done = 0.0
    over_at = [max((each.end_s for each in own), default=0.0) for own in ends]
    for stage in sorted(range(len(ends)), key=lambda each: (over_at[each], -each)):
        time, buckets = sums[stage]
        whole = sum(buckets)
        if not whole:
            continue
        holders = placement.holders(stage)
        ready_bytes = 0
        for nbytes in buckets:
            ready_bytes += nbytes
            part = ready_bytes / whole if overlaps else 1.0
            ready = max((start + (end - start) * part for start, end in ends[stage]), default=0.0)
            begin = max(ready, *(free_at[rank] for rank in holders))
            over = begin + time.bytes_s * nbytes / whole + time.latency_s
            for rank in holders:
                free_at[rank] = over
            done = max(done, over)
    return done
