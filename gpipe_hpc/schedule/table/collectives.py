"""Reductions between the holders of a stage: one at a time on each rank, in the rank's order."""

from collections import defaultdict, deque

from gpipe_hpc.schedule.table.actions import REDUCTIONS, Action
from gpipe_hpc.schedule.table.precedence import Precedence


def reduction_order(graph: Precedence) -> list[list[int]]:
    """Return the reductions, each as its nodes on all its ranks, in an order that runs.

    Every rank takes part in one after the other, as its list has them; a bucket of a stage with
    several holders is reduced when it is the turn of each. Refuses lists that wait for one another
    in a circle.
    """
    queues: list[deque[int]] = [deque() for _ in range(graph.schedule.num_ranks)]
    members: dict[Action, list[int]] = defaultdict(list)
    for node in graph.of_buckets:
        action = graph.action(node)
        if action.op in REDUCTIONS:
            queues[graph.ranks[node]].append(node)
            members[action].append(node)
    order: list[list[int]] = []
    arrived: dict[Action, int] = defaultdict(int)
    awake = deque(queue[0] for queue in queues if queue)
    while awake:
        action = graph.action(awake.popleft())
        arrived[action] += 1
        if arrived[action] < len(members[action]):
            continue
        order.append(members[action])
        for node in members[action]:
            queue = queues[graph.ranks[node]]
            queue.popleft()
            if queue:
                awake.append(queue[0])
    for queue in queues:
        if queue:
            _refuse_circle(graph, queue[0], members[graph.action(queue[0])], queues)
    return order


def _refuse_circle(
    graph: Precedence, node: int, group: list[int], queues: list[deque[int]]
) -> None:
    """Raise for one reduction that its other holders do not come to."""
    other = next(each for each in group if queues[graph.ranks[each]][0] != each)
    ahead = queues[graph.ranks[other]][0]
    graph.refuse(
        node,
        f"waits for its copy on rank {graph.ranks[other]}, which reduces "
        f"{graph.action(ahead)} first and so waits in a circle, expected one order of "
        "reductions on all ranks that share stages; reorder them",
    )
