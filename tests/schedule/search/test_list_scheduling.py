"""List scheduling: what its rules mean."""

import math
from heapq import heappop, heappush

from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe_hpc.schedule import Op, place
from gpipe_hpc.schedule.search.list_scheduling import Rules, list_schedule
from gpipe_hpc.schedule.table.actions import Action
from gpipe_hpc.schedule.table.dependencies import dependencies
from gpipe_hpc.schedule.table.placements import with_holes


def test_a_slow_rank_is_as_a_slow_stage_where_each_rank_has_one():
    """With its rank twice as slow, stage 1 comes to other orders than when all are even."""
    placement = place("one_each", 3, 5)
    even = Rules(
        {op: [1.0, 1.0, 1.0] for op in (Op.I, Op.F, Op.W)},
        lambda op, _, microbatch: ((Op.I, Op.F, Op.W).index(op), microbatch),
        [0.0, 0.0, 0.0],
    )
    by_rank = list_schedule(placement, even._replace(paces=[1.0, 2.0, 1.0]))
    slow = {op: [1.0, 2.0, 1.0] for op in even.durations}
    assert by_rank == list_schedule(placement, even._replace(durations=slow))
    assert by_rank != list_schedule(placement, even)


def by_the_book(placement, rules):
    """Each rank, whenever it looks, goes through all that waits: the next of each op and stage."""
    full, free_at = Op.B in rules.durations, [0.0] * placement.num_ranks
    live, looks = [0] * placement.num_ranks, []
    waiting = [
        {} for _ in free_at
    ]  # for each rank, by op and stage, when which micro-batch is ready
    rows = [[] for _ in free_at]
    ends = {}

    def needs(op, stage):
        found = dependencies(Action(op, stage, 0), placement.num_stages, 1)
        kinds = [(Op.B if full and each.op is Op.I else each.op, each.stage) for each in found]
        return [kind for kind in kinds if kind[0] in rules.durations]

    users = {(op, s): needs(op, s) for op in rules.durations for s in range(placement.num_stages)}

    def offer(op, stage, microbatch):
        found = [ends.get((*kind, microbatch)) for kind in users[op, stage]]
        if None in found:
            return
        rank, ready_at = placement.rank_of(stage, microbatch), 0.0
        for (_, other), end in zip(users[op, stage], found, strict=True):
            there = placement.rank_of(other, microbatch) == rank
            ready_at = max(ready_at, end + (0.0 if there else rules.transfers[min(stage, other)]))
        waiting[rank].setdefault((op, stage), {})[microbatch] = ready_at
        heappush(looks, (ready_at, rank))

    for microbatch in range(placement.num_microbatches):
        offer(Op.F, 0, microbatch)
    while looks:
        now, rank = heappop(looks)
        best = None
        for (op, stage), own in waiting[rank].items():
            stages = placement.stages_of(rank)
            spare = len(stages) - 1 - stages.index(stage) if op is Op.F else -math.inf
            room = math.inf if rules.limits is None else rules.limits[rank] - live[rank]
            if own and own[min(own)] <= now and spare < room and free_at[rank] <= now:
                key = rules.priority(op, stage, min(own))
                if best is None or key < best[0]:
                    best = key, op, stage, min(own)
        if best is None:
            continue
        _, op, stage, microbatch = best
        del waiting[rank][op, stage][microbatch]
        rows[rank].append(Action(op, stage, microbatch))
        pace = rules.paces[rank] if rules.paces else 1.0
        free_at[rank] = ends[op, stage, microbatch] = now + rules.durations[op][stage] * pace
        heappush(looks, (free_at[rank], rank))
        live[rank] += (op is Op.F) - (op in (Op.B, Op.W))
        for kind, needed in users.items():
            if (op, stage) in needed:
                offer(*kind, microbatch)
    return rows


@given(st.data())
@settings(max_examples=150)
def test_orders_are_those_of_a_scheduler_that_looks_at_everything(data):
    """With times of 0 too, where ranks look again at the time that it is."""
    draw = data.draw
    copies = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    num_microbatches = draw(st.integers(1, 6))
    placements = with_holes(copies, num_microbatches), place("wave", 3, num_microbatches)
    placement = draw(st.sampled_from(placements))
    num_ranks = placement.num_ranks
    some = st.sampled_from([0.0, 1.0, 0.0, 2.0])
    of_stages = st.lists(some, min_size=placement.num_stages, max_size=placement.num_stages)
    ops = draw(
        st.sampled_from([(Op.B, Op.F), (Op.F, Op.B), (Op.I, Op.F, Op.W), (Op.F, Op.I, Op.W)])
    )
    is_by_op = draw(st.booleans())
    limits = st.lists(st.integers(placement.num_stages, 8), min_size=num_ranks, max_size=num_ranks)
    rules = Rules(
        {op: draw(of_stages) for op in ops},
        lambda op, stage, microbatch: (ops.index(op) if is_by_op else 0, microbatch),
        draw(of_stages),
        draw(st.none() | limits),
        draw(
            st.just(())
            | st.lists(st.just(1.5) | st.just(1.0), min_size=num_ranks, max_size=num_ranks)
        ),
    )
    assert list(map(list, list_schedule(placement, rules))) == by_the_book(placement, rules)
