"""Whether a rank is reached where it listens: addresses of loopback play the hosts."""

import socket
import time

import pytest

from gpipe_hpc.comm.net.reachability import ListenAddress, calls, unanswered
from tests.support import mute, patience


def test_who_is_not_reached_is_told_with_the_reason():
    with socket.create_server(("127.0.0.2", 0)) as there, mute("127.0.0.3") as silent:
        with socket.create_server(("127.0.0.2", 0)) as gone:
            refused = gone.getsockname()[1]
        places = {
            1: ListenAddress("one", *there.getsockname()),
            2: ListenAddress("two", "127.0.0.2", refused),
            5: ListenAddress("three", *silent),
        }
        began_s = time.monotonic()
        found = unanswered(places, 1.0)
        assert found == {2: "Connection refused", 5: "no answer within 1 s"}
        assert 0.9 < time.monotonic() - began_s < 10.0 * patience()


def test_of_two_ranks_one_calls_as_in_gloo():
    low, high = ListenAddress("a", "10.0.0.9", 5), ListenAddress("b", "10.0.0.10", 5)
    assert calls(high, low) and not calls(low, high)
    assert not calls(low, low._replace(port=7)), "on one host"


@pytest.mark.parametrize(
    "place", [ListenAddress("a", "10.0.0.9", 5), ListenAddress("b", "fe80::1", 70)]
)
def test_a_place_is_read_as_it_was_told(place):
    assert ListenAddress.parsed(place.encoded()) == place


def test_an_address_of_version_6_is_shown_in_brackets():
    assert str(ListenAddress("b", "fd00::1", 70)) == "[fd00::1]:70"
