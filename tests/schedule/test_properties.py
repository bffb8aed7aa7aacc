"""Random tables, and what one wrong action does to them.

The oracle is a small machine written here, with a data flow of its own.
"""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from gpipe_hpc.schedule import (
    Action,
    Costs,
    Op,
    Placement,
    Schedule,
    ScheduleError,
    build,
    check,
    forward_only,
    from_text,
    lower,
    schedule_names,
    simulate,
    to_text,
)

COSTS = Costs(
    forward=2.0, backward=3.5, input_gradient=1.5, weight_gradient=1.0, recompute=1.75, send=0.5
)
QUICK = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
COMPUTE = {Op.F, Op.B, Op.I, Op.W, Op.R}


def compute_needs(action, num_stages, backward_of, skips):
    """Return what a compute action needs; `backward_of` says whether a pair runs B or I and W."""
    op, stage, microbatch, _ = action
    if op is Op.F:
        into = [stage - 1] * (stage > 0) + [source for source, to in skips if to == stage]
        return [Action(Op.F, source, microbatch) for source in into]
    if op is Op.R:
        return [Action(Op.F, stage, microbatch)]
    if op is Op.W:
        return [Action(Op.I, stage, microbatch)]
    needs = [Action(Op.F, stage, microbatch)]
    out_of = [stage + 1] * (stage < num_stages - 1) + [
        to for source, to in skips if source == stage
    ]
    return needs + [Action(backward_of[to, microbatch], to, microbatch) for to in out_of]


def skips_of(num_stages):
    """Draw any skips between so many stages."""
    pairs = [(s, d) for s in range(num_stages) for d in range(s + 2, num_stages)]
    return st.sets(st.sampled_from(pairs)).map(sorted).map(tuple) if pairs else st.just(())


@st.composite
def tables(draw):
    """Draw a valid bare table: any placement, one route or two, B or I and W, R here and there."""
    num_ranks = draw(st.integers(1, 4))
    num_stages = draw(st.integers(1, 5))
    num_microbatches = draw(st.integers(1, 4))
    rank = st.integers(0, num_ranks - 1)
    route = st.lists(rank, min_size=num_stages, max_size=num_stages).map(tuple)
    routes = draw(st.lists(route, min_size=1, max_size=2, unique=True))
    route_of = [draw(st.integers(0, len(routes) - 1)) for _ in range(num_microbatches)]
    placement = Placement(tuple(routes), tuple(route_of))
    skips = draw(skips_of(num_stages))
    backward_of = {}
    todo = []
    for stage in range(num_stages):
        for microbatch in range(num_microbatches):
            op = backward_of[stage, microbatch] = draw(st.sampled_from([Op.B, Op.I]))
            ops = [Op.F, op] + ([Op.W] if op is Op.I else [])
            todo += [Action(op, stage, microbatch) for op in ops]
    rows = [[] for _ in range(placement.num_ranks)]
    done = set()
    random = draw(st.randoms(use_true_random=False))
    while todo:
        ready = [
            action
            for action in todo
            if all(need in done for need in compute_needs(action, num_stages, backward_of, skips))
        ]
        action = random.choice(ready)
        todo.remove(action)
        done.add(action)
        row = rows[placement.rank_of(action.stage, action.microbatch)]
        if action.op in (Op.B, Op.I) and random.random() < 0.3:
            row.append(action._replace(op=Op.R))
        row.append(action)
    return Schedule("random", placement, tuple(map(tuple, rows)), skips=skips)


def replay(schedule):
    """Run a lowered table with blocking sends; return whether it ends, all received as sent."""
    placement, num_stages = schedule.placement, schedule.num_stages
    backward_of = {(a.stage, a.microbatch): a.op for r in schedule.ranks for a in r if a.op in "BI"}
    position = [0] * schedule.num_ranks
    done, posted_on, sent_on = set(), {}, {}

    def place(action):
        return placement.rank_of(action.stage, action.microbatch)

    def can_run(rank, action):
        op, stage, microbatch, peer = action
        back = None if peer is None else stage
        if op is Op.REDUCE_GRAD or op in (Op.RECV_F, Op.RECV_B):
            return True
        if op is Op.SEND_F:
            post = Action(Op.RECV_F, stage + 1 if peer is None else peer, microbatch, back)
            return Action(Op.F, stage, microbatch) in done and post in done
        if op is Op.SEND_B:
            post = Action(Op.RECV_B, stage - 1 if peer is None else peer, microbatch, back)
            return (
                Action(backward_of[stage, microbatch], stage, microbatch) in done and post in done
            )
        for need in compute_needs(action, num_stages, backward_of, schedule.skips):
            if need not in done:
                return False
            if place(need) != rank:
                send = Op.SEND_F if op is Op.F else Op.SEND_B
                to = None if abs(need.stage - stage) == 1 else stage
                if Action(send, need.stage, microbatch, to) not in done:
                    return False
        return True

    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(schedule.ranks):
            while position[rank] < len(row) and can_run(rank, row[position[rank]]):
                action = row[position[rank]]
                done.add(action)
                if action.op not in COMPUTE and action.op is not Op.REDUCE_GRAD:
                    direction, sends = action.op[-1], action.op in (Op.SEND_F, Op.SEND_B)
                    step = 1 if (direction == "F") == sends else -1
                    other = action.stage + step if action.peer is None else action.peer
                    ends = (action.stage, other) if sends else (other, action.stage)
                    side = sent_on if sends else posted_on
                    # One queue for all that goes from one rank to another.
                    queue = tuple(placement.rank_of(end, action.microbatch) for end in ends)
                    side.setdefault(queue, []).append((direction, ends, action.microbatch))
                position[rank] += 1
                moved = True
    finished = all(at == len(row) for at, row in zip(position, schedule.ranks, strict=True))
    return finished and sent_on == posted_on


def compute_of(schedule):
    return tuple(tuple(a for a in row if a.op in COMPUTE) for row in schedule.ranks)


def compute_events(timeline):
    return [[event for event in row if event.action.op in COMPUTE] for row in timeline.events]


@QUICK
@given(tables())
def test_lowering_never_deadlocks_and_keeps_order_and_times(bare):
    check(bare)
    lowered = lower(bare)
    check(lowered)
    assert replay(lowered)
    assert compute_of(lowered) == bare.ranks
    bare_timeline, lowered_timeline = simulate(bare, COSTS), simulate(lowered, COSTS)
    assert compute_events(lowered_timeline) == compute_events(bare_timeline)
    assert lowered_timeline.makespan == pytest.approx(bare_timeline.makespan)
    assert lowered_timeline.peak_activations == bare_timeline.peak_activations
    evaluation = lower(forward_only(bare))
    check(evaluation)
    assert replay(evaluation)


@QUICK
@given(tables())
def test_text_keeps_any_table(bare):
    """A route without micro-batches leaves no trace in the text; tables with one are left out."""
    assume(len(set(bare.placement.route_of)) == len(bare.placement.routes))
    for schedule in (bare, lower(bare)):
        read = from_text(to_text(schedule))
        assert (read.ranks, read.skips) == (schedule.ranks, schedule.skips)
        check(read)


@st.composite
def mutants(draw):
    """Draw a valid table and a copy of it with one action dropped, doubled, swapped or moved."""
    named = st.builds(
        build,
        st.sampled_from([name for name in schedule_names() if name not in ("auto", "file")]),
        ranks=st.sampled_from([2, 4]),
        microbatches=st.integers(2, 5),
        recompute=st.sampled_from(["never", "always", "except_last"]),
    )
    skipping = named.flatmap(
        lambda bare: skips_of(bare.num_stages).map(lambda skips: replace(bare, skips=skips))
    )
    schedule = draw(st.one_of(tables(), named, skipping))
    if draw(st.booleans()):
        schedule = lower(schedule)
    rank = draw(st.sampled_from([r for r, row in enumerate(schedule.ranks) if row]))
    row = list(schedule.ranks[rank])
    at, to = (draw(st.integers(0, len(row) - 1)) for _ in range(2))
    rows = [list(kept) for kept in schedule.ranks]
    kinds = ["drop", "duplicate", "swap", "move"] + ["move to another rank"] * (len(rows) > 1)
    kind = draw(st.sampled_from(kinds))
    if kind == "drop":
        del rows[rank][at]
    elif kind == "duplicate":
        rows[rank].insert(to, row[at])
    elif kind == "swap":
        rows[rank][at], rows[rank][to] = rows[rank][to], rows[rank][at]
    else:
        other = rank if kind == "move" else (rank + 1) % len(rows)
        action = rows[rank].pop(at)
        rows[other].insert(min(to, len(rows[other])), action)
    mutant = replace(schedule, ranks=tuple(map(tuple, rows)))
    assume(mutant.ranks != schedule.ranks)
    return kind, row[at], schedule, mutant


@settings(QUICK, max_examples=400)
@given(mutants())
def test_a_mutant_is_refused_with_a_reason_or_harmless(drawn):
    kind, action, original, mutant = drawn
    try:
        check(mutant)
    except ScheduleError as error:
        assert "rank" in str(error)
        assert any(str(a) in str(error) for r in original.ranks for a in r)
        return
    evaluates = not any(a.op in (Op.B, Op.I, Op.W) for row in mutant.ranks for a in row)
    assert kind in ("swap", "move") or (kind == "drop" and (action.op is Op.R or evaluates))
    simulate(mutant, COSTS)
    runnable = mutant if mutant.is_lowered else lower(mutant)
    assert replay(runnable)
    if kind != "drop":
        assert [sorted(map(str, row)) for row in mutant.ranks] == [
            sorted(map(str, row)) for row in original.ranks
        ]
