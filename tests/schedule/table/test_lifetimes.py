"""Who lives when: every thing from the start of its maker to the end of its last user."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe_hpc.device.device import HostDevice
from gpipe_hpc.engine.offload import PinnedBufferPool
from gpipe_hpc.schedule import Op, add_offload, add_recompute, build, from_text, lower
from gpipe_hpc.schedule.table.actions import COMPUTE, Action
from gpipe_hpc.schedule.table.dependencies import ValueKind, makes, needs, provides, uses
from gpipe_hpc.schedule.table.lifetimes import (
    in_flight,
    kept_lifetimes,
    offloaded_lifetimes,
    peak_activations,
    peak_receives,
    received,
)


def row_of(text):
    return from_text(text).ranks[0]


def spans(row, lives):
    """Return lives as texts: thing, and the actions from whose start to whose end it is there."""
    return sorted(f"{life.thing}: {row[life.first]} to {row[life.last]}" for life in lives)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0F0,0F1,0B1,0B0", ["activations: 0F0 to 0B0", "activations: 0F1 to 0B1"]),
        ("0F0,0I0,0F1,0I1,0W1,0W0", ["activations: 0F0 to 0W0", "activations: 0F1 to 0W1"]),
        ("0F0,0R0,0B0", ["activations: 0F0 to 0B0", "recomputed activations: 0R0 to 0B0"]),
        (
            "0F0,0R0,0I0,0W0",
            ["activations: 0F0 to 0W0", "recomputed activations: 0R0 to 0W0"],
        ),
        (
            "0F0,0OFFLOAD0,0FETCH0,0B0",
            ["activations: 0F0 to 0B0", "offloaded copy: 0OFFLOAD0 to 0FETCH0"],
        ),
        ("0F0,0F1", ["activations: 0F0 to 0F0", "activations: 0F1 to 0F1"]),
    ],
)
def test_what_stays(text, expected):
    row = row_of(text)
    lives = [life for life in kept_lifetimes(row) if life.thing is not ValueKind.INPUT_SHARE]
    assert spans(row, lives) == expected


def test_the_share_of_the_input_gradient_ends_with_it():
    row = row_of("0F0,0F1,0I0,0B1,0W0")
    shares = kept_lifetimes(row, {ValueKind.INPUT_SHARE})
    assert [(row[each.first].op, row[each.last].op) for each in shares] == [("F", "I"), ("F", "B")]


def test_what_goes_lives_until_it_is_sent_or_taken():
    """Two stages on rank 0, one on rank 1, and a skip from the first to the last."""
    table = lower(from_text("0F0,1F0,3F0,3B0,1B0,0B0\n2F0,2B0\nskips,0>3\n"))
    row = table.ranks[0]
    assert spans(row, in_flight(row, 4, table.skips)) == [
        "gradient: 1B0 to 0B0",
        "gradient: 3B0 to 0B0",
        "gradient: 3B0 to 3SEND_B0",
        "output: 0F0 to 1F0",
        "output: 0F0 to 3F0",
        "output: 1F0 to 1SEND_F0",
    ]
    assert [(e.stage, e.peer) for e in in_flight(row, 4, table.skips)][:2] == [(0, 1), (1, 2)]
    assert spans(row, received(row)) == ["message: 1RECV_B0 to 1B0", "message: 3RECV_F0 to 3F0"]


def test_a_buffer_that_nobody_takes_stays():
    row = (Action(Op.RECV_F, 1, 0), Action(Op.F, 1, 1), Action(Op.RECV_F, 1, 1))
    assert [(each.first, each.last) for each in received(row)] == [(0, 2), (2, 2)]
    assert peak_receives(row) == (2, 2)


@given(
    st.sampled_from(["gpipe", "one_f_one_b", "zb_h2", "zb_v", "interleaved", "chimera"]),
    st.sampled_from(["always", "except_last", "never"]),
    st.booleans(),
    st.integers(1, 9),
)
@settings(max_examples=50, deadline=None)
def test_lives_are_those_that_a_replay_of_the_list_finds(name, recompute, offload, microbatches):
    """Counted again the long way: a set of what is there, action by action."""
    bare = add_recompute(build(name, ranks=4, microbatches=microbatches), recompute)
    table = lower(add_offload(bare) if offload else bare)
    for row in table.ranks:
        here, leaving, buffers, most, most_buffers = set(), set(), Counter(), 0, 0
        for op, stage, microbatch, _ in row:
            place = stage, microbatch
            if op in (Op.F, Op.FETCH):
                here.add(place)
            if op in (Op.RECV_F, Op.RECV_B):
                buffers[op, place] += 1
            most, most_buffers = max(most, len(here)), max(most_buffers, buffers.total())
            if op in (Op.B, Op.W):
                here.remove(place)
            if op in COMPUTE:
                here -= leaving
                leaving.clear()
            if op is Op.OFFLOAD:
                assert place in here
                leaving.add(place)
            taken = {Op.F: Op.RECV_F, Op.B: Op.RECV_B, Op.I: Op.RECV_B}.get(op)
            buffers.pop((taken, place), None)
        assert not here
        assert not buffers
        assert peak_activations(row).size == most
        assert peak_receives(row).size == most_buffers


def test_every_op_says_what_it_needs_and_whatever_is_needed_is_made():
    """A new op has one row in the data flow; nothing that it needs is left without a maker."""
    made = {thing for op in Op for thing in makes(op)}
    for op in Op:
        for need in needs(Action(op, 1, None if op is Op.REDUCE_GRAD else 0), 3, 2, ((0, 2),)):
            assert need.things
            assert set(need.things) <= made
            met_by = {
                other
                for other in Op
                for each in provides(Action(other, 0, 0))
                if each.op is need.action.op
            }
            handed_on = set().union(*(uses(other) | makes(other) for other in met_by))
            assert set(need.things) <= handed_on


def test_lives_of_one_place_follow_one_another():
    row = add_offload(build("gpipe", ranks=1, microbatches=5)).ranks[0]
    copies = kept_lifetimes(row, {ValueKind.COPY})
    assert len(copies) == 3
    assert all(one.first < other.first for one, other in pairwise(copies))


class Leaving:
    """A micro-batch on its way to the host: here until the engine's room lets go of it."""

    def __init__(self, here, place):
        self.here, self.place = here, place

    def let_go(self):
        self.here.remove(self.place)


class Room:
    """Who is there, action by action, as the engine's own room lets go of what has left."""

    def __init__(self):
        self.room = PinnedBufferPool(HostDevice())
        self.here, self.leaving, self.most = set(), {}, 0

    def run(self, action):
        op, place = action.op, (action.stage, action.microbatch)
        if op in COMPUTE:
            self.room.before_compute()
        if op is Op.OFFLOAD:
            self.leaving[place] = Leaving(self.here, place)
            with self.room.going_out(self.leaving[place]):
                pass
        if op is Op.FETCH:
            self.room.free_offloaded()
            is_here = self.room.take_back(self.leaving.pop(place)) is not None
            assert is_here == (place in self.here)
        if op in (Op.F, Op.FETCH):
            self.here.add(place)
        self.most = max(self.most, len(self.here))
        if op in (Op.B, Op.W):
            self.here.remove(place)


@pytest.mark.parametrize("recompute", ["never", "except_last", "always"])
@pytest.mark.parametrize("prepare", [lambda bare: bare, lower], ids=["bare", "lowered"])
def test_the_engine_has_no_more_at_once_than_is_counted(variant, recompute, prepare):
    """What was to have left was there until the next action of compute, beside what came back."""
    name, options = variant
    bare = build(name, ranks=4, microbatches=8, recompute=recompute, **options)
    table = prepare(add_offload(bare))
    for row in table.ranks:
        room = Room()
        for action in row:
            room.run(action)
        assert not room.here
        assert peak_activations(row).size == room.most


@pytest.mark.parametrize(
    ("text", "expected", "most"),
    [
        ("0F0,0OFFLOAD0,0F1,0B1,0FETCH0,0B0", ["offloaded copy: 0F1 to 0FETCH0"], 2),
        ("0F0,0OFFLOAD0,0F1,0F2,0B2,0B1,0FETCH0,0B0", ["offloaded copy: 0F1 to 0FETCH0"], 2),
        ("0F0,0OFFLOAD0,0F1,0FETCH0,0B0,0B1", ["offloaded copy: 0F1 to 0FETCH0"], 2),
        ("0F0,0OFFLOAD0,0FETCH0,0F1,0B0,0B1", [], 2),
        ("0F0,0OFFLOAD0,0FETCH0,0B0", [], 1),
    ],
)
def test_memory_is_free_behind_the_compute_action_that_a_copy_runs_beside(text, expected, most):
    row = row_of(text)
    assert spans(row, offloaded_lifetimes(row)) == expected
    assert peak_activations(row).size == most
