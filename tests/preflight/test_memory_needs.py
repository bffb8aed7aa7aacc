"""Whether memory has room for what its ranks are planned to hold."""

import threading
from dataclasses import replace
from functools import reduce
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe_hpc import run_on_threads
from gpipe_hpc.checkpoint.in_memory import placement
from gpipe_hpc.checkpoint.in_memory.files import CopyFolder
from gpipe_hpc.checkpoint.in_memory.placement import find_place
from gpipe_hpc.config import compose_config
from gpipe_hpc.device.device import HostDevice
from gpipe_hpc.planner.forecast import RankForecast
from gpipe_hpc.preflight import memory_needs as looking
from gpipe_hpc.preflight.memory_needs import (
    KeptCopies,
    MemoryNeed,
    MemoryNeeds,
    own_memory_needs,
    probe_copies,
)

GB = 10**9


def room(rank, host, needed, free):
    return MemoryNeed(f"id of {host}", "memory", host, (rank, rank), needed, free)


def merged(rooms):
    return reduce(MemoryNeeds.merge, (MemoryNeeds((each,)) for each in rooms))


def test_ranks_of_one_host_share_its_memory():
    """Each rank for itself would have room; the least of what they saw free counts."""
    found = merged([room(k, "a", 6 * GB, 16 * GB - k) for k in range(3)]).lacking()
    (lacking,) = found
    assert (lacking.ranks, lacking.needed_bytes) == ((0, 2), 18 * GB)
    assert str(lacking).startswith(
        "memory of a: ranks 0-2 will need 18.0 GB more, but only 16.0 GB are free; "
    )


def test_the_host_in_the_midst_that_lacks_most_is_kept():
    hosts = [room(k, f"host{k // 2}", 3 * GB, 100 * GB) for k in range(20)]
    hosts[8] = hosts[8]._replace(free_bytes=5 * GB)
    hosts[12] = hosts[12]._replace(free_bytes=4 * GB)
    found = merged(hosts)
    assert len(found.kept) == 3
    assert [each.host for each in found.lacking()] == ["host6"]


HOSTS = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), min_size=1, max_size=8)


@given(HOSTS, st.lists(st.integers(0, 3), min_size=32, max_size=32), st.data())
def test_whatever_groups_merge_the_host_that_lacks_most_is_found(hosts, needs, data):
    """Levels merge ranks group by group: the result is that of all at once."""
    rooms = []
    for number, (ranks, free) in enumerate(hosts):
        for _ in range(ranks):
            rooms.append(room(len(rooms), str(number), needs[len(rooms)], free))
    cut = data.draw(st.integers(0, len(rooms)))
    parts = [MemoryNeeds((each,)) for each in rooms]
    ahead, behind = (
        reduce(MemoryNeeds.merge, half, MemoryNeeds()) for half in (parts[:cut], parts[cut:])
    )
    assert ahead.merge(behind).kept == reduce(MemoryNeeds.merge, parts).kept or len(hosts) > 3
    lacks = {}
    for each in rooms:
        lacks[each.host] = lacks.get(each.host, -each.free_bytes) + each.needed_bytes
    worst = max(lacks.values())
    found = [each.lack_bytes for each in ahead.merge(behind).lacking()]
    assert max(found, default=0) == max(worst, 0)


def test_what_nobody_tells_is_not_lacking():
    assert merged([room(0, "a", GB, None), room(1, "a", GB, None)]).lacking() == []
    assert str(merged([room(0, "a", 9 * GB, None), room(1, "a", GB, 5 * GB)]).lacking()[0])


PLANNED = RankForecast(
    stages=(0,),
    parameters=1,
    weight_bytes=100,
    cast_bytes=10,
    gradient_bytes=100,
    optimizer_bytes=200,
    workspace_bytes=0,
    process_bytes=0,
    activation_bytes=50,
    sent_bytes=7,
)


def test_what_a_rank_needs_is_what_it_does_not_have_yet():
    config = compose_config([])
    before, built = (
        own_memory_needs(config, HostDevice(), 3, PLANNED, is_built=is_built)
        for is_built in (False, True)
    )
    assert [each.needed_bytes for each in before] == [460]
    assert [each.needed_bytes for each in built] == [360]
    assert own_memory_needs(config, HostDevice(), 3, None, is_built=True) == ()


def kept(hosts, root):
    """Return what each rank's host is to keep, by what the run finds and by a probe."""
    folders = {host: root / host / "to" / "come" for host in hosts}
    configs = {
        host: compose_config(["checkpoint.neighbour_every=5", f"checkpoint.neighbour_dir={folder}"])
        for host, folder in folders.items()
    }
    for host in hosts:
        (root / host).mkdir(exist_ok=True)

    def body(world):
        host = hosts[world.rank]
        MACHINE.name = f"machine of {world.rank}"
        probed = probe_copies(configs[host], world)
        folder = CopyFolder(folders[host], "run")
        folder.open("now", world.rank)
        return probed, KeptCopies.at(find_place(world, folder, "now"))

    found = run_on_threads(len(hosts), body)
    assert not list(root.glob("*/.gpipe_hpc_*"))
    return found


MACHINE = threading.local()


@pytest.mark.parametrize(("hosts", "expected"), [("aa", 2), ("ab", 4), ("aab", 4), ("aba", 4)])
def test_states_are_kept_for_a_rank_and_for_one_elsewhere(hosts, expected, tmp_path):
    """Who shares a host is who sees the same files: ranks in containers of their own may."""
    assert kept(hosts, tmp_path) == [(KeptCopies(expected), KeptCopies(expected))] * len(hosts)
    without = compose_config([])
    assert run_on_threads(2, lambda world: probe_copies(without, world)) == [KeptCopies()] * 2


def test_a_folder_that_several_machines_share_keeps_each_state_once(tmp_path, monkeypatch):
    """Four copies were counted for it, each of them in the memory of one machine."""
    for module in (looking, placement):
        monkeypatch.setattr(module, "kernel_identity", lambda: MACHINE.name)
    shared = KeptCopies(2, is_shared=True)
    assert kept("aa", tmp_path) == [(shared, shared)] * 2
    words = ["checkpoint.neighbour_every=5", f"checkpoint.neighbour_dir={tmp_path}"]
    rooms = MemoryNeeds()
    for rank in range(2):
        MACHINE.name = f"machine of {rank}"
        memory, copies = own_memory_needs(
            compose_config(words), HostDevice(), rank, PLANNED, is_built=True, kept=shared
        )
        assert memory.needed_bytes == 360
        rooms = rooms.merge(MemoryNeeds((copies,)))
    assert [(each.ranks, each.needed_bytes) for each in rooms.kept] == [((0, 1), 1200)]


def test_copies_of_states_need_memory_backed_room(tmp_path):
    """They are of weights and optimizer; those files take the host's memory."""
    folder = tmp_path / "to come"
    words = ["checkpoint.neighbour_every=5", f"checkpoint.neighbour_dir={folder}"]
    memory, copies = own_memory_needs(
        compose_config(words), HostDevice(), 0, PLANNED, is_built=True, kept=KeptCopies(2)
    )
    assert (memory.what, memory.needed_bytes) == ("memory", 360 + 600)
    assert (copies.what, copies.needed_bytes) == (str(folder), 600)
    assert copies.free_bytes > 0


def test_what_is_offloaded_needs_room_on_the_host():
    """Nobody looked whether the host has it."""
    device = SimpleNamespace(
        is_accelerator=True, identity="gpu", name="some GPU", memory_free=lambda: 10**12
    )
    planned = replace(PLANNED, offloaded_bytes=3000, is_on_device=True)
    on_device, on_host = own_memory_needs(compose_config([]), device, 0, planned, is_built=False)
    assert on_device.needed_bytes == planned.total_bytes == PLANNED.total_bytes
    assert on_host.needed_bytes == planned.saving_bytes + 3000
