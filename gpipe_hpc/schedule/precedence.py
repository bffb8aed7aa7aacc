"""The order a table imposes: which of its actions must be over before which.

Table and data flow together make a graph. A rank passes its actions in order; an action is passed
once those it waits for are. What cannot be ordered so is a deadlock.
"""

from collections import deque
from dataclasses import dataclass
from functools import cached_property

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

    @cached_property
    def rendezvous_waits(self) -> Waits:
        """Return the waits where every ``SEND`` also waits until its ``RECV`` is posted."""
        waits = list(self.waits)
        for node, action in enumerate(self.actions):
            if action.op in SENDS:
                waits[node] = [*waits[node], self.provider[counterpart(action)]]
        return waits


def build_precedence(schedule: Schedule) -> Precedence:
    """Resolve every dependency of a table; refuse one that nothing in it meets."""
    actions = [action for row in schedule.ranks for action in row]
    ranks = [rank for rank, row in enumerate(schedule.ranks) for _ in row]
    starts = [0]
    for row in schedule.ranks:
        starts.append(starts[-1] + len(row))
    provider: dict[Action, int] = {}
    for node, action in enumerate(actions):
        if action.op is not Op.REDUCE_GRAD:  # one on every holder, and nobody waits for it
            for need in provides(action):
                provider[need] = node
    graph = Precedence(schedule, actions, ranks, starts, provider, [])
    graph.waits.extend(_waits(graph, node) for node in range(len(actions)))
    return graph


def _waits(graph: Precedence, node: int) -> list[int]:
    """Return the nodes that one node waits for."""
    schedule, action, rank = graph.schedule, graph.actions[node], graph.ranks[node]
    if action.op in RECEIVES:
        _provider(graph, node, counterpart(action))
        return []  # it posts a buffer; its consumer waits
    waits: list[int] = []
    for need in dependencies(action, schedule.num_stages, schedule.num_microbatches):
        maker = graph.provider.get(need)
        if maker is None and (need.op is Op.R or _is_elsewhere(graph, node, need)):
            continue
        maker = _provider(graph, node, need)
        if graph.ranks[maker] == rank:
            waits.append(maker)
        elif action.op is Op.REDUCE_GRAD:
            continue  # each holder reduces what it made itself
        elif schedule.is_lowered and need.stage != action.stage:
            post = arrival(action)
            waits.append(_provider(graph, node, post))
            waits.append(_provider(graph, node, counterpart(post)))
        else:
            waits.append(maker)
    return waits


def _is_elsewhere(graph: Precedence, node: int, need: Action) -> bool:
    """Say whether a reduction's need is another holder's business."""
    if graph.actions[node].op is not Op.REDUCE_GRAD or need.microbatch is None:
        return False
    return graph.schedule.placement.rank_of(need.stage, need.microbatch) != graph.ranks[node]


def _provider(graph: Precedence, node: int, need: Action) -> int:
    maker = graph.provider.get(need)
    if maker is None:
        raise ScheduleError(
            f"schedule {graph.schedule.name!r}, {graph.where(node)}: needs {need}, "
            "expected it in the table, got no rank that runs it; add it"
        )
    return maker


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
