"""Which network interfaces this machine has, and which leads where."""

import socket

import pytest

from gpipe_hpc.comm.net.addresses import (
    address_of,
    address_towards,
    holder_of,
    is_loopback,
    own_interfaces,
)


def test_the_loopback_interface_is_found_by_name_and_by_address():
    found = holder_of("127.0.0.1")
    assert found is not None and found.name in {name for _, name in socket.if_nameindex()}
    assert address_of(found.name) == found.address == "127.0.0.1"
    assert holder_of("192.0.2.77") is None and address_of("no such") == ""


def test_each_address_can_be_listened_on():
    """A wrong reading of the kernel's structures would give addresses of nobody."""
    for name, address in own_interfaces():
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family) as own:
            own.bind((address, 0))
        assert name


def test_packets_leave_by_the_interface_that_leads_there():
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert address_towards("no.such.host.invalid") == address_towards("") == ""


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("127.0.1.1", True),
        ("localhost", True),
        ("::1", True),
        ("10.0.0.1", False),
        ("node0", False),
    ],
)
def test_what_means_this_machine_on_any_machine(text, is_one):
    assert is_loopback(text) is is_one
