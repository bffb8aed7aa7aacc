"""The costs of a circle of ranks: the least of them, and where, without a look at all."""

from hypothesis import given
from hypothesis import strategies as st

from gpipe_hpc.schedule.passes.communication import _Ring

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
    ring = _Ring(list(range(len(costs))), {}, costs)
    for place, cost in changes:
        ring.change(place % len(costs) - len(costs) * (place % 2), cost)
        least = min(ring.costs)
        assert min(ring.least) == least
        for start in range(len(costs) + 1):
            behind = [place for place in range(start, len(costs)) if ring.costs[place] == least]
            assert ring.first(least, start) == (behind[0] if behind else None)


def test_a_change_looks_at_few_costs():
    """Each of millions of posts looked at the costs of all ranks in the circle."""
    ring = _Ring(list(range(1024)), {}, [9] * 1024)
    ring.costs, ring.least = Counted(ring.costs), Counted(ring.least)
    Counted.num_read = 0
    for place in range(1024):
        ring.change(place, 9 + place % 7)
        ring.first(min(ring.least), place)
    assert Counted.num_read < 1024 * 150
