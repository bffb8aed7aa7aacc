"""Which CPUs each rank takes, on machines that are described."""

from collections.abc import Sequence

import pytest

from gpipe_hpc.device.cores.assignment import CpuRequest, assign_cpus, assignments_text
from gpipe_hpc.device.cores.machine import Core, Quota, cpus_text


def machine(sockets, cores, threads=1):
    """Return cores numbered as Linux does: all first hardware threads, then all second ones."""
    num = sockets * cores
    return [
        Core(frozenset(core + num * thread for thread in range(threads)), core // cores)
        for core in range(num)
    ]


def all_of(cores: Sequence[Core]) -> frozenset[int]:
    return frozenset().union(*(core.cpus for core in cores))


def taken(lots):
    """Return the CPUs of each rank, in order, as text."""
    found = {m: cpus_text(c) for lot in lots for m, c in zip(lot.members, lot.cpus, strict=True)}
    return [found[rank] for rank in sorted(found)]


def threads(lots):
    found = {m: n for lot in lots for m, n in zip(lot.members, lot.num_threads, strict=True)}
    return [found[rank] for rank in sorted(found)]


def test_ranks_take_whole_cores_with_their_second_hardware_threads():
    cores = machine(1, 8, threads=2)
    lots = assign_cpus(cores, [CpuRequest(all_of(cores))] * 2)
    assert taken(lots) == ["0-3,8-11", "4-7,12-15"]
    assert threads(lots) == [4, 4]
    assert assignments_text(lots, 1) == "2 ranks bound to CPUs 0-3,8-11 | 4-7,12-15"


def test_eight_gpus_on_two_nodes_each_get_cores_of_their_node():
    """The devices' order need not be that of the nodes."""
    cores = machine(2, 16)
    nodes = [1, 1, 0, 0, 1, 1, 0, 0]
    lots = assign_cpus(cores, [CpuRequest(all_of(cores), node) for node in nodes])
    assert taken(lots) == ["16-19", "20-23", "0-3", "4-7", "24-27", "28-31", "8-11", "12-15"]
    assert threads(lots) == [4] * 8
    assert "0-3 (NUMA node 0)" in assignments_text(lots, 2)


def test_ranks_on_cpus_are_spread_over_the_nodes_in_their_order():
    cores = machine(2, 4)
    assert taken(assign_cpus(cores, [CpuRequest(all_of(cores))] * 3)) == ["0-1", "2-3", "4-7"]
    assert taken(assign_cpus(cores, [CpuRequest(all_of(cores))] * 4)) == [
        "0-1",
        "2-3",
        "4-5",
        "6-7",
    ]
    four = machine(4, 2)
    assert taken(assign_cpus(four, [CpuRequest(all_of(four))] * 2)) == ["0-3", "4-7"]


def test_a_node_with_few_of_the_allowed_cores_gets_few_ranks():
    cores = machine(2, 8)
    allowed = frozenset({0, *range(8, 16)})
    lots = assign_cpus(cores, [CpuRequest(allowed)] * 3)
    assert taken(lots) == ["8-9", "10-12", "13-15"]


def test_devices_whose_node_has_no_allowed_cores_are_spread_like_cpus():
    cores = machine(2, 4)
    lots = assign_cpus(cores, [CpuRequest(frozenset(range(4)), 1)] * 2)
    assert taken(lots) == ["0-1", "2-3"]


def test_what_was_given_apart_stays_as_it_is():
    """srun --cpu-bind=cores: two ranks of the machine, a core each; nothing is narrowed."""
    cores = machine(1, 4, threads=2)
    lots = assign_cpus(cores, [CpuRequest(frozenset({0, 4})), CpuRequest(frozenset({1, 2, 5, 6}))])
    assert taken(lots) == ["0,4", "1-2,5-6"]
    assert not any(lot.is_bound for lot in lots)
    assert threads(lots) == [1, 2]
    assert assignments_text(lots, 1) == "2 ranks on CPUs 0,4 | 1-2,5-6, affinity unchanged"


def test_ranks_that_share_a_socket_divide_it():
    """mpiexec -bind-to socket gives several ranks the same CPUs."""
    cores = machine(2, 4)
    first, second = frozenset(range(4)), frozenset(range(4, 8))
    lots = assign_cpus(
        cores, [CpuRequest(first), CpuRequest(second), CpuRequest(first), CpuRequest(second)]
    )
    assert taken(lots) == ["0-1", "4-5", "2-3", "6-7"]
    assert all(lot.is_bound for lot in lots)


def test_overlapping_gifts_are_left_alone():
    cores = machine(1, 4)
    (lot,) = assign_cpus(cores, [CpuRequest(frozenset({0, 1})), CpuRequest(frozenset({1, 2, 3}))])
    assert not lot.is_bound and "overlap" in lot.why_not
    assert taken([lot]) == ["0-1", "1-3"]


def test_ranks_that_overlap_by_way_of_a_third_are_one_lot():
    cores = machine(1, 4)
    gifts = [frozenset({0}), frozenset({1}), frozenset({0, 1})]
    (lot,) = assign_cpus(cores, [CpuRequest(each) for each in gifts])
    assert lot.members == (0, 1, 2) and not lot.is_bound


def test_more_ranks_than_cores_are_not_bound_and_it_is_said():
    cores = machine(1, 2, threads=2)
    lots = assign_cpus(cores, [CpuRequest(all_of(cores))] * 3)
    assert taken(lots) == ["0-3"] * 3
    assert threads(lots) == [1, 1, 1]
    assert (
        assignments_text(lots, 1) == "3 ranks share CPUs 0-3, not bound: more ranks than cores (2)"
    )


def test_a_restricted_affinity_is_what_is_divided():
    """taskset -c 2,3,7 torchrun: CPU 7 is one hardware thread of core 3's neighbour."""
    cores = machine(1, 4, threads=2)
    lots = assign_cpus(cores, [CpuRequest(frozenset({2, 3, 7}))] * 2)
    assert taken(lots) == ["2", "3,7"]


def test_a_quota_below_the_cpus_limits_threads_and_binds_nobody():
    """Two containers of a machine would otherwise both take its first cores."""
    cores = machine(1, 16)
    quota = Quota(5.0, "pod")
    (lot,) = assign_cpus(cores, [CpuRequest(all_of(cores), quota=quota)] * 2)
    assert not lot.is_bound and "quota of 5 CPUs" in lot.why_not
    assert lot.num_threads == (2, 2)


def test_a_quota_below_one_cpu_leaves_a_thread():
    cores = machine(1, 4)
    lots = assign_cpus(cores, [CpuRequest(all_of(cores), quota=Quota(0.5, "pod"))])
    assert threads(lots) == [1]


def test_a_quota_of_all_cpus_does_not_keep_ranks_from_their_cores():
    """Kubernetes' static CPU manager: a set of CPUs, and a quota of as many."""
    cores = machine(1, 16)
    allowed = frozenset(range(4, 8))
    lots = assign_cpus(cores, [CpuRequest(allowed, quota=Quota(4.0, "pod"))] * 2)
    assert taken(lots) == ["4-5", "6-7"]
    assert threads(lots) == [2, 2]


def test_ranks_in_containers_of_their_own_have_a_quota_each():
    cores = machine(1, 16)
    ranks = [CpuRequest(all_of(cores), quota=Quota(4.0, pod)) for pod in "ab"]
    assert threads(assign_cpus(cores, ranks)) == [4, 4]


def test_one_rank_alone_stays_where_it_was_unless_it_has_a_device():
    cores = machine(2, 4)
    (lot,) = assign_cpus(cores, [CpuRequest(all_of(cores))])
    assert not lot.is_bound and threads([lot]) == [8]
    assert assignments_text([lot], 2) == "1 rank on CPUs 0-7 (NUMA nodes 0-1), affinity unchanged"
    (near,) = assign_cpus(cores, [CpuRequest(all_of(cores), node=1)])
    assert near.is_bound and taken([near]) == ["4-7"]
    (narrowed,) = assign_cpus(cores, [CpuRequest(all_of(cores) - {0}, node=1)])
    assert not narrowed.is_bound, "somebody has bound it already"


def test_more_threads_than_a_share_has_leave_ranks_unbound():
    """Two threads that spin on one core would be slower than on the cores of all."""
    cores = machine(1, 2)
    (lot,) = assign_cpus(cores, [CpuRequest(all_of(cores), num_threads=2)] * 2)
    assert not lot.is_bound and "2 threads requested" in lot.why_not
    (one,) = assign_cpus(cores, [CpuRequest(all_of(cores), num_threads=1)] * 2)
    assert one.is_bound and threads([one]) == [1, 1]


def test_none_leaves_all_as_it_was():
    cores = machine(1, 4)
    (lot,) = assign_cpus(cores, [CpuRequest(all_of(cores))] * 2, binds=False)
    assert not lot.is_bound and lot.why_not == "train.bind=none"
    assert threads([lot]) == [2, 2]


@pytest.mark.parametrize("sockets", [1, 2, 3])
@pytest.mark.parametrize("smt", [1, 2])
@pytest.mark.parametrize("num_ranks", [*range(2, 13)])
def test_no_two_ranks_ever_share_a_core_and_none_lies_idle(sockets, smt, num_ranks):
    cores = machine(sockets, 4, smt)
    (lot,) = assign_cpus(cores, [CpuRequest(all_of(cores))] * num_ranks)
    assert lot.is_bound == (num_ranks <= len(cores))
    if lot.is_bound:
        assert sum(map(len, lot.cpus)) == len(all_of(cores))
        assert frozenset().union(*lot.cpus) == all_of(cores)
        assert all(sum(bool(core.cpus & cpus) for cpus in lot.cpus) == 1 for core in cores)
        if num_ranks >= sockets:
            assert {len(nodes) for nodes in lot.nodes} == {1}
