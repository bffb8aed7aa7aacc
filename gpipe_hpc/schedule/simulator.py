"""Simulator of schedule tables: start and end of each action, given the costs of actions."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from gpipe_hpc.schedule.costs import Costs
from gpipe_hpc.schedule.garbage import collector_paused
from gpipe_hpc.schedule.passes.lowering import lower
from gpipe_hpc.schedule.table.actions import (
    COMPUTE,
    COPIES,
    RECEIVES,
    REDUCTIONS,
    SENDS,
    Op,
)
from gpipe_hpc.schedule.table.collectives import reduction_order
from gpipe_hpc.schedule.table.dependencies import counterpart, dependencies, provides, skip_of
from gpipe_hpc.schedule.table.precedence import (
    Precedence,
    build_precedence,
    execution_order,
)
from gpipe_hpc.schedule.table.rows import Kind, action_of, kind_of
from gpipe_hpc.schedule.table.schedule import Schedule, Skip
from gpipe_hpc.schedule.timeline import Event, Timeline


@collector_paused()
def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Simulate a table, compute-only or lowered, and return its timeline.

    - A rank runs its actions in order, each once its inputs are available.
    - Sends are buffered and take no time of the rank. Transfers between two ranks in one direction
      run one after another, each once its value is made.
    - Reductions overlap with compute, one at a time per rank; the reduction of a stage held by
      several ranks starts when all of them are ready.
    - ``OFFLOAD`` and ``FETCH`` are copies in parallel with compute, one at a time per rank. An
      action that uses fetched activations waits for the copy; the second compute action after an
      ``OFFLOAD`` waits until that copy is done.
    - ``UNSHARD`` ends when the parameters are available; the all-gathers start with the step, one
      bucket after another per rank.

    Takes time linear in the number of actions.

    Raises:
        ScheduleError: the table deadlocks.
    """
    if (schedule.overlaps or schedule.skips) and not schedule.is_lowered:
        return _compute_of(simulate(lower(schedule), costs))
    graph = build_precedence(schedule)
    clock = SimulatedClock(graph, costs)
    clock.run(execution_order(graph, graph.waits))
    order = reduction_order(graph)
    clock.reduce(order, clock.ready(order))
    return clock.timeline()


def _compute_of(timeline: Timeline) -> Timeline:
    """Return a timeline with only the compute actions and the copies to and from the host."""
    bare = COMPUTE | COPIES
    rows = (tuple(each for each in row if each.action.op in bare) for row in timeline.events)
    return replace(timeline, events=tuple(rows))


class _StepAction(NamedTuple):
    """Properties shared by all actions of one op and stage."""

    duration: float
    computes: bool
    # Stage that uses the value, or -1; and the boundary or skip of the transfer.
    destination: int
    way: int | Skip


class SimulatedClock:
    """Simulated times of all actions of one pipeline; call `run` first, then `reduce`.

    Times are indexed by node, the number of an action in the graph.
    """

    def __init__(self, graph: Precedence, costs: Costs) -> None:
        """Look up the costs of all ops in the table."""
        self.graph, self.costs = graph, costs
        self.steps = _steps(graph, costs)
        self.transfer_time = costs.transfer_times(graph.schedule.num_stages)
        self.shares = costs.of_shares(graph.schedule.num_microbatches)
        self.paces = costs.of_paces(graph.schedule.num_ranks)
        self.starts = [0.0] * graph.num_nodes
        self.ends = [0.0] * graph.num_nodes
        self.arrivals = [0.0] * graph.num_nodes
        self.link_free_at: dict[tuple[int, int], float] = {}
        # End of each copy or all-gather, and the times when ranks are free for the next one.
        self.copied_at: dict[int, float] = {}
        self.copier_free_at = [0.0] * graph.schedule.num_ranks
        self.gatherer_free_at = [0.0] * graph.schedule.num_ranks
        totals = costs.of_gather(graph.schedule.num_stages)
        self.gather_times = {
            (stage, rank): [totals[stage] * part for part in costs.of_buckets(stage, len(nodes))]
            for (stage, rank), nodes in graph.gathers.items()
        }

    def run(self, order: Iterable[int]) -> None:
        """Compute start and end of all actions, given in an order in which they can be executed."""
        graph = self.graph
        which, numbers, ranks, waits = graph.which, graph.numbers, graph.ranks, graph.waits
        of_kind = [(kind[0], self.steps[kind]) for kind in graph.kinds]
        bare = self._bare_forwards()
        starts, ends, arrivals = self.starts, self.ends, self.arrivals
        copied_at, shares, paces = self.copied_at, self.shares, self.paces
        num_ranks = self.graph.schedule.num_ranks
        free_at = [0.0] * num_ranks
        # End of the last copy to the host: of all copies, and of those that compute waits for next.
        left_at, gone_at = [0.0] * num_ranks, [0.0] * num_ranks
        offloads = any(op is Op.OFFLOAD for op, _ in of_kind)
        for node in order:
            op, (duration, computes, destination, way) = of_kind[which[node]]
            if op is Op.F and node in bare:
                duration = bare[node]
            if duration:
                duration *= shares[numbers[node]]
            rank = ranks[node]
            if computes:
                duration *= paces[rank]
            start = free_at[rank]
            for wait in waits[node]:
                if ranks[wait] != rank:
                    if arrivals[wait] > start:
                        start = arrivals[wait]
                elif copied_at and wait in copied_at:
                    start = max(start, copied_at[wait])
            if offloads and computes:
                start = max(start, gone_at[rank])
                gone_at[rank] = left_at[rank]
            starts[node] = start
            ends[node] = end = start + duration
            if computes:
                free_at[rank] = end
            elif op in COPIES:
                self._copy(node, duration)
                if op is Op.OFFLOAD:
                    left_at[rank] = copied_at[node]
            elif op is Op.UNSHARD:
                self._gather(node)
            if destination >= 0:
                self._transfer(node, destination, way)

    def _bare_forwards(self) -> dict[int, float]:
        """Return the durations of forwards whose micro-batch is recomputed; empty if not given."""
        if self.costs.bare_forward is None:
            return {}
        makers = self.graph.makers
        bare = self.costs.of_bare_forward(self.graph.schedule.num_stages)
        return {
            forward: bare[kind[1]]
            for kind, again in makers.items()
            if kind[0] is Op.R
            for forward, node in zip(makers[Op.F, *kind[1:]], again, strict=True)
            if node >= 0
        }

    def _copy(self, node: int, duration: float) -> None:
        """Run a copy once the rank reaches it and its previous copy is done."""
        rank = self.graph.ranks[node]
        begin = max(self.starts[node], self.copier_free_at[rank])
        end = begin + duration
        self.starts[node], self.ends[node] = begin, end
        self.copied_at[node] = self.copier_free_at[rank] = end

    def _gather(self, node: int) -> None:
        """Run an all-gather from the start of the step, after that of the previous bucket."""
        rank, action = self.graph.ranks[node], self.graph.action(node)
        begin = self.gatherer_free_at[rank]
        end = begin + self.gather_times[action.stage, rank][action.bucket or 0]
        self.starts[node], self.ends[node] = begin, end
        self.copied_at[node] = self.gatherer_free_at[rank] = end

    def _transfer(self, node: int, destination: int, way: int | Skip) -> None:
        """Transfer a value to another rank once it is made and the link is free."""
        graph = self.graph
        rank, action = graph.ranks[node], graph.action(node)
        assert action.microbatch is not None, f"{action} has no micro-batch"
        link = (rank, graph.schedule.placement.rank_of(destination, action.microbatch))
        if link[0] == link[1]:
            return
        begin = max(self.ends[node], self.link_free_at.get(link, 0.0))
        end = begin + self.transfer_time(way, link, self.shares[action.microbatch])
        self.link_free_at[link] = self.arrivals[node] = end
        if action.op in SENDS:
            self.starts[node], self.ends[node] = begin, end

    def ready(self, order: list[list[int]]) -> list[list[float]]:
        """Return the time when each rank is ready for each of the reductions in `order`."""
        parts = self._bucket_parts(order)
        return [
            [self._complete(node, parts) for node in nodes]
            if self.costs.reduces_within and self.graph.action(nodes[0]).op is Op.REDUCE_GRAD
            else [self.starts[node] for node in nodes]
            for nodes in order
        ]

    def reduce(self, order: list[list[int]], ready: list[list[float]]) -> None:
        """Compute the times of reductions, each once all its ranks are `ready` and free."""
        num_stages = self.graph.schedule.num_stages
        totals = self.costs.of_reduction(num_stages)
        latencies = self.costs.of_reduction_latency(num_stages)
        parts = self._bucket_parts(order)
        free_at: dict[int, float] = defaultdict(float)
        for nodes, readies in zip(order, ready, strict=True):
            op, stage, bucket, _ = self.graph.action(nodes[0])
            ranks = [self.graph.ranks[node] for node in nodes]
            start = max(*readies, *(free_at[rank] for rank in ranks))
            end = start + (totals[stage] * parts[op, stage, None][bucket or 0] + latencies[stage])
            for node, rank in zip(nodes, ranks, strict=True):
                self.starts[node], self.ends[node] = start, end
                free_at[rank] = end

    def _bucket_parts(self, order: list[list[int]]) -> dict[Kind, list[float]]:
        """Return the share of each bucket in its stage's reduction, by op and stage."""
        numbers = Counter(kind_of(self.graph.action(nodes[0])) for nodes in order)
        return {kind: self.costs.of_buckets(kind[1], count) for kind, count in numbers.items()}

    def _complete(self, node: int, parts: dict[Kind, list[float]]) -> float:
        """Return when a bucket's gradients are complete, within its stage's last backward."""
        last = max(self.graph.waits[node], default=None)
        if last is None:
            return self.starts[node]
        op, stage, bucket, _ = self.graph.action(node)
        come = sum(parts[op, stage, None][: (bucket or 0) + 1])
        start, end = self.starts[last], self.ends[last]
        return start + (end - start) * come

    def timeline(self) -> Timeline:
        """Return the timeline; a ``RECV`` ends when its value arrives."""
        graph, schedule = self.graph, self.graph.schedule
        for kind, column in graph.makers.items():
            if kind[0] in RECEIVES:
                sends = graph.makers[kind_of(counterpart(action_of(kind)))]
                for post, node in zip(column, sends, strict=True):
                    if post >= 0:
                        self.ends[post] = max(self.starts[post], self.arrivals[node])
        events = list(map(Event, graph.ranks, graph.actions, self.starts, self.ends))
        rows = zip(graph.starts, graph.starts[1:], strict=False)
        return Timeline(
            events=tuple(tuple(events[first:end]) for first, end in rows),
            num_stages=schedule.num_stages,
            num_microbatches=schedule.num_microbatches,
            name=schedule.name,
            skips=schedule.skips,
        )


def _steps(graph: Precedence, costs: Costs) -> dict[Kind, _StepAction]:
    """Return the properties of each kind of action in a table."""
    num_stages = graph.schedule.num_stages
    kinds = set(graph.kinds)
    durations = {
        op: costs.of_compute(op, num_stages)
        for op in sorted({kind[0] for kind in kinds} & (COMPUTE | COPIES))
    }
    destinations = _destinations(graph, kinds)
    steps: dict[Kind, _StepAction] = {}
    for kind in kinds:
        op, stage, _ = kind
        destination = destinations.get(kind, -1)
        steps[kind] = _StepAction(
            duration=durations[op][stage] if op in durations else 0.0,
            computes=op in COMPUTE,
            destination=destination,
            way=skip_of(action_of(kind)) or min(stage, destination),
        )
    return steps


def _destinations(graph: Precedence, kinds: set[Kind]) -> dict[Kind, int]:
    """Return the destination stage of each kind of action that sends a value.

    In a table without transfers, these are the actions that make values for other stages.
    """
    if graph.schedule.is_lowered:
        return {kind: counterpart(action_of(kind)).stage for kind in kinds if kind[0] in SENDS}
    assert not graph.schedule.skips, "tables with skips must be lowered before simulation"
    takers: dict[Kind, int] = {}
    for kind in kinds:
        if kind[0] not in REDUCTIONS:
            for need in dependencies(action_of(kind), graph.schedule.num_stages, 1):
                if need.stage != kind[1]:
                    takers[kind_of(need)] = kind[1]
    return {
        kind: takers[kind_of(need)]
        for kind in kinds
        for need in provides(action_of(kind))
        if kind_of(need) in takers
    }
