"""Which interface each library below torch.distributed is told to listen on."""

import os
import socket

import pytest

from gpipe_hpc.comm.joining.interfaces import follow_gloo, keep_local

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

    keep_local()
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
