"""Groups that their members form alone."""

from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as torch_groups

from gpipe_hpc.comm.net.reachability import listening
from gpipe_hpc.comm.watchdog.store_exchange import StoreExchange
from gpipe_hpc.comm.world import group_factory
from gpipe_hpc.comm.world.group_factory import ProcessGroupFactory
from gpipe_hpc.errors import LaunchError


def test_members_alone_form_a_group_whatever_others_they_have(processes, tmp_path):
    def body(rank):
        former = ProcessGroupFactory("mine", timedelta(seconds=30), "gloo")
        total = torch.ones(1)
        if rank > 0:
            for _ in range(rank - 1):
                former.form((rank,))  # the ranks need not have formed as many
            dist.all_reduce(total, group=former.form((1, 2)))
        return total.item()

    assert processes(3, body, tmp_path) == [1, 2, 2]


def test_a_group_is_not_split_off_from_one_that_its_user_bound_to_a_device(processes, tmp_path):
    """NCCL would have all ranks of the world take part in that; only the members come."""
    device = torch.device("cuda", 0)

    def body(rank):
        default, seen = torch_groups._get_default_group(), []
        default.bound_device_id = device
        form = torch_groups._new_process_group_helper

        def spy(*args, **kwargs):
            seen.append((default.bound_device_id, kwargs.get("device_id")))
            return form(*args, **kwargs)

        torch_groups._new_process_group_helper = spy
        group = ProcessGroupFactory("mine", timedelta(seconds=30), "gloo").form((0, 1))
        total = torch.ones(1)
        dist.all_reduce(total, group=group)
        return total.item(), seen, default.bound_device_id == device

    assert processes(2, body, tmp_path) == [(2, [(None, None)], True)] * 2


def test_who_never_came_is_named_by_those_that_wait_for_others_too(processes, tmp_path):
    """Rank 1 waits for rank 3, which waits for rank 2, and named rank 3."""

    def body(rank):
        if rank == 2:
            return None
        board = StoreExchange(torch_groups._get_default_store(), rank, 2.0 if rank == 3 else 1.0)

        def exchange(what, text, ranks):
            board.publish(what, text)
            return {**board.collect(what, set(ranks) - {rank}), rank: text}

        former = ProcessGroupFactory(
            "mine", timedelta(seconds=30), "gloo", exchange, absent=board.absent
        )
        with pytest.raises(TimeoutError) as caught:
            former.form((0, 1, 2, 3), "xpu:xccl")
        return str(caught.value).rpartition(": ")[2]

    expected = "timed out waiting for rank 2"
    assert processes(4, body, tmp_path) == [expected, expected, None, expected]


@contextmanager
def closed(address, backlog):
    """Be a rank whose ports are closed to the others."""
    with listening(address, backlog) as place:
        yield place._replace(port=1)


@pytest.mark.parametrize("how", ["closed", "open"])
def test_a_rank_that_is_not_reached_is_named_on_all_members(processes, tmp_path, how):
    """Gloo tried for minutes, and showed a traceback of connectFullMesh that named no rank."""

    def body(rank):
        store = torch_groups._get_default_store()
        board = StoreExchange(store, rank, 20.0)

        def exchange(what, text, ranks):
            board.publish(what, text)
            return {**board.collect(what, set(ranks) - {rank}), rank: text}

        if how == "closed" and rank == 0:
            group_factory.listening = closed
        address = f"127.0.0.{2 + rank}"
        former = ProcessGroupFactory(
            "mine", timedelta(seconds=60), "gloo", exchange, address, reach_s=2.0
        )
        total = torch.ones(1)
        try:
            dist.all_reduce(total, group=former.form((0, 1, 2)))
        except LaunchError as error:
            return str(error)
        return total.item()

    told = processes(3, body, tmp_path)
    if how == "open":
        assert told == [3, 3, 3]
        return
    assert told[0] == told[1] == told[2]
    assert "launch: rank 1 on " in told[0] and "(127.0.0.3) cannot reach rank 0 on " in told[0]
    assert "which listens at 127.0.0.2:1" in told[0] and "Connection refused" in told[0]
    assert "net.ipv4.ip_local_port_range" in told[0] and "comm.interface" in told[0]
