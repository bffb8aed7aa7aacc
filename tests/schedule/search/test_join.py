"""Joining the halves of backwards: never slower, and little is left split."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe_hpc.schedule import Costs, Op, build, check, simulate
from gpipe_hpc.schedule.search.auto import place, search
from gpipe_hpc.schedule.search.join import join_backwards

COSTS = Costs(forward=1.0, backward=2.0, input_gradient=1.05, weight_gradient=1.1)
FREE = Costs(forward=1.0, input_gradient=1.0, weight_gradient=1.0)


def anything(schedule):
    return True


def count(schedule, op):
    return sum(action.op is op for row in schedule.ranks for action in row)


@given(
    name=st.sampled_from(["zb_h1", "zb_h2", "zb_v", "v_half", "dualpipe_v"]),
    ranks=st.integers(2, 4),
    microbatches=st.integers(1, 9),
    price=st.floats(1.0, 1.5),
    trials=st.integers(0, 60),
)
@settings(max_examples=60, deadline=None)
def test_never_slower_and_still_the_same_work(name, ranks, microbatches, price, trials):
    if name == "dualpipe_v":
        microbatches = max(microbatches, 2 * ranks)
    table = build(name, ranks=ranks, microbatches=microbatches)
    costs = Costs(forward=1, backward=2, input_gradient=price, weight_gradient=price)
    joined = join_backwards(table, costs, anything, trials)
    check(joined)
    assert simulate(joined, costs).makespan <= simulate(table, costs).makespan
    assert count(joined, Op.I) == count(joined, Op.W)
    assert count(joined, Op.B) + count(joined, Op.I) == count(table, Op.I) + count(table, Op.B)


def test_what_fills_no_bubble_is_joined_even_for_free():
    table = build("zb_h1", ranks=1, microbatches=6)
    assert count(join_backwards(table, FREE, anything, 200), Op.I) == 0


def test_a_table_that_does_not_fit_is_not_taken():
    table = build("zb_h1", ranks=2, microbatches=6)
    same = join_backwards(table, COSTS, lambda schedule: False, 200)
    assert same.ranks == table.ranks


@pytest.mark.parametrize(
    ("microbatches", "kind", "most_split", "slowdown"),
    [
        (16, "one_each", 2, 1.03),  # two of 32 split backwards, where 1F1B is at 1.0625
        (8, "wave", 2, 1.03),
        (4, "wave", 4, 1.06),
    ],
)
def test_few_split_backwards_fill_the_bubble_of_two_ranks(microbatches, kind, most_split, slowdown):
    """The lower bound of two ranks is half a forward of their work above it, or a quarter."""
    each = 2 if kind == "wave" else 1
    costs = Costs(
        forward=1.0 / each,
        backward=2.0 / each,
        input_gradient=1.05 / each,
        weight_gradient=1.1 / each,
    )
    found = search(place(kind, 2, microbatches, 2), costs)
    assert count(found.schedule, Op.I) <= most_split
    assert found.makespan <= slowdown * 3 * microbatches
