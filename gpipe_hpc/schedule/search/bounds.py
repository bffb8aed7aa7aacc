"""A lower bound on the step time of any action order of a placement."""

from gpipe_hpc.schedule.costs import Costs
from gpipe_hpc.schedule.table.actions import Op
from gpipe_hpc.schedule.table.schedule import Placement


def lower_bound(placement: Placement, costs: Costs, may_split: bool) -> float:
    """Return a step time that no table of the placement can beat, for any order and memory.

    The larger of two bounds. A micro-batch must pass forward and backward through all stages. A
    rank cannot start before its first micro-batch arrives, must do all its work, and its last
    gradient must then still reach stage 0. `may_split` is whether ``W`` may run separately from
    ``I``.
    """
    num_stages, num_ranks = placement.num_stages, placement.num_ranks
    forward = costs.of_compute(Op.F, num_stages)
    back, weights = _halves(costs, num_stages, may_split)
    transfer = costs.transfer_times(num_stages)
    paces = costs.of_paces(num_ranks)
    heads, tails = [float("inf")] * num_ranks, [float("inf")] * num_ranks
    longest = 0.0
    for at in sorted(set(placement.route_of)):
        route = placement.routes[at]
        head = tail = 0.0
        for stage, rank in enumerate(route):
            heads[rank] = min(heads[rank], head)
            tails[rank] = min(tails[rank], tail)
            head += forward[stage] * paces[rank]
            tail += back[stage] * paces[rank]
            after = route[min(stage + 1, num_stages - 1)]
            if after != rank:
                head += transfer(stage, (rank, after))
                tail += transfer(stage, (after, rank))
        longest = max(longest, head + tail + weights[0] * paces[route[0]])
    passing, later = [0.0] * num_ranks, [0.0] * num_ranks
    for at in placement.route_of:
        for stage, rank in enumerate(placement.routes[at]):
            passing[rank] += (forward[stage] + back[stage]) * paces[rank]
            later[rank] += weights[stage] * paces[rank]
    spans = zip(heads, passing, later, tails, strict=True)
    busiest = max(head + work + max(after, tail) for head, work, after, tail in spans if work)
    return max(longest, busiest)


def _halves(costs: Costs, num_stages: int, may_split: bool) -> tuple[list[float], list[float]]:
    """Return, per stage, the least backward time before a gradient is sent, and that after."""
    if not may_split:
        return costs.of_compute(Op.B, num_stages), [0.0] * num_stages
    full, inputs, weights = (costs.of_compute(op, num_stages) for op in (Op.B, Op.I, Op.W))
    first = [min(whole, part) for whole, part in zip(full, inputs, strict=True)]
    both = [min(whole, i + w) for whole, i, w in zip(full, inputs, weights, strict=True)]
    return first, [max(0.0, all_ - part) for all_, part in zip(both, first, strict=True)]
