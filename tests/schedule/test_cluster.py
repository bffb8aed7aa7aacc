"""What a described cluster says of links, reductions and replicas."""

import pytest

from gpipe_hpc.schedule import (
    Cluster,
    Costs,
    Link,
    ScheduleError,
    build,
    lower,
    simulate,
    simulate_job,
)

WITHIN, BETWEEN, POOR = Link(1, 100), Link(5, 10), Link(7, 2)
COSTS = Costs(forward=1, backward=2, boundary_bytes=20)


def cluster(**more):
    return Cluster(hosts=(2, 3, 3), within=WITHIN, between=BETWEEN, **more)


def test_ranks_are_numbered_host_by_host():
    assert [cluster().host_of(rank) for rank in range(8)] == [0, 0, 1, 1, 1, 2, 2, 2]
    assert cluster().num_ranks == 8


def test_a_way_has_the_link_of_its_hosts_unless_one_is_named():
    described = cluster(host_links={2: POOR}, rank_links={(0, 1): Link(9, 9)})
    assert described.link(1, 0) == WITHIN
    assert described.link(0, 1) == Link(9, 9)
    assert described.link(1, 2) == BETWEEN
    assert described.link(5, 2) == described.link(2, 5) == Link(7, 2)
    assert described.link(5, 6) == WITHIN
    mixed = cluster(host_links={1: Link(0, 4), 2: Link(6, 8)})
    assert mixed.link(2, 5) == Link(6, 4)


def test_a_large_sum_goes_round_a_ring_and_a_small_one_over_a_tree():
    """Over the worst link on the way round, which closes from the last rank to the first."""
    ring = cluster().reduction_time([0, 1, 2, 3], 1000.0)
    assert ring == (2 * 3 * 5, 2 * 1000 * 3 / 4 / 10)
    assert cluster().reduction_time([0, 1], 1000.0) == (2 * 1, 2 * 1000 / 2 / 100)
    tree = cluster().reduction_time(list(range(8)), 1.0)
    assert tree == (2 * 3 * 5, 2 * 1 / 10)
    # The latency is paid for each bucket, so many small ones go over the tree.
    assert cluster().reduction_time([0, 1, 2, 3], 500.0, 1).latency_s == 30
    assert cluster().reduction_time([0, 1, 2, 3], 500.0, 9).latency_s == 20
    assert cluster().reduction_time([3], 1000.0).total_s == 0
    assert cluster().reduction_time([0, 1, 2], 0.0).total_s == 0


def test_each_replica_has_its_own_links_and_slow_ranks():
    """Of six ranks on two hosts the second replica lies across; the third has a slow rank."""
    schedule = lower(build("gpipe", ranks=2, microbatches=2))
    described = Cluster((3, 3), WITHIN, BETWEEN, paces={5: 1.5})
    found = described.replicas(schedule, COSTS, 3, gradient_bytes=[0, 300])
    assert [each.links[0, 1] for each in found] == [WITHIN, BETWEEN, WITHIN]
    assert [each.links[1, 0] for each in found] == [WITHIN, BETWEEN, WITHIN]
    assert [dict(each.paces) for each in found] == [{}, {}, {1: 1.5}]
    # Ranks 1, 3 and 5 hold stage 1.
    assert found[0].reduction == [0, 2 * 300 * 2 / 3 / 10]
    assert found[0].reduction_latency == [0, 2 * 2 * 5]
    job = simulate_job(schedule, found)
    alone = [simulate(schedule, each).end_of_compute for each in found]
    assert [each.end_of_compute for each in job.replicas] == alone
    assert len(set(alone)) == 3


def test_replicas_that_are_linked_alike_are_timed_once():
    described = Cluster((8,) * 100, WITHIN, BETWEEN, paces={17: 2.0})
    found = described.replicas(build("gpipe", ranks=8, microbatches=2), COSTS, 100)
    assert len({id(each) for each in found}) == 2
    assert found[2].paces == {1: 2.0}


def test_mirrored_stages_are_summed_over_all_their_holders():
    described = Cluster((8,), WITHIN, BETWEEN)
    schedule = lower(build("chimera", ranks=2, microbatches=2))
    costs = described.replicas(schedule, COSTS, 4, gradient_bytes=10_000)[0]
    assert costs.reduction[0] == 2 * 10_000 * 7 / 8 / 100


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"host_links": {3: POOR}}, "host_links names host 3, but there are only 0 to 2"),
        ({"rank_links": {(0, 8): POOR}}, "rank_links names rank 8, but"),
        ({"paces": {-1: 2.0}}, "paces names rank -1, but"),
        ({"paces": {1: 0.0}}, "pace of rank 1 must be a factor above 0"),
    ],
)
def test_what_is_said_of_ranks_and_hosts_that_are_not_there_is_refused(more, message):
    with pytest.raises(ScheduleError, match=message):
        cluster(**more)


def test_a_cluster_too_small_and_one_without_ranks_are_refused():
    with pytest.raises(ScheduleError, match="need 10 ranks, but the cluster has 8"):
        cluster().replicas(build("gpipe", ranks=2, microbatches=2), COSTS, 5)
    with pytest.raises(ScheduleError, match="one rank on each, got"):
        Cluster((2, 0), WITHIN, BETWEEN)
