"""Simulation of a whole job: data-parallel replicas of a pipeline on their own ranks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from gpipe_hpc.errors import ScheduleError
from gpipe_hpc.schedule.costs import Costs
from gpipe_hpc.schedule.garbage import collector_paused
from gpipe_hpc.schedule.passes.lowering import lower
from gpipe_hpc.schedule.simulator import SimulatedClock
from gpipe_hpc.schedule.table.actions import COMPUTE, OF_BUCKETS, Action
from gpipe_hpc.schedule.table.collectives import reduction_order
from gpipe_hpc.schedule.table.precedence import Precedence, build_precedence, execution_order
from gpipe_hpc.schedule.table.schedule import Placement, Schedule
from gpipe_hpc.schedule.timeline import Timeline, idle_share


class ReplicaTimes(NamedTuple):
    """Simulated times of one replica, in the unit of its costs.

    Attributes:
        end_of_compute: end of the last compute action.
        end: end of the last action that is not a reduction.
        busy: compute time of each rank.
    """

    end_of_compute: float
    end: float
    busy: tuple[float, ...]


class ReductionEvent(NamedTuple):
    """One simulated gradient reduction, which starts once every rank that takes part is ready.

    `ready` is the time when the last rank is ready; `last` is the replica of that rank.
    """

    action: Action
    ready: float
    start: float
    end: float
    last: int


@dataclass(frozen=True)
class Job:
    """Result of simulating one step of all replicas.

    `costs` and `replicas` have one entry per replica; `meetings` lists the reductions in order.
    Replicas with the same costs object share their times.
    """

    schedule: Schedule
    costs: tuple[Costs, ...]
    replicas: tuple[ReplicaTimes, ...]
    meetings: tuple[ReductionEvent, ...]

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks of all replicas."""
        return len(self.replicas) * self.schedule.num_ranks

    @cached_property
    def end_of_compute(self) -> float:
        """Return the time when the last rank finishes computing."""
        return max(each.end_of_compute for each in self.replicas)

    @cached_property
    def end_without_reductions(self) -> float:
        """Return the time when the step would end if reductions were free."""
        return max(each.end for each in self.replicas)

    @cached_property
    def makespan(self) -> float:
        """Return the duration of the step."""
        return max([self.end_without_reductions, *(each.end for each in self.meetings)])

    @property
    def bubble(self) -> float:
        """Return the idle share of the total time of all ranks; see `idle_share`."""
        busy = sum(sum(each.busy) for each in self.replicas)
        return idle_share(busy, self.num_ranks, self.makespan)

    @property
    def reduction_share(self) -> float:
        """Return the share of the step time spent in reductions that nothing overlaps."""
        return 1.0 - self.end_without_reductions / self.makespan if self.makespan > 0 else 0.0

    @property
    def slowest(self) -> int:
        """Return the index of the replica that finishes computing last; the first one on a tie."""
        ends = [each.end_of_compute for each in self.replicas]
        return ends.index(max(ends))

    @collector_paused()
    def timeline(self, replica: int) -> Timeline:
        """Simulate one replica again and return its events, including the reductions."""
        times = _ReplicaClocks(self.schedule)
        clock = times.clock(self.costs[replica])
        for nodes, meeting in zip(times.order, self.meetings, strict=True):
            for node in nodes:
                clock.starts[node], clock.ends[node] = meeting.start, meeting.end
        return clock.timeline()


@collector_paused()
def simulate_job(schedule: Schedule, costs: Sequence[Costs]) -> Job:
    """Simulate one step of data-parallel replicas that run the same table.

    `costs` has one entry per replica; replicas may differ in `paces`, `links` and durations. Within
    a replica, time passes as in `simulate`. A reduction starts once every rank that takes part is
    ready and has finished the previous one; its time is the `reduction`, `reduction_latency` and
    `bucket_shares` of the first replica.

    A compute-only table is lowered first. Replicas with the same costs object are simulated once.
    Takes time linear in the actions of a replica and in the number of different replicas.

    Raises:
        ScheduleError: the table deadlocks, or `costs` is empty.
    """
    if not costs:
        raise ScheduleError("job: costs is empty; give the costs of at least one replica")
    times = _ReplicaClocks(schedule if schedule.is_lowered else lower(schedule))
    meeting = times.clock(costs[0])
    ready = meeting.ready(times.order)
    last = [0] * len(ready)
    found = {id(costs[0]): _times_without_reductions(meeting)}
    for number, each in enumerate(costs):
        if id(each) in found:
            continue
        clock = times.clock(each)
        found[id(each)] = _times_without_reductions(clock)
        for at, (most, more) in enumerate(zip(ready, clock.ready(times.order), strict=True)):
            if max(more) > max(most):
                last[at] = number
            ready[at] = [max(pair) for pair in zip(most, more, strict=True)]
    meeting.reduce(times.order, ready)
    return Job(
        schedule=times.graph.schedule,
        costs=tuple(costs),
        replicas=tuple(found[id(each)] for each in costs),
        meetings=tuple(
            ReductionEvent(
                times.graph.action(nodes[0]),
                max(own),
                meeting.starts[nodes[0]],
                meeting.ends[nodes[0]],
                last[at],
            )
            for at, (nodes, own) in enumerate(zip(times.order, ready, strict=True))
        ),
    )


def side_by_side(schedule: Schedule, num_replicas: int) -> Schedule:
    """Return one lowered table that contains all replicas of a job, each on its own ranks.

    Ranks are numbered replica * schedule.num_ranks + rank, and micro-batches likewise. Each stage
    is reduced over its ranks in all replicas. `simulate` returns the same times for this table as
    `simulate_job` for the job.
    """
    placement, ranks, count = schedule.placement, schedule.num_ranks, schedule.num_microbatches

    def shifted(action: Action, replica: int) -> Action:
        if action.op in OF_BUCKETS or action.microbatch is None:
            return action
        return action._replace(microbatch=replica * count + action.microbatch)

    each = range(num_replicas)
    bounds, receives = schedule.max_activations, schedule.max_receives
    return replace(
        schedule,
        placement=Placement(
            tuple(
                tuple(n * ranks + rank for rank in way) for n in each for way in placement.routes
            ),
            tuple(n * len(placement.routes) + route for n in each for route in placement.route_of),
        ),
        ranks=tuple(tuple(shifted(a, n) for a in row) for n in each for row in schedule.ranks),
        max_activations=None if bounds is None else bounds * num_replicas,
        max_receives=None if receives is None else receives * num_replicas,
        overlaps=tuple(
            (shifted(first, n), shifted(second, n))
            for n in each
            for first, second in schedule.overlaps
        ),
    )


class _ReplicaClocks:
    """A table with resolved dependencies, which creates the simulated clock of each replica."""

    def __init__(self, schedule: Schedule) -> None:
        self.graph: Precedence = build_precedence(schedule)
        self.order = reduction_order(self.graph)
        self._passing = execution_order(self.graph, self.graph.waits)

    def clock(self, costs: Costs) -> SimulatedClock:
        """Return the simulated times of everything but reductions."""
        clock = SimulatedClock(self.graph, costs)
        clock.run(self._passing)
        return clock


def _times_without_reductions(clock: SimulatedClock) -> ReplicaTimes:
    """Return the simulated times of one replica, not counting reductions."""
    graph, starts, ends = clock.graph, clock.starts, clock.ends
    computes = [op in COMPUTE for op, _, _ in graph.kinds]
    computed = [
        [node for node in range(first, end) if computes[graph.which[node]]]
        for first, end in pairwise(graph.starts)
    ]
    return ReplicaTimes(
        end_of_compute=max((ends[node] for row in computed for node in row), default=0.0),
        end=max(ends, default=0.0),
        busy=tuple(sum(ends[node] - starts[node] for node in row) for row in computed),
    )
