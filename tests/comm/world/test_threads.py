"""Ranks as threads: results, failures and collectives."""

import threading

import pytest
import torch

from gpipe_hpc.comm.collectives.group import SoloGroup
from gpipe_hpc.comm.transport.base import PlacedChannel
from gpipe_hpc.comm.world.threads import run_on_threads
from gpipe_hpc.comm.world.world import collective_errors
from gpipe_hpc.device.device import HostDevice
from gpipe_hpc.errors import ConfigError, LaunchError, PeerError
from gpipe_hpc.schedule import Channel

CHANNEL = PlacedChannel(Channel(0, 1, 0), 0, 1, tag=0)


def everybody(world):
    return world.group([tuple(range(world.size))])


def test_results_come_in_rank_order():
    assert run_on_threads(3, lambda world: (world.rank, world.size)) == [(0, 3), (1, 3), (2, 3)]


def test_collectives():
    def body(world):
        group = everybody(world)
        tensor = torch.tensor([float(world.rank + 1)])
        group.all_reduce(tensor)
        root = torch.tensor([float(world.rank)])
        group.broadcast(root, 2)
        return tensor.item(), root.item(), group.all_gather_object(f"from {world.rank}")

    words = ["from 0", "from 1", "from 2"]
    assert run_on_threads(3, body) == [(6.0, 2.0, words)] * 3


def test_the_greatest_and_what_one_rank_gathers_or_tells():
    def body(world):
        group = everybody(world)
        most = torch.tensor([float(world.rank), -float(world.rank)])
        group.all_reduce_max(most)
        gathered = group.gather_object(f"from {world.rank}", 1)
        return most.tolist(), gathered, group.broadcast_object(f"from {world.rank}", 2)

    words = ["from 0", "from 1", "from 2"]
    expected = [([2.0, 0.0], words if rank == 1 else None, "from 2") for rank in range(3)]
    assert run_on_threads(3, body) == expected
    assert SoloGroup(0).gather_object("own", 0) == ["own"]
    assert SoloGroup(0).broadcast_object("own", 0) == "own"


def test_sums_are_taken_in_rank_order_whoever_comes_first():
    values = [1e16, 1.0, -1e16, 1.0]

    def body(world):
        group = everybody(world)
        tensor = torch.tensor(values[world.rank], dtype=torch.float64)
        group.all_reduce(tensor)
        return tensor.item()

    expected = ((values[0] + values[1]) + values[2]) + values[3]
    for _ in range(5):
        assert run_on_threads(4, body) == [expected] * 4


def test_started_reduction_waits_for_nobody_and_lands_at_wait():
    gate = threading.Event()

    def body(world):
        group = everybody(world)
        tensor = torch.ones(2)
        if world.rank == 1:
            assert gate.wait(20)  # rank 0 comes here first only if starting does not block
        pending = group.start_all_reduce(tensor)
        if world.rank == 0:
            assert tensor.tolist() == [1.0, 1.0]
            gate.set()
        pending.wait()
        return tensor.tolist()

    assert run_on_threads(2, body) == [[2.0, 2.0]] * 2


def test_groups_over_the_same_ranks_do_not_mix():
    def body(world):
        one, other = everybody(world), everybody(world)
        groups = [one, other] if world.rank == 0 else [other, one]
        names = {id(one): "one", id(other): "other"}
        contributed = [(g, torch.tensor(1.0 if g is one else 10.0)) for g in groups]
        pending = [(g, t, g.start_all_reduce(t)) for g, t in contributed]
        for _, _, work in pending:
            work.wait()
        return {names[id(g)]: t.item() for g, t, _ in pending}

    assert run_on_threads(2, body) == [{"one": 2.0, "other": 20.0}] * 2


def test_each_rank_is_in_the_group_that_holds_it():
    def body(world):
        group = world.group([(0, 2), (1, 3)])
        return group.ranks, group.all_gather_object(world.rank)

    assert run_on_threads(4, body) == [((0, 2), [0, 2]), ((1, 3), [1, 3])] * 2


def test_the_failure_is_raised_not_what_it_caused():
    messages = {}

    def body(world):
        try:
            with collective_errors(world, "a test"):
                if world.rank == 2:
                    raise ZeroDivisionError("the cause")
                everybody(world).all_gather_object(None)
        except PeerError as error:
            messages[world.rank] = str(error)
            raise

    with pytest.raises(ZeroDivisionError, match="the cause"):
        run_on_threads(3, body)
    assert messages.keys() == {0, 1}
    assert all("rank 2: a test: ZeroDivisionError: the cause" in m for m in messages.values())


class Elsewhere(HostDevice):
    """Stands for an accelerator."""

    is_accelerator = True


def test_a_device_that_cannot_be_had_is_the_failure():
    """It was lost with its thread: what ran came back with no results, and without an error."""

    def device(rank):
        if rank == 1:
            raise ConfigError("no such device")
        return HostDevice()

    with pytest.raises(ConfigError, match="no such device"):
        run_on_threads(2, lambda world: world.world_group.all_gather_object(1), device=device)


def test_a_block_that_nothing_broke_off_ends_with_the_news_of_a_failure():
    """After an abort an accelerator's sums may hold anything: the optimizer stepped by them."""
    told, has_failed = {}, threading.Event()

    def body(world):
        if world.rank == 1:
            with collective_errors(world, "a test"):
                raise ZeroDivisionError("the cause")
        with collective_errors(world, "what a CPU does is done or fails"):
            assert has_failed.wait(20)
        world.device = Elsewhere()
        with pytest.raises(PeerError) as caught, collective_errors(world, "a step"):
            assert has_failed.wait(20)
        told[world.rank] = str(caught.value)
        with collective_errors(world, "a step after the failure"):
            pass  # a rank that has raised the failure does not raise it again

    def fails(world):
        try:
            body(world)
        finally:
            if world.rank == 1:
                has_failed.set()

    with pytest.raises(ZeroDivisionError, match="the cause"):
        run_on_threads(3, fails)
    assert told == dict.fromkeys((0, 2), "rank 1: a test: ZeroDivisionError: the cause")


def test_silence_ends_in_a_timeout_that_says_who_is_missing():
    def body(world):
        if world.rank == 0:
            with pytest.raises(TimeoutError, match=r"ranks 0, 1 within 0\.2 s"):
                everybody(world).all_gather_object(None)

    run_on_threads(2, body, timeout_s=0.2)


def test_messages_arrive_in_order_and_cut_off_from_the_graph():
    def body(world):
        transport = world.transport([CHANNEL])
        if world.rank == 0:
            weight = torch.ones(2, requires_grad=True)
            for microbatch in range(3):
                nest = {"x": weight * microbatch, "none": None}
                transport.send(CHANNEL, "training", microbatch, nest, 5)
            transport.finish()
            return None
        got = []
        for microbatch in range(3):
            transport.post(CHANNEL, "training", microbatch)
            nest, num_samples = transport.wait(CHANNEL, "training", microbatch)
            assert num_samples == 5 and nest["none"] is None
            assert nest["x"].is_leaf and nest["x"].requires_grad
            got.append(nest["x"].tolist())
        transport.finish()
        return got

    assert run_on_threads(2, body)[1] == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]


def test_a_message_that_nobody_took_is_an_error():
    def body(world):
        transport = world.transport([CHANNEL])
        if world.rank == 0:
            transport.send(CHANNEL, "training", 0, torch.ones(1), 1)

    with pytest.raises(LaunchError, match="before all messages were received"):
        run_on_threads(2, body)


def test_a_post_that_was_not_consumed_is_an_error():
    def body(world):
        transport = world.transport([CHANNEL])
        if world.rank == 1:
            transport.post(CHANNEL, "training", 0)
            transport.finish()

    with pytest.raises(AssertionError, match="never consumed"):
        run_on_threads(2, body)
