"""The order a table imposes: which of its actions must be over before which.

Table and data flow together make a graph. A rank passes its actions in order; an action is passed
once those it waits for are. What cannot be ordered so is a deadlock.
"""

from collections import deque
from dataclasses import dataclass
from functools import cached_property
from typing import NoReturn

from gpipe_hpc.errors import ScheduleError
from gpipe_hpc.schedule.actions import RECEIVES, SENDS, Action, Op
from gpipe_hpc.schedule.dependencies import arrival, counterpart, dependencies, provides
from gpipe_hpc.schedule.table import Schedule

Waits = list[list[int]]


@dataclass(frozen=True)
class Precedence:
    """A table as a graph; nodes are numbered rank by rank, in table order.

    ``waits[node]`` are the nodes an action waits for. A wait for another rank's node is a wait for
    a transfer: that node is the ``SEND`` in a lowered table, the value's maker in a bare one.
    """

    schedule: Schedule
    actions: list[Action]
    ranks: list[int]
    starts: list[int]
    provider: dict[Action, int]
    waits: Waits

    def where(self, node: int) -> str:
        """Say where a node stands: ``rank 1, position 3, 1B0``."""
        rank = self.ranks[node]
        return f"rank {rank}, position {node - self.starts[rank]}, {self.actions[node]}"

    def refuse(self, node: int, what: str) -> NoReturn:
        """Raise for one node."""
        raise ScheduleError(f"schedule {self.schedule.name!r}, {self.where(node)}: {what}")

    def provide(self, node: int, need: Action) -> int:
        """Return the node that provides what another needs; refuse a need that nobody meets."""
        maker = self.provider.get(need)
        if maker is None:
            self.refuse(node, f"waits for {need}, expected it in the table, got it nowhere; add it")
        return maker

    @cached_property
    def rendezvous_waits(self) -> Waits:
        """Return the waits where every ``SEND`` also waits until its ``RECV`` is posted."""
        waits = list(self.waits)
        for node, action in enumerate(self.actions):
            if action.op in SENDS:
                waits[node] = [*waits[node], self.provide(node, counterpart(action))]
        return waits


def build_precedence(schedule: Schedule) -> Precedence:
    """Resolve every dependency of a table.

    Refuses an action that is out of range, on a wrong rank or there twice, and a need unmet.
    """
    actions = [action for row in schedule.ranks for action in row]
    ranks = [rank for rank, row in enumerate(schedule.ranks) for _ in row]
    starts = [0]
    for row in schedule.ranks:
        starts.append(starts[-1] + len(row))
    graph = Precedence(schedule, actions, ranks, starts, {}, [])
    _index(graph)
    graph.waits.extend(_waits(graph, node) for node in range(len(actions)))
    return graph


def _index(graph: Precedence) -> None:
    """Fill in who provides what; refuse an action out of range, out of place or there twice."""
    reductions: dict[tuple[Action, int], int] = {}
    for node, action in enumerate(graph.actions):
        _check_entry(graph, node)
        if action.op is Op.REDUCE_GRAD:  # one on every holder, and nobody waits for it
            first = reductions.setdefault((action, graph.ranks[node]), node)
            if first != node:
                _refuse_twice(graph, node, first, action)
            continue
        for need in provides(action):
            first = graph.provider.setdefault(need, node)
            if first != node:
                _refuse_twice(graph, node, first, need)


def _check_entry(graph: Precedence, node: int) -> None:
    """Refuse one action that names no stage or micro-batch of the table, or is on a wrong rank."""
    placement, rank = graph.schedule.placement, graph.ranks[node]
    op, stage, microbatch = graph.actions[node]
    if op in (Op.OFFLOAD, Op.FETCH):
        graph.refuse(node, f"no data flow is stated for {op}; take it out")
    if not 0 <= stage < placement.num_stages:
        graph.refuse(node, f"no such stage, expected 0 to {placement.num_stages - 1}, got {stage}")
    if op is Op.REDUCE_GRAD:
        if microbatch is not None:
            graph.refuse(node, f"expected no micro-batch, got {microbatch}")
        if rank not in placement.holders(stage):
            graph.refuse(node, f"wrong rank, expected one of {placement.holders(stage)}")
        return
    if microbatch is None or not 0 <= microbatch < placement.num_microbatches:
        most = placement.num_microbatches - 1
        graph.refuse(node, f"no such micro-batch, expected 0 to {most}, got {microbatch}")
    elif placement.rank_of(stage, microbatch) != rank:
        expected = placement.rank_of(stage, microbatch)
        graph.refuse(node, f"wrong rank, expected rank {expected}, got rank {rank}; move it there")


def _refuse_twice(graph: Precedence, node: int, first: int, need: Action) -> NoReturn:
    where = graph.where(first)
    graph.refuse(node, f"{need} is done twice, expected once, got it at {where} already; drop one")


def _waits(graph: Precedence, node: int) -> list[int]:
    """Return the nodes that one node waits for."""
    schedule, action, rank = graph.schedule, graph.actions[node], graph.ranks[node]
    needs = dependencies(action, schedule.num_stages, schedule.num_microbatches)
    if action.op in RECEIVES:
        graph.provide(node, needs[0])
        return []  # it posts a buffer; its consumer waits
    if action.op is Op.REDUCE_GRAD:  # each holder waits for what it makes itself
        needs = tuple(need for need in needs if _rank_of(need, schedule) == rank)
    waits: list[int] = []
    for need in needs:
        if need.op is Op.R and need not in graph.provider:
            continue  # nothing is recomputed here
        maker = graph.provide(node, need)
        if graph.ranks[maker] != rank and schedule.is_lowered:
            post = arrival(action)
            waits.append(graph.provide(node, post))
            maker = graph.provide(node, counterpart(post))
        waits.append(maker)
    return waits


def _rank_of(action: Action, schedule: Schedule) -> int:
    assert action.microbatch is not None, f"{action} has no micro-batch"
    return schedule.placement.rank_of(action.stage, action.microbatch)


def execution_order(graph: Precedence, waits: Waits) -> list[int]:
    """Return the nodes in an order in which ranks can pass them; refuse a deadlock.

    Linear in actions and waits: a blocked rank sleeps until the node it waits for is passed.
    """
    position = graph.starts[:-1]
    passed = bytearray(len(graph.actions))
    sleepers: dict[int, list[int]] = {}
    order: list[int] = []
    awake = deque(range(len(position)))
    while awake:
        rank = awake.popleft()
        node, end = position[rank], graph.starts[rank + 1]
        while node < end:
            blocker = next((wait for wait in waits[node] if not passed[wait]), None)
            if blocker is not None:
                sleepers.setdefault(blocker, []).append(rank)
                break
            passed[node] = 1
            order.append(node)
            if node in sleepers:
                awake.extend(sleepers.pop(node))
            node += 1
        position[rank] = node
    if len(order) < len(graph.actions):
        raise ScheduleError(_describe_deadlock(graph, sleepers, position))
    return order


def _describe_deadlock(
    graph: Precedence, sleepers: dict[int, list[int]], position: list[int]
) -> str:
    stuck = sorted((rank, wait) for wait, ranks in sleepers.items() for rank in ranks)
    lines = [
        f"  {graph.where(position[rank])} waits for {graph.actions[wait]} "
        f"({graph.where(wait)}, not reached)"
        for rank, wait in stuck
    ]
    return (
        f"schedule {graph.schedule.name!r}: deadlock, expected every rank to finish, "
        f"got {len(stuck)} stuck; reorder one of them:\n" + "\n".join(lines)
    )
