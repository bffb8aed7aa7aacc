"""What transfers, sums and the gaps between actions took in measured steps of a run.

A run records compute and sums, no transfers. A transfer shows where its receiver had nothing else
to do: it was posted, and the receiver idle, when what it carries was made, so it took from then
until the receiver went on. Where the receiver came later, nobody knows when the transfer was done;
it is left out, as its wait would tell of the receiver and not of the link.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from statistics import median
from typing import Final, NamedTuple

import numpy

from gpipe_hpc.planner.costs.prices import Pass
from gpipe_hpc.schedule import Event, Link, Timeline
from gpipe_hpc.schedule.table.actions import COMPUTE, Action, Op
from gpipe_hpc.schedule.waits import DataFlow

_APART: Final = 1.5  # two sizes tell latency from bandwidth if one is so many times the other


class Took(NamedTuple):
    """So many bytes took so many seconds from one world rank to another."""

    source: int
    destination: int
    nbytes: float
    seconds: float


class Fitted(NamedTuple):
    """A link that explains some transfers; of how many, and of how many sizes.

    Of one size alone all the time counts as that of its bytes: latency and bandwidth cannot be told
    apart.
    """

    link: Link
    num_samples: int
    num_sizes: int


Sent = Callable[[Action, Action], float]
"""The bytes that go from the maker of a value to its user."""


def gap_s(timelines: Iterable[Timeline]) -> float:
    """Return the median time between two actions of a rank, the second of which waited for none.

    All that it needs from other ranks was made before the first of the two began. 0 without any.
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


def transfers(timeline: Timeline, sent: Sent, first_rank: int, action_s: float) -> Iterator[Took]:
    """Yield the transfers of a replica whose receiver was waiting when they began.

    `first_rank`: the world rank of its first. `action_s`: of the gap between any two actions, which
    is no part of a transfer.
    """
    flow = DataFlow(timeline)
    for row in _compute(timeline):
        free_s = timeline.start_s
        for event in row:
            wait = flow.waited_for(event)
            if wait is not None and wait.maker.rank != event.rank:
                made_s = wait.maker.end_s
                if free_s + action_s <= made_s:
                    yield Took(
                        first_rank + wait.maker.rank,
                        first_rank + event.rank,
                        sent(wait.maker.action, event.action),
                        max(0.0, event.start_s - made_s - action_s),
                    )
            free_s = event.end_s


def _compute(timeline: Timeline) -> list[list[Event]]:
    return [[event for event in row if event.action.op in COMPUTE] for row in timeline.events]


class Summed(NamedTuple):
    """The sum of a bucket over some world ranks: bytes, and seconds from all there to all done."""

    ranks: tuple[int, ...]
    nbytes: float
    seconds: float


def sums(
    replicas: Sequence[Timeline], buckets: Sequence[Sequence[float]], num_stage_ranks: int
) -> Iterator[Summed]:
    """Yield what the reductions of a step took, from the moment all ranks had begun.

    On each rank one follows the other: a bucket that left while an earlier one was under way counts
    from the end of that. `replicas`: on one clock; `buckets`: the bytes of each stage's.
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
            yield Summed(tuple(sorted(own)), nbytes, max(0.0, done_s - begun_s))


def message_of(summed: Summed) -> tuple[float, float]:
    """Return bytes and seconds of one message of a ring that takes as long; see `Cluster`."""
    size = len(summed.ranks)
    return summed.nbytes / size, summed.seconds / (2 * (size - 1))


def both_ways(taken: Iterable[Took]) -> list[tuple[float, float]]:
    """Return bytes and seconds of transfers between hosts, whose clocks differ by an unknown bit.

    What that adds to one way it takes from the other, so it falls out of the mean of both. Pairs of
    ranks, and sizes, that were seen one way alone are left out.
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


def fitted(samples: Sequence[tuple[float, float]]) -> Fitted | None:
    """Return the link that explains bytes and seconds by least squares over medians of each size.

    None where there are no samples of any bytes. Neither latency nor bandwidth gets below 0.
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
    if sizes[-1] >= _APART * sizes[0]:
        latency, slope = _line(points)
    if slope is None:
        whole_s = sum(weight * seconds for _, seconds, weight in points)
        slope = whole_s / sum(weight * size for size, _, weight in points)
    bandwidth = 1 / slope if slope > 0 else float("inf")
    return Fitted(Link(latency, bandwidth), num_samples, len(sizes))


def _line(points: Sequence[tuple[float, float, int]]) -> tuple[float, float | None]:
    """Return what the line through points begins with, and its slope; None: all of it is slope."""
    sizes, seconds, weights = (numpy.array(each, dtype=float) for each in zip(*points, strict=True))
    slope, begin = numpy.polyfit(sizes, seconds, 1, w=numpy.sqrt(weights))
    if begin < 0:
        return 0.0, None
    if slope <= 0:
        return float(numpy.average(seconds, weights=weights)), 0.0
    return float(begin), float(slope)


def pass_of(ranks: Sequence[tuple[int, float, float]]) -> Pass:
    """Return what explains tensors, numbers in them, and seconds of some ranks, by least squares.

    Nothing gets below 0. Where ranks are too much alike to tell the two apart, numbers alone count.
    """
    held = [each for each in ranks if each[0] and each[1]]
    if not held:
        return Pass()
    tensors, elements, seconds = (
        numpy.array(each, dtype=float) for each in zip(*held, strict=True)
    )
    alone = float(elements @ seconds / (elements @ elements))
    if len({tensors[at] / elements[at] for at in range(len(held))}) > 1:
        both = numpy.linalg.lstsq(numpy.stack([tensors, elements], axis=1), seconds, rcond=None)[0]
        if both.min() >= 0:
            return Pass(0.0, float(both[0]), float(both[1]))
    return Pass(0.0, 0.0, alone)
