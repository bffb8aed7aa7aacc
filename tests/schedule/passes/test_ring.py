"""Circles of ranks: where they are, and the least of their costs, without a look at all."""

from hypothesis import given
from hypothesis import strategies as st

from gpipe_hpc.schedule.passes.communication import (
    _BlockedCycle,
    _Rendezvous,
    _TableTransfers,
    _Transfers,
)

COSTS = st.integers(-3, 3)


class Counted(list):
    """A list that counts how many of its elements are handed out."""

    num_read = 0

    def __getitem__(self, key):
        found = super().__getitem__(key)
        Counted.num_read += len(found) if isinstance(key, slice) else 1
        return found


@given(st.lists(COSTS, min_size=1, max_size=40), st.lists(st.tuples(st.integers(0, 39), COSTS)))
def test_the_least_and_its_places_are_those_of_the_whole_list(costs, changes):
    ring = _BlockedCycle(list(range(len(costs))), {}, costs)
    for place, cost in changes:
        ring.change(place % len(costs) - len(costs) * (place % 2), cost)
        least = min(ring.costs)
        assert min(ring.least) == least
        for start in range(len(costs) + 1):
            behind = [place for place in range(start, len(costs)) if ring.costs[place] == least]
            assert ring.first(least, start) == (behind[0] if behind else None)


def test_a_change_looks_at_few_costs():
    """Each of millions of posts looked at the costs of all ranks in the circle."""
    ring = _BlockedCycle(list(range(1024)), {}, [9] * 1024)
    ring.costs, ring.least = Counted(ring.costs), Counted(ring.least)
    Counted.num_read = 0
    for place in range(1024):
        ring.change(place, 9 + place % 7)
        ring.first(min(ring.least), place)
    assert Counted.num_read < 1024 * 150


def rendezvous_of(blockers):
    """Return ranks without lists, each waiting for another."""
    rendezvous = _Rendezvous(
        _TableTransfers(_Transfers([], [], [], [], []), [None] * len(blockers)), []
    )
    rendezvous.blockers = blockers
    return rendezvous


def circles_by_the_book(blockers, starts):
    """Walk from each start until a rank comes again: what is new from there on is a circle."""
    found = []
    for start in starts:
        way = [start]
        while (then := blockers[way[-1]]) not in way:
            way.append(then)
        circle = way[way.index(then) :]
        if not any(set(circle) == set(each) for each in found):
            found.append(circle)
    return found


@given(st.lists(st.integers(0, 11), min_size=12, max_size=12), st.lists(st.integers(0, 11)))
def test_circles_are_found_in_turn_each_from_where_its_first_start_leads(blockers, starts):
    """A start that is given again leads into nothing new."""
    rendezvous = rendezvous_of(blockers)
    expected = circles_by_the_book(blockers, starts)
    assert rendezvous._cycles(starts) == expected
    for most in range(1, len(expected) + 1):
        assert rendezvous._cycles(starts, most) == expected[:most]


def test_once_all_circles_are_found_nobody_looks_further():
    """Each of hundreds of thousands of posts walked from all ranks that slept."""
    starts = iter(range(6))
    assert rendezvous_of([1, 0, 1, 4, 3, 4])._cycles(starts, 2) == [[0, 1], [3, 4]]
    assert list(starts) == [4, 5]
