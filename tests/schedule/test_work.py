"""Tables of millions of actions: the work for each action is bounded, whatever the size.

Counted are the lines of Python that building, lowering and checking run, which no busy machine
changes. A million actions of 150 lines each take about 4 s.
"""

import sys

import pytest

from gpipe_hpc.schedule import add_recompute, build, check, forward_only, lower
from gpipe_hpc.schedule.families.known import FAMILIES


def count_lines(work):
    """Return how many lines a call runs, and what it returns."""
    num_lines = 0

    def local(frame, event, argument):
        nonlocal num_lines
        num_lines += event == "line"
        return local

    before = sys.gettrace()
    sys.settrace(lambda frame, event, argument: local)
    try:
        result = work()
    finally:
        sys.settrace(before)
    return num_lines, result


def all_tables(name, ranks, microbatches):
    """Do what a layout does for a schedule: the tables of training and of evaluation."""
    bare = add_recompute(build(name, ranks=ranks, microbatches=microbatches), "except_last")
    training = lower(bare, dict.fromkeys(range(bare.num_stages), 2))
    check(training)
    check(lower(forward_only(bare)))
    return training


def lines_per_action(name, ranks, microbatches):
    num_lines, table = count_lines(lambda: all_tables(name, ranks, microbatches))
    return num_lines / table.num_actions


@pytest.mark.parametrize("name", FAMILIES)
def test_the_work_for_an_action_does_not_grow_with_the_table(name):
    """1F1B took 16 us an action on 64 ranks and 21 on 512, four fifths of them in objects."""
    small, large = (lines_per_action(name, *size) for size in ((4, 16), (12, 48)))
    assert large < 250, "about 6 us"
    assert large < 1.02 * small


def test_the_count_sees_work_that_grows():
    """Each of n looks at all n: twice as many are four times the lines."""

    def look(number):
        seen = 0
        for one in range(number):
            for other in range(number):
                seen += one is other
        return seen

    counts = [count_lines(lambda number=number: look(number))[0] for number in (20, 40)]
    assert counts[1] > 3 * counts[0]
