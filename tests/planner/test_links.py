"""Which of the ways that were timed are slow, and the cluster that they make."""

from gpipe_hpc.planner.links import BETWEEN, WITHIN, TimedLinks
from gpipe_hpc.preflight.timing import CHANNELS, SUMS, TimedLink
from gpipe_hpc.schedule import Link


def both(a, b, latency_s, bytes_per_s):
    return [TimedLink(a, b, latency_s, bytes_per_s), TimedLink(b, a, latency_s, bytes_per_s)]


TWO_HOSTS = ["a", "a", "b", "b"]


def test_each_kind_has_its_own_median():
    """A link between hosts is not slow because those within a host are quicker."""
    ways = both(0, 1, 1e-5, 2e9) + both(1, 2, 5e-3, 1e7) + both(2, 3, 3e-5, 4e9)
    links = TimedLinks(TWO_HOSTS, ways)
    assert links.slow() == []
    kinds = links.kinds()
    assert {key: kind.num_ways for key, kind in kinds.items()} == {
        (WITHIN, CHANNELS): 4,
        (BETWEEN, CHANNELS): 2,
    }
    found = links.cluster({})
    assert (found.hosts, found.within, found.between) == ((2, 2), Link(2e-5, 3e9), Link(5e-3, 1e7))
    assert found.rank_links == {}


def test_a_way_that_is_far_slower_than_most_of_its_kind_is_named():
    hosts = ["a", "b", "c", "d"]
    ways = both(0, 1, 1e-3, 1e8) + both(1, 2, 1e-3, 1e8) + [TimedLink(2, 3, 1e-3, 2e7)]
    slow = TimedLink(2, 3, 1e-3, 2e7)
    links = TimedLinks(hosts, [*ways, TimedLink(3, 2, 5e-3, 1e8)])
    assert links.slow() == [slow, TimedLink(3, 2, 5e-3, 1e8)]
    assert links.cluster({}).rank_links == {(2, 3): Link(1e-3, 2e7), (3, 2): Link(5e-3, 1e8)}
    assert links.cluster({}).between == Link(1e-3, 1e8)


def test_microseconds_within_a_host_are_no_slow_link():
    """On a busy host a process that has to be woken up answers ten times as late."""
    ways = both(0, 1, 5e-6, 2e9) + both(0, 2, 5e-6, 2e9) + both(1, 2, 50e-6, 2e9)
    assert TimedLinks(["a"] * 3, ways).slow() == []


def test_ranks_that_are_dealt_to_hosts_in_turn_keep_what_was_timed():
    """A cluster numbers ranks host by host; Slurm may deal them in turn (--distribution=cyclic)."""
    links = TimedLinks(["a", "b", "a", "b"], both(0, 1, 1e-3, 1e8) + both(0, 2, 1e-5, 1e9))
    found = links.cluster({})
    assert found.hosts == (1, 1, 1, 1)
    assert found.between == Link(1e-3, 1e8)
    assert found.link(0, 2) == Link(1e-5, 1e9)


def test_sums_that_go_another_way_than_boundaries_are_no_slow_links():
    """Boundaries within a host go by shared memory, sums over a connection of Gloo."""
    sums = [way._replace(carries=SUMS) for way in both(0, 2, 5e-4, 1e9) + both(1, 3, 4e-4, 1e9)]
    links = TimedLinks(["a"] * 4, both(0, 1, 1e-5, 8e9) + both(2, 3, 1e-5, 8e9) + sums)
    assert links.slow() == []
    found = links.cluster({})
    assert found.within == Link(1e-5, 8e9)
    assert (found.link(0, 2), found.link(3, 1)) == (Link(5e-4, 1e9), Link(4e-4, 1e9))


def test_without_a_way_there_is_no_cluster():
    assert TimedLinks(["a"], []).cluster({}) is None


def test_slow_ranks_are_told():
    assert TimedLinks(["a", "a"], both(0, 1, 1e-5, 1e9)).cluster({1: 1.5}).paces == {1: 1.5}
