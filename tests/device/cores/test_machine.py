"""What Linux tells of CPUs, read from folders that look as its own do."""

import pytest

from gpipe_hpc.device.cores.machine import (
    Core,
    cores_with,
    cpus_text,
    node_of_pci,
    parse_cpus,
    tightest_quota,
)


@pytest.mark.parametrize(
    ("text", "cpus"), [("", set()), ("5\n", {5}), ("0-2,8,10-11\n", {0, 1, 2, 8, 10, 11})]
)
def test_lists_of_cpus_are_read_and_written_as_linux_writes_them(text, cpus):
    assert parse_cpus(text) == cpus
    assert cpus_text(cpus) == text.strip()


def written(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_cores_are_hardware_threads_together_on_their_node(tmp_path):
    """Two sockets of two cores; a core's second hardware thread is numbered behind all first."""
    system = tmp_path / "devices/system"
    written(system / "cpu/online", "0-7\n")
    written(system / "node/node0/cpulist", "0-1,4-5\n")
    written(system / "node/node1/cpulist", "2-3,6-7\n")
    for cpu in range(8):
        siblings = f"{cpu % 4},{cpu % 4 + 4}\n"
        written(system / f"cpu/cpu{cpu}/topology/thread_siblings_list", siblings)
    assert cores_with({0, 1}, tmp_path) == (
        Core(frozenset({0, 4}), 0),
        Core(frozenset({1, 5}), 0),
        Core(frozenset({2, 6}), 1),
        Core(frozenset({3, 7}), 1),
    )


def test_where_nothing_is_told_each_cpu_is_a_core(tmp_path):
    assert cores_with({3, 9}, tmp_path) == (Core(frozenset({3}), 0), Core(frozenset({9}), 0))


@pytest.mark.parametrize(("text", "node"), [("1\n", 1), ("-1\n", None), (None, None)])
def test_a_device_is_next_to_the_node_that_its_bus_tells(tmp_path, text, node):
    if text is not None:
        written(tmp_path / "bus/pci/devices/0001:c1:00.0/numa_node", text)
    assert node_of_pci(1, 0xC1, 0, tmp_path) == node


def test_the_tightest_quota_of_all_groups_around_counts_in_version_2(tmp_path):
    written(tmp_path / "self/cgroup", "0::/pod/rank\n")
    groups = tmp_path / "groups"
    written(groups / "pod/cpu.max", "350000 100000\n")
    written(groups / "pod/rank/cpu.max", "max 100000\n")
    quota = tightest_quota(tmp_path / "self", groups)
    assert quota is not None and quota.num_cpus == 3.5


def test_two_processes_under_one_quota_know_that_it_is_one(tmp_path):
    groups = tmp_path / "groups"
    written(groups / "pod/cpu.max", "200000 100000\n")
    for name in "ab":
        (groups / "pod" / name).mkdir()
        written(tmp_path / name / "cgroup", f"0::/pod/{name}\n")
    first, second = (tightest_quota(tmp_path / name, groups) for name in "ab")
    assert first == second is not None


@pytest.mark.parametrize("folder", ["cpu,cpuacct", "cpu"])
@pytest.mark.parametrize(("quota", "cpus"), [("150000", 1.5), ("-1", None)])
def test_quotas_of_version_1_count_too(tmp_path, folder, quota, cpus):
    written(tmp_path / "self/cgroup", "4:memory:/x\n3:cpu,cpuacct:/job\n0::/\n")
    written(tmp_path / "groups" / folder / "job/cpu.cfs_quota_us", f"{quota}\n")
    written(tmp_path / "groups" / folder / "job/cpu.cfs_period_us", "100000\n")
    found = tightest_quota(tmp_path / "self", tmp_path / "groups")
    assert (None if found is None else found.num_cpus) == cpus
