"""Derive transfer times, all-reduce times and gaps between actions from measured steps.

A run records compute and all-reduces, but not transfers. The duration of a transfer is known if its
receiver was idle, with the receive posted, when the sender finished the value: it is the time until
the receiver continued. Other transfers are skipped, because the receiver's delay would be measured
and not the link.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from statistics import median
from typing import Final, NamedTuple

import numpy

from gpipe_hpc.planner.costs.prices import PassCost
from gpipe_hpc.schedule import Event, Link, Timeline
from gpipe_hpc.schedule.table.actions import COMPUTE, Action, Op
from gpipe_hpc.schedule.waits import DataFlow

_MIN_SIZE_RATIO: Final = 1.5  # minimum ratio of two sizes to distinguish latency from bandwidth


class ObservedTransfer(NamedTuple):
    """One transfer between world ranks, with its bytes and seconds."""

    source: int
    destination: int
    nbytes: float
    seconds: float


class FittedLink(NamedTuple):
    """A link fitted to transfers, with the numbers of transfers and of distinct sizes.

    With a single size all time is attributed to bandwidth, because latency cannot be distinguished.
    """

    link: Link
    num_samples: int
    num_sizes: int


Sent = Callable[[Action, Action], float]
"""Function that returns the bytes sent from the action producing a value to the one using it."""


def gap_s(timelines: Iterable[Timeline]) -> float:
    """Return the median seconds between consecutive actions of a rank that did not wait; 0 if none.

    Only gaps count whose second action had all its inputs before the first one began.
    """
    found = []
    for timeline in timelines:
        flow = DataFlow(timeline)
        for row in _compute(timeline):
            for before, event in pairwise(row):
                makers = [wait.maker for wait in flow.waits(event)]
                if all(each.rank == event.rank or each.end_s <= before.start_s for each in makers):
                    found.append(max(0.0, event.start_s - before.end_s))
    return median(found) if found else 0.0


def transfers(
    timeline: Timeline, sent: Sent, first_rank: int, action_s: float
) -> Iterator[ObservedTransfer]:
    """Yield the transfers of a replica for which the receiver was already waiting.

    Args:
      sent: returns the bytes sent between two actions.
      first_rank: world rank of the replica's first rank.
      action_s: normal gap between two actions in seconds, which is subtracted.
    """
    flow = DataFlow(timeline)
    for row in _compute(timeline):
        free_s = timeline.start_s
        for event in row:
            wait = flow.waited_for(event)
            if wait is not None and wait.maker.rank != event.rank:
                made_s = wait.maker.end_s
                if free_s + action_s <= made_s:
                    yield ObservedTransfer(
                        first_rank + wait.maker.rank,
                        first_rank + event.rank,
                        sent(wait.maker.action, event.action),
                        max(0.0, event.start_s - made_s - action_s),
                    )
            free_s = event.end_s


def _compute(timeline: Timeline) -> list[list[Event]]:
    return [[event for event in row if event.action.op in COMPUTE] for row in timeline.events]


class ObservedAllReduce(NamedTuple):
    """One all-reduce of a gradient bucket over world ranks, with its bytes and seconds.

    The time starts when the last rank begins and ends when the last rank has finished.
    """

    ranks: tuple[int, ...]
    nbytes: float
    seconds: float


def sums(
    replicas: Sequence[Timeline], buckets: Sequence[Sequence[float]], num_stage_ranks: int
) -> Iterator[ObservedAllReduce]:
    """Yield the gradient all-reduces of a step, timed from the moment when all ranks had begun.

    All-reduces of a rank run one after another: one issued during an earlier one is timed from the
    end of the earlier one. `replicas` have a common clock; `buckets` are the bucket sizes of each
    stage in bytes.
    """
    found: dict[Action, dict[int, tuple[float, float]]] = defaultdict(dict)
    for replica, timeline in enumerate(replicas):
        for event in (event for row in timeline.events for event in row):
            if event.action.op is Op.REDUCE_GRAD:
                rank, own = replica * num_stage_ranks + event.rank, found[event.action]
                start_s, end_s = own.get(rank, (event.start_s, event.end_s))
                own[rank] = min(start_s, event.start_s), max(end_s, event.end_s)
    over_s: dict[int, float] = {}
    for action, own in sorted(found.items(), key=lambda each: max(e for _, e in each[1].values())):
        begun_s = max(*(start for start, _ in own.values()), *(over_s.get(r, 0.0) for r in own))
        done_s = max(end for _, end in own.values())
        over_s.update(dict.fromkeys(own, done_s))
        if len(own) > 1 and action.bucket is not None:
            nbytes = buckets[action.stage][action.bucket]
            yield ObservedAllReduce(tuple(sorted(own)), nbytes, max(0.0, done_s - begun_s))


def message_of(summed: ObservedAllReduce) -> tuple[float, float]:
    """Return bytes and seconds of one message of the equivalent ring all-reduce; see `Cluster`."""
    size = len(summed.ranks)
    return summed.nbytes / size, summed.seconds / (2 * (size - 1))


def without_clock_offsets(taken: Iterable[ObservedTransfer]) -> list[tuple[float, float]]:
    """Return (bytes, seconds) of transfers between hosts, corrected for their clock offset.

    The offset adds to one direction what it subtracts from the other, so the mean of both
    directions is correct. Pairs of ranks and sizes observed in one direction only are skipped.
    """
    seen: dict[tuple[int, int, float], list[float]] = defaultdict(list)
    for each in taken:
        seen[each.source, each.destination, each.nbytes].append(each.seconds)
    found = []
    for (source, destination, nbytes), there in seen.items():
        back = seen.get((destination, source, nbytes))
        if back is not None and source < destination:
            found += [(nbytes, (median(there) + median(back)) / 2)] * (len(there) + len(back))
    return found


def fitted(samples: Sequence[tuple[float, float]]) -> FittedLink | None:
    """Fit a link to (bytes, seconds) samples by least squares over the median of each size.

    Returns None without samples above 0 bytes. Latency and bandwidth are never negative.
    """
    of_size: dict[float, list[float]] = defaultdict(list)
    for nbytes, seconds in samples:
        if nbytes > 0:
            of_size[nbytes].append(seconds)
    if not of_size:
        return None
    sizes = sorted(of_size)
    points = [(size, median(of_size[size]), len(of_size[size])) for size in sizes]
    num_samples = sum(weight for *_, weight in points)
    latency, slope = 0.0, None
    if sizes[-1] >= _MIN_SIZE_RATIO * sizes[0]:
        latency, slope = _line(points)
    if slope is None:
        whole_s = sum(weight * seconds for _, seconds, weight in points)
        slope = whole_s / sum(weight * size for size, _, weight in points)
    bandwidth = 1 / slope if slope > 0 else float("inf")
    return FittedLink(Link(latency, bandwidth), num_samples, len(sizes))


def _line(points: Sequence[tuple[float, float, int]]) -> tuple[float, float | None]:
    """Fit a line; return intercept and slope (None: attribute all time to the slope)."""
    sizes, seconds, weights = (numpy.array(each, dtype=float) for each in zip(*points, strict=True))
    slope, begin = numpy.polyfit(sizes, seconds, 1, w=numpy.sqrt(weights))
    if begin < 0:
        return 0.0, None
    if slope <= 0:
        return float(numpy.average(seconds, weights=weights)), 0.0
    return float(begin), float(slope)


def pass_of(ranks: Sequence[tuple[int, float, float]]) -> PassCost:
    """Fit a cost model to (tensors, elements, seconds) of each rank's pass over its parameters.

    Coefficients are never negative. If the ranks are too similar to separate the costs per tensor
    and per element, only the cost per element is fitted.
    """
    held = [each for each in ranks if each[0] and each[1]]
    if not held:
        return PassCost()
    tensors, elements, seconds = (
        numpy.array(each, dtype=float) for each in zip(*held, strict=True)
    )
    alone = float(elements @ seconds / (elements @ elements))
    if len({tensors[at] / elements[at] for at in range(len(held))}) > 1:
        both = numpy.linalg.lstsq(numpy.stack([tensors, elements], axis=1), seconds, rcond=None)[0]
        if both.min() >= 0:
            return PassCost(0.0, float(both[0]), float(both[1]))
    return PassCost(0.0, 0.0, alone)
