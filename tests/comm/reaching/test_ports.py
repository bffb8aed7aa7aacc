"""Ports from a range: for our own sockets, and for those of Gloo."""

import contextlib
import os
import socket

import pytest
import torch
import torch.distributed as dist

from gpipe_hpc.comm.reaching.doors import Doors, through
from gpipe_hpc.comm.reaching.ports import Ports, listen
from gpipe_hpc.errors import ConfigError


def free_range(size):
    """Return ports that nobody has, below those that the kernel gives to connections."""
    for first in range(21_000 + os.getpid() % 7000, 31_000, size):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + size):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return Ports(first, first + size - 1)
    raise AssertionError("no free range")


@pytest.mark.parametrize("text", ["29600", "29699-29600", "0-5", "1-70000", "a-b", "296:299", ""])
def test_what_is_no_range_is_refused(text):
    with pytest.raises(ConfigError, match=r"comm.ports: expected a range as 29600-29699"):
        Ports.parsed(text)


def test_a_range_is_read():
    ports = Ports.parsed("29600-29699")
    assert (ports.first, ports.last, len(ports)) == (29600, 29699, 100)
    assert 29699 in ports and 29700 not in ports and Ports.parsed(None) is None
    assert sorted(ports.in_turn()) == list(range(29600, 29700))


def test_a_range_that_is_too_small_says_how_many_are_needed():
    Ports(29600, 29612).check_room(4, serves=True)
    with pytest.raises(ConfigError, match=r"at least 13 ports \(3 for each of the 4 ranks.*got 12"):
        Ports(29600, 29611).check_room(4, serves=True)


def test_our_sockets_take_what_is_free_of_the_range():
    ports = free_range(2)
    with listen("127.0.0.1", ports, 1) as one, listen("127.0.0.1", ports, 1) as other:
        assert {each.getsockname()[1] for each in (one, other)} == {ports.first, ports.last}
        with pytest.raises(OSError, match=f"comm.ports={ports}: expected a free port"):
            listen("127.0.0.1", ports, 1)


def test_gloo_listens_on_a_port_of_the_range_and_all_groups_share_it():
    """It has no setting for that: the kernel gave it any."""
    ports = free_range(2)
    doors = Doors("127.0.0.1", ports)
    eager, lazy = doors.open(lazily=False), doors.open(lazily=True)
    assert {eager.port, lazy.port} == {ports.first, ports.last}
    assert doors.open(lazily=False) is eager
    socket.create_connection(("127.0.0.1", eager.port), 5).close()
    with pytest.raises(ConfigError, match=r"expected a free port on .*, got none of 2"):
        Doors("127.0.0.1", ports).open(lazily=False)


def test_behind_it_gloo_listens_on_any_port_again():
    ports = free_range(2)
    kept = Doors("127.0.0.1", ports).open(lazily=False)
    others = [Doors("127.0.0.1").open(lazily=False) for _ in range(4)]
    assert kept.port in ports and not any(each.port in ports for each in others)
    assert len({each.port for each in others}) == 4


def test_where_gloo_listens_is_known_also_without_a_range():
    door = Doors("127.0.0.1").open(lazily=False)
    assert door.address == "127.0.0.1"
    socket.create_connection(("127.0.0.1", door.port), 5).close()


def test_a_group_made_through_a_door_listens_nowhere_else(processes, tmp_path):
    ports = free_range(4)

    def body(rank):
        doors = Doors("127.0.0.1", ports)
        before = own_listeners()
        door, total = doors.open(lazily=False), torch.ones(1)
        with through(door):
            groups = [dist.new_group([0, 1]) for _ in range(3)]
        for group in groups:
            dist.all_reduce(total, group=group)
        return total.item(), own_listeners() - before == {door.port}, door.port in ports

    assert processes(2, body, tmp_path) == [(8.0, True, True)] * 2


def own_listeners():
    """Return the ports on which this process listens."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as seen:
                    if seen.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        found.add(seen.getsockname()[1])
    return found
