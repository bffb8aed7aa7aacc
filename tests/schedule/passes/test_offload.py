"""Tables that keep what forwards made in the host's memory."""

import json
from collections import Counter
from dataclasses import replace

import pytest

from gpipe_hpc.schedule import (
    Costs,
    Memory,
    Op,
    ScheduleError,
    add_offload,
    add_recompute,
    build,
    check,
    explain_bubble,
    forward_only,
    from_text,
    lower,
    memory_over_time,
    peak_memory,
    simulate,
    to_text,
)
from gpipe_hpc.schedule.table.actions import COMPUTE
from gpipe_hpc.schedule.waits import DataFlow
from gpipe_hpc.visualize import draw_svg, draw_text
from gpipe_hpc.visualize.chrome_trace import chrome_trace
from gpipe_hpc.visualize.html import render_html
from gpipe_hpc.visualize.layout import layout

COPIES = (Op.OFFLOAD, Op.FETCH)
COSTS = Costs(
    forward=1, backward=2, input_gradient=1, weight_gradient=1, recompute=1, offload=1.5, fetch=3
)
# Four micro-batches on one rank, last in, first out.
ONE_RANK = build("gpipe", ranks=1, microbatches=4)


def whereabouts(row):
    """Replay one rank; return how many were away, and the most that were there at once.

    What is to leave has its memory until the next compute action is over.
    """
    there, leaving, away, num_away, most = set(), set(), set(), 0, 0
    last_of = {(a.stage, a.microbatch): at for at, a in enumerate(row) if a.op in (Op.B, Op.W)}
    for at, action in enumerate(row):
        op, place = action.op, (action.stage, action.microbatch)
        if op is Op.F:
            assert place not in there | away
            there.add(place)
        elif op is Op.OFFLOAD:
            assert place in there
            leaving.add(place)
            num_away += 1
        elif op is Op.FETCH:
            away.remove(place)
            there.add(place)
        elif op in (Op.R, Op.B, Op.I, Op.W):
            assert place in there, f"{action} needs what is away"
        most = max(most, len(there))
        if op in COMPUTE and leaving:
            there -= leaving
            away |= leaving
            leaving.clear()
        if last_of.get(place) == at:
            there.remove(place)
    assert not there | away
    return num_away, most


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_every_schedule_offloads_what_is_not_needed_soon(variant, recompute):
    name, options = variant
    before = build(name, ranks=4, microbatches=8, recompute=recompute, **options)
    bare = add_offload(before)
    check(bare)
    assert not bare.is_lowered
    assert from_text(to_text(bare)).ranks == bare.ranks
    lowered = lower(bare)
    check(lowered)
    read = from_text(to_text(lowered))
    check(read)
    assert read.ranks == lowered.ranks
    for rank, row in enumerate(lowered.ranks):
        num_away, most = whereabouts(row)
        assert num_away == sum(a.op is Op.OFFLOAD for a in bare.ranks[rank])
        assert bare.max_activations[rank] == simulate(bare, COSTS).peak_activations[rank] == most
        assert most <= before.max_activations[rank]
        assert [a for a in row if a.op in "FBIWR"] == list(before.ranks[rank])
    assert forward_only(bare).ranks == forward_only(before).ranks
    saves = sum(bare.max_activations) < sum(before.max_activations)
    assert saves or max(before.max_activations) == 1


def test_copies_stand_where_they_overlap_compute(variant):
    """Behind the forward; ahead of the compute action before the user, if that is far enough."""
    name, options = variant
    bare = build(name, ranks=4, microbatches=8, recompute="except_last", **options)
    for before, after in zip(bare.ranks, add_offload(bare).ranks, strict=True):
        for at, action in enumerate(before):
            if action.op is not Op.F:
                continue
            users = [a for a in before[at:] if a[1:] == action[1:] and a.op in "RBI"]
            distance = before.index(users[0]) - at
            offload, fetch = (action._replace(op=op) for op in COPIES)
            assert (offload in after) == (fetch in after) == (distance >= 4)
            if distance >= 4:
                assert after[after.index(action) + 1] == offload
                between = after[after.index(fetch) : after.index(users[0])]
                assert sum(a.op not in COPIES for a in between) == 1


def test_one_rank_in_full():
    bare = add_offload(ONE_RANK)
    assert to_text(bare) == (
        "0F0,0OFFLOAD0,0F1,0OFFLOAD1,0F2,0F3,0B3,0FETCH1,0B2,0FETCH0,0B1,0B0\n"
    )
    assert (ONE_RANK.max_activations, bare.max_activations) == ((4,), (2,))


@pytest.mark.parametrize("prepare", [lambda bare: bare, lower], ids=["bare", "lowered"])
def test_copies_run_beside_compute_one_at_a_time(prepare):
    """F2 and F3 wait until what left beside the forward ahead of them is gone."""
    timeline = simulate(prepare(add_offload(ONE_RANK)), COSTS)
    found = {str(e.action): (e.start_s, e.end_s) for e in timeline.events[0]}
    assert [found[f"0F{m}"] for m in range(4)] == [(0, 1), (1, 2), (2.5, 3.5), (4, 5)]
    assert [found[f"0OFFLOAD{m}"] for m in range(2)] == [(1, 2.5), (2.5, 4)]
    assert [found[f"0FETCH{m}"] for m in (1, 0)] == [(7, 10), (10, 13)]
    assert [found[f"0B{m}"] for m in (3, 2, 1, 0)] == [(5, 7), (7, 9), (10, 12), (13, 15)]
    assert timeline.busy == (12,)
    assert timeline.peak_activations == (2,)
    # F2 and F3 begin as soon as what has left lets go, so at 2.5 and 4 as many are held as before.
    told = memory_over_time(timeline, Memory(), 0)[1:]
    assert told == [(0, 1), (1, 2), (9, 1), (10, 2), (12, 1), (15, 0)]
    causes = explain_bubble(add_offload(ONE_RANK), COSTS)
    assert causes.transfers == pytest.approx(timeline.bubble) == pytest.approx(3 / 15)


@pytest.mark.parametrize("copy_s", [0.0, 0.5, 1.0, 1.5, 4.0])
def test_slow_copies_hold_no_more_over_time_than_is_counted(variant, copy_s):
    """Who waited for a copy had its memory counted ahead of what let go for it: one too many."""
    name, options = variant
    table = add_offload(build(name, ranks=4, microbatches=8, **options))
    timeline = simulate(table, replace(COSTS, offload=copy_s, fetch=copy_s))
    for rank, most in enumerate(peak_memory(table, Memory())):
        found = max(held.amount for held in memory_over_time(timeline, Memory(), rank))
        assert found <= most


@pytest.mark.parametrize("copy_s", [0.0, 1.0, 2.5, 7.0])
@pytest.mark.parametrize("prepare", [lambda bare: bare, lower], ids=["bare", "lowered"])
def test_what_compute_waits_for_is_told_as_it_is_simulated(variant, copy_s, prepare):
    """The rule stands in two places: what no action ahead explains is told by the data flow."""
    name, options = variant
    table = prepare(add_offload(build(name, ranks=4, microbatches=8, **options)))
    timeline = simulate(table, replace(COSTS, offload=copy_s, fetch=copy_s))
    flow = DataFlow(timeline)
    rank_of = {event.action: event.rank for row in timeline.events for event in row}
    waits = {event.action: [*flow.waits(event)] for row in timeline.events for event in row}
    for forward, backward in table.overlaps:  # one block: it begins once both have what is sent
        sent = (each for each in waits[backward] if each.maker.rank != rank_of[backward])
        waits[forward] += sent
    over_s = {action: max([0.0, *(each.over_s for each in of)]) for action, of in waits.items()}
    for row in timeline.events:
        free_s = 0.0
        for event in row:
            if event.action.op in COMPUTE:
                assert event.start_s == pytest.approx(max(free_s, over_s[event.action]))
                free_s = event.end_s


def test_copies_that_take_no_time_cost_none(variant):
    name, options = variant
    bare = build(name, ranks=4, microbatches=8, **options)
    free = replace(COSTS, offload=0, fetch=0)
    assert simulate(add_offload(bare), free).makespan == simulate(bare, free).makespan


def test_memory_frees_what_is_offloaded_and_takes_it_back():
    memory = Memory(forward=10.0, offload=7.0)
    # At most: F3, F2, and what the other two could not move out; then one fetched beside B2.
    assert peak_memory(add_offload(ONE_RANK), memory) == (26.0,)
    assert peak_memory(add_offload(ONE_RANK), Memory(forward=10.0)) == (20.0,)
    assert peak_memory(ONE_RANK, memory) == (40.0,)
    recomputed = add_offload(add_recompute(ONE_RANK, "always"))
    kept = Memory(forward=10.0, boundary=2.0)
    # R3 fills 2 up to 10; it, B3 and R2 each find one more boundary fetched.
    assert peak_memory(recomputed, kept) == (12.0,)


def test_a_full_backward_finds_all_of_it_again():
    bare = add_offload(build("zb_h1", ranks=3, microbatches=6))
    timeline = simulate(bare, COSTS)
    for rank in range(3):
        held = memory_over_time(timeline, Memory(forward=3.0, input_gradient=1.0), rank)
        assert held[-1].amount == 0
        assert min(each.amount for each in held) == 0


def mutants(schedule):
    for rank, row in enumerate(schedule.ranks):
        others = list(schedule.ranks)
        for at, action in enumerate(row):
            if action.op not in COPIES:
                continue
            rest = (*row[:at], *row[at + 1 :])
            user = next(i for i, a in enumerate(rest) if a.op in "RBI" and a[1:] == action[1:])
            maker = next(i for i, a in enumerate(rest) if a.op is Op.F and a[1:] == action[1:])
            for what, changed in (
                ("dropped", rest),
                ("twice", (*row[:at], action, *row[at:])),
                ("behind its user", (*rest[: user + 1], action, *rest[user + 1 :])),
                ("ahead of its maker", (*rest[:maker], action, *rest[maker:])),
                ("of no such", (*row[:at], action._replace(microbatch=99), *row[at + 1 :])),
            ):
                others[rank] = changed
                yield f"{action} {what}", replace(schedule, ranks=tuple(others))
            if len(schedule.ranks) > 1:
                others[rank] = rest
                to = (rank + 1) % len(others)
                others[to] = (*schedule.ranks[to], action)
                yield f"{action} elsewhere", replace(schedule, ranks=tuple(others))
                others[to] = schedule.ranks[to]


@pytest.mark.parametrize(("name", "ranks"), [("gpipe", 2), ("zb_v", 2), ("chimera", 4)])
@pytest.mark.parametrize("prepare", [lambda bare: bare, lower], ids=["bare", "lowered"])
def test_no_wrong_copy_passes(name, ranks, prepare):
    bare = add_offload(build(name, ranks=ranks, microbatches=4, recompute="except_last"))
    schedule = replace(prepare(bare), max_activations=None)
    check(schedule)
    kinds = Counter()
    for what, mutant in mutants(schedule):
        kinds[what.split(maxsplit=1)[1]] += 1
        with pytest.raises(ScheduleError, match="rank"):
            check(mutant)
            pytest.fail(what)
    assert len(kinds) == 6


def test_copies_without_a_backward_are_refused():
    with pytest.raises(ScheduleError, match="0FETCH0: fetches for a backward that is not in"):
        check(from_text("0F0,0OFFLOAD0,0FETCH0\n"))


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (lower(build("gpipe", ranks=2, microbatches=4)), "got a lowered one"),
        (add_offload(ONE_RANK), "got one that offloads already"),
    ],
)
def test_offloading_is_for_bare_tables(schedule, message):
    with pytest.raises(ScheduleError, match=message):
        add_offload(schedule)


def test_a_block_of_two_keeps_the_copies_within():
    bare = add_offload(build("dualpipe", ranks=4, microbatches=8))
    text = to_text(bare)
    assert "OFFLOAD" in text.split("(", 1)[1].split(")OVERLAP", 1)[0]
    assert sorted(from_text(text).overlaps) == sorted(bare.overlaps)


def test_drawings_show_copies():
    timeline = simulate(lower(add_offload(ONE_RANK)), COSTS)
    events = json.loads(chrome_trace([timeline]))["traceEvents"]
    copies = [e["name"] for e in events if e["ph"] == "b" and e["cat"] == "copy"]
    assert copies == [str(e.action) for e in timeline.events[0] if e.action.op in COPIES]
    waited = {e["name"]: e["args"]["waited for"] for e in events if e["ph"] == "X"}
    assert (waited["0B1"], waited["0F2"]) == ("0FETCH1", "0OFFLOAD0")
    scene = layout([timeline])
    page = render_html(scene, "")
    assert '"0FETCH*"' in page
    strip = scene.sections[0].strips[0]
    assert strip.full == max(step.live for step in strip.steps) == 2
    assert draw_text(timeline).count("\n") == 1
    assert draw_svg(timeline).startswith("<svg")
