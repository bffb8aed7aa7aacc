"""Tables of millions of actions: the work for each action is bounded, whatever the size.

Counted are the lines of Python that building, lowering and checking run, and the numbers that
numpy looks at in them, which no busy machine changes. A million actions of 150 lines each take
about 4 s.
"""

import sys
from array import array

import numpy as np
import pytest

from gpipe_hpc.schedule import add_recompute, build, check, checker, forward_only, lower
from gpipe_hpc.schedule.families.known import FAMILIES
from gpipe_hpc.schedule.passes import communication, recompute
from gpipe_hpc.schedule.table import lifetimes, precedence, rows
from gpipe_hpc.schedule.table.precedence import build_precedence, runs


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


class Counted(np.ndarray):
    """An array that notes how many numbers are looked at whenever it is used."""

    num_seen = 0

    def __array_ufunc__(self, ufunc, method, *given, out=(), **options):
        if out:
            options["out"] = tuple(map(plain, out))
        return counted(getattr(ufunc, method)(*map(plain, given), **options), *given)

    def __array_function__(self, function, types, given, options):
        return counted(super().__array_function__(function, types, given, options))

    def __getitem__(self, key):
        return counted(super().__getitem__(key), key)

    def __setitem__(self, key, value):
        counted(key, value)
        super().__setitem__(key, value)


def plain(value):
    return value.view(np.ndarray) if isinstance(value, Counted) else value


def counted(result, *others):
    """Note the size of the largest of some values; return the first, which goes on counting."""
    arrays = [each for each in (result, *others) if isinstance(each, np.ndarray)]
    Counted.num_seen += max((each.size for each in arrays), default=0)
    is_new = isinstance(result, np.ndarray) and not isinstance(result, Counted)
    return result.view(Counted) if is_new else result


class CountedNumpy:
    """numpy, with arrays that count."""

    def asarray(self, column, dtype):
        """Of an `array` it is the same memory, at which nobody looks."""
        found = np.asarray(column, dtype)
        return found.view(Counted) if isinstance(column, array) else counted(found)

    def __getattr__(self, name):
        there = getattr(np, name)
        if isinstance(there, type | np.ufunc) or not callable(there):
            return there
        return lambda *given, **options: counted(there(*given, **options))


@pytest.fixture
def count_numbers(monkeypatch):
    """Return a function that says how many numbers numpy looks at in a call, and what it gives."""
    for module in (checker, communication, lifetimes, precedence, recompute, rows):
        monkeypatch.setattr(module, "np", CountedNumpy())

    def count(work):
        before = Counted.num_seen
        result = work()
        return Counted.num_seen - before, result

    return count


@pytest.mark.parametrize("name", FAMILIES)
def test_the_numbers_for_an_action_do_not_grow_with_the_table(count_numbers, name):
    """The check of the order of transfers looked at all sends once for each stage that sends."""
    small, large = (
        num_numbers / table.num_actions
        for num_numbers, table in (
            count_numbers(lambda size=size: all_tables(name, *size)) for size in ((4, 16), (12, 48))
        )
    )
    assert 100 < large < 500
    assert large < 1.02 * small


def test_the_count_of_numbers_sees_work_that_grows(count_numbers):
    """All of n are looked at for each of n: twice as many are four times the numbers."""

    def look(number):
        column = rows.numbers_of(range(number))
        return [rows.np.flatnonzero(column == one) for one in range(number)]

    counts = [count_numbers(lambda number=number: look(number))[0] for number in (20, 40)]
    assert counts[1] > 3 * counts[0]


def test_the_check_of_a_table_of_evaluation_does_not_grow_with_its_stages():
    """Each stage asked all kinds of actions anew whether there is a backward."""

    def lines_of_check(ranks):
        table = lower(forward_only(build("hanayo", ranks=ranks, microbatches=4)))
        num_lines, _ = count_lines(lambda: check(table))
        return num_lines / table.num_actions

    assert lines_of_check(48) < 1.1 * lines_of_check(12)


@pytest.mark.parametrize("name", FAMILIES)
def test_an_order_takes_few_lines_an_action(name):
    """What waits for nobody was looked at by itself, and who slept was looked for in lists anew."""
    bare = add_recompute(build(name, ranks=8, microbatches=32), "except_last")
    graph = build_precedence(lower(bare))
    num_lines, _ = count_lines(lambda: runs(graph, graph.rendezvous_waits))
    assert num_lines < 8 * graph.num_nodes
