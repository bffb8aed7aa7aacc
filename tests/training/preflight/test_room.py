"""Whether memory has room for what its ranks are planned to hold."""

from functools import reduce

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe_hpc import run_on_threads
from gpipe_hpc.comm.device import HostDevice
from gpipe_hpc.config import compose_config
from gpipe_hpc.planning.forecast import RankForecast
from gpipe_hpc.training.preflight.room import Room, Rooms, count_copies, own_rooms

GB = 10**9


def room(rank, host, needed, free):
    return Room(f"id of {host}", "memory", host, (rank, rank), needed, free)


def merged(rooms):
    return reduce(Rooms.then, (Rooms((each,)) for each in rooms))


def test_ranks_of_one_host_share_its_memory():
    """Each rank for itself would have room; the least of what they saw free counts."""
    found = merged([room(k, "a", 6 * GB, 16 * GB - k) for k in range(3)]).lacking()
    (lacking,) = found
    assert (lacking.ranks, lacking.needed_bytes) == ((0, 2), 18 * GB)
    assert str(lacking).startswith(
        "memory of a: expected room for the 18.0 GB more that ranks 0-2 are planned to hold, got "
        "16.0 GB free; "
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
    parts = [Rooms((each,)) for each in rooms]
    ahead, behind = (reduce(Rooms.then, half, Rooms()) for half in (parts[:cut], parts[cut:]))
    assert ahead.then(behind).kept == reduce(Rooms.then, parts).kept or len(hosts) > 3
    lacks = {}
    for each in rooms:
        lacks[each.host] = lacks.get(each.host, -each.free_bytes) + each.needed_bytes
    worst = max(lacks.values())
    found = [each.lack_bytes for each in ahead.then(behind).lacking()]
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
        own_rooms(config, HostDevice(), 3, PLANNED, is_built=is_built) for is_built in (False, True)
    )
    assert [each.needed_bytes for each in before] == [460]
    assert [each.needed_bytes for each in built] == [360]
    assert own_rooms(config, HostDevice(), 3, None, is_built=True) == ()


@pytest.mark.parametrize(("hosts", "expected"), [("aa", 2), ("ab", 4), ("aab", 4), ("aba", 4)])
def test_states_are_kept_for_a_rank_and_for_one_elsewhere(hosts, expected):
    """Copies on the rank's own host, too, were not counted."""
    without, copied = (compose_config(each) for each in ([], ["checkpoint.neighbour_every=5"]))

    def body(world):
        host = hosts[world.rank]
        return count_copies(without, world, host), count_copies(copied, world, host)

    assert run_on_threads(len(hosts), body) == [(0, expected)] * len(hosts)


def test_copies_of_states_need_memory_backed_room(tmp_path):
    """They are of weights and optimizer; those files take the host's memory."""
    folder = tmp_path / "to come"
    words = ["checkpoint.neighbour_every=5", f"checkpoint.neighbour_dir={folder}"]
    memory, copies = own_rooms(
        compose_config(words), HostDevice(), 0, PLANNED, is_built=True, num_copies=2
    )
    assert (memory.what, memory.needed_bytes) == ("memory", 360 + 600)
    assert (copies.what, copies.needed_bytes) == (str(folder), 600)
    assert copies.free_bytes > 0
