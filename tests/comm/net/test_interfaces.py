"""Which interface each library below torch.distributed is told to listen on."""

import os
import socket

import pytest

from gpipe_hpc.comm.net import interfaces
from gpipe_hpc.comm.net.addresses import Interface
from gpipe_hpc.comm.net.interfaces import (
    follow_gloo,
    listen_on,
    listen_on_loopback,
    refuse_loopback,
    requested_interface,
)
from gpipe_hpc.errors import ConfigError

OTHERS = ("NCCL_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME", "CCL_KVS_IFACE", "FI_TCP_IFACE")


@pytest.fixture(autouse=True)
def _nothing_is_said(monkeypatch):
    # Also what a test sets is gone after it.
    for variable in ("GLOO_SOCKET_IFNAME", *OTHERS):
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)


def said(environ):
    return [environ.get(variable) for variable in OTHERS]


def test_on_one_machine_all_listen_on_loopback():
    """Gloo alone did: the first message over NCCL opened a port to the network."""

    listen_on_loopback()
    lo = os.environ["GLOO_SOCKET_IFNAME"]
    assert lo in {name for _, name in socket.if_nameindex()}
    assert said(os.environ) == [f"={lo}", f"={lo}", lo, lo]


def test_over_machines_all_listen_where_gloo_is_told_to(monkeypatch):

    follow_gloo()
    assert said(os.environ) == [None] * 4
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0,ib1")
    monkeypatch.setenv("HCCL_SOCKET_IFNAME", "^docker")
    follow_gloo()
    assert said(os.environ) == ["=ib0,ib1", "^docker", "ib0", "ib0"]


THERE = [
    Interface("lo", "127.0.0.1"),
    Interface("eth0", "10.1.0.7"),
    Interface("ib0", "192.168.4.7"),
    Interface("ib0", "fd00::7"),
]


@pytest.fixture
def _there(monkeypatch):
    monkeypatch.setattr(interfaces, "own_interfaces", lambda: THERE)
    addresses = dict(reversed(THERE))
    monkeypatch.setattr(interfaces, "address_of", lambda name: addresses.get(name, ""))


@pytest.mark.usefixtures("_there")
@pytest.mark.parametrize(
    ("wanted", "found"),
    [("ib0", 2), ("192.168.0.0/16", 2), ("10.1.0.7/24", 1), ("fd00::/8", 3), ("10.1.0.7", 1)],
)
def test_an_interface_is_found_by_its_name_or_a_subnet(wanted, found):
    assert requested_interface(wanted) == THERE[found]


@pytest.mark.usefixtures("_there")
@pytest.mark.parametrize("wanted", ["ib1", "172.16.0.0/12"])
def test_one_that_is_not_there_is_named_with_those_that_are(wanted):
    with pytest.raises(ConfigError, match=rf"comm.interface.*got '{wanted}'.*eth0 \(10.1.0.7\)"):
        requested_interface(wanted)


@pytest.mark.usefixtures("_there")
def test_without_a_wish_gloo_s_variable_counts(monkeypatch):
    assert requested_interface(None) is None
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no_such,ib0")
    assert requested_interface(None) == THERE[2]


def test_all_listen_on_the_chosen_one(monkeypatch):
    monkeypatch.setenv("HCCL_SOCKET_IFNAME", "^docker")
    listen_on(THERE[2])
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0"
    assert said(os.environ) == ["=ib0", "^docker", "ib0", "ib0"]


def test_loopback_is_refused_where_others_are_on_other_hosts():
    refuse_loopback(THERE[1], 3, "remedy")
    with pytest.raises(
        ConfigError, match=r"rank 3 on .* would listen on the loopback interface lo .*; choose"
    ):
        refuse_loopback(THERE[0], 3, "choose another")
