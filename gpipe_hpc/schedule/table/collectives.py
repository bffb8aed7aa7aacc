"""The order in which the ranks that share stages run their reductions."""

from collections import defaultdict, deque

from gpipe_hpc.schedule.table.actions import REDUCTIONS, Action
from gpipe_hpc.schedule.table.precedence import Precedence


def reduction_order(graph: Precedence) -> list[list[int]]:
    """Return a global order of the reductions that every rank can follow, one at a time.

    Each entry lists the nodes of one reduction on all ranks that take part. A rank runs its
    reductions in the order of its row, and a bucket is reduced once all ranks that hold its stage
    have reached it.

    Raises:
        ScheduleError: two ranks run common reductions in different orders (deadlock).
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
            _refuse_deadlock(graph, queue[0], members[graph.action(queue[0])], queues)
    return order


def _refuse_deadlock(
    graph: Precedence, node: int, group: list[int], queues: list[deque[int]]
) -> None:
    """Raise `ScheduleError` for a reduction that another rank never reaches."""
    other = next(each for each in group if queues[graph.ranks[each]][0] != each)
    ahead = queues[graph.ranks[other]][0]
    graph.refuse(
        node,
        f"deadlock: waits for the same reduction on rank {graph.ranks[other]}, which runs "
        f"{graph.action(ahead)} first; put reductions in the same order on all ranks that share "
        "stages",
    )
