"""Levels of groups of processes: real sums over Gloo, groups formed by their members alone."""

import os
import re
from operator import add

import pytest
import torch

from gpipe_hpc import Pipeline
from gpipe_hpc.comm.collectives.tree_group import TreeGroup
from gpipe_hpc.comm.net.secret import Secret
from gpipe_hpc.comm.world import processes as processes_module
from gpipe_hpc.comm.world.processes import ProcessWorld
from gpipe_hpc.comm.world.source import own_source
from gpipe_hpc.comm.world.world import collective_errors
from gpipe_hpc.device.device import HostDevice
from gpipe_hpc.errors import ConfigError, LaunchError, PeerError
from tests.support import batches, gradients_of, linears, mean_square


def narrow_world(width=2, **options) -> ProcessWorld:
    return ProcessWorld(HostDevice(), 60.0, width=width, **options)


def num_sockets() -> int:
    names = (f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd"))
    return sum(os.path.islink(n) and os.readlink(n).startswith("socket:") for n in names)


def test_sums_and_objects_go_through_levels(processes, tmp_path):
    def body(rank):
        world = narrow_world()
        everybody = world.world_group
        assert isinstance(everybody, TreeGroup)
        total, greatest = torch.tensor([rank]), torch.tensor([-rank, rank])
        everybody.all_reduce(total)
        everybody.all_reduce_max(greatest)
        brought = torch.tensor([rank])
        everybody.broadcast(brought, 3)
        return (
            total.item(),
            greatest.tolist(),
            brought.item(),
            everybody.merge_object([rank], add),
            everybody.broadcast_object("three" if rank == 3 else None, 3),
            everybody.gather_object(rank, 4),
        )

    found = processes(5, body, tmp_path)
    ranks = list(range(5))
    whole = (10, [0, 4], 3, ranks, "three")
    assert found == [(*whole, ranks if rank == 4 else None) for rank in ranks]


def test_training_through_levels_has_the_same_bits(processes, tmp_path):
    data = batches(2, 8)

    def body(rank):
        found = []
        for width in (2, 8):
            world = narrow_world(width)
            pipe = Pipeline(linears(4), mean_square, stages=2, replicas=2, world=world)
            for inputs, targets in data:
                part = pipe.share(8)
                loss = pipe.step(inputs[part].float(), targets[part].float()).loss
            found.append((loss, {n: g.tolist() for n, g in gradients_of(pipe).items()}))
        return found

    for through_levels, flat in processes(4, body, tmp_path):
        assert through_levels == flat


def test_a_rank_needs_nobody_but_the_members_to_form_a_group(processes, tmp_path):
    """torch names a group after how many the process has: ranks with unequal numbers never met."""

    def body(rank):
        world = narrow_world()
        for _ in range(rank + 1 if rank in (0, 1) else 0):
            world.group([(rank,)])
        first = world.group([(0, 1), (2, 3)])
        for _ in range(2 if rank in (0, 1) else 0):
            world.group([(0, 1)])
        across = world.group([(0, 2), (1, 3)])
        total = torch.tensor([float(rank)])
        across.all_reduce(total)
        return first.ranks, total.item()

    found = processes(4, body, tmp_path)
    assert found == [((0, 1), 2.0), ((0, 1), 4.0), ((2, 3), 2.0), ((2, 3), 4.0)]


@pytest.mark.parametrize("stranger", [0, 2, 3])
def test_a_stranger_in_any_level_is_refused_on_all_ranks(processes, tmp_path, stranger):
    def body(rank):
        key = b"another" if rank == stranger else b"the secret of all"
        with pytest.raises(LaunchError, match="do not share a secret") as caught:
            narrow_world(job_secret=Secret(key, "a test"))
        return str(caught.value)

    found = processes(4, body, tmp_path)
    for rank, text in enumerate(found):
        assert rank == stranger or f"rank {stranger} a different one or none;" in text


def test_other_source_lines_in_any_level_are_named_on_all_ranks(processes, tmp_path, monkeypatch):
    def body(rank):
        own = own_source()
        mine = own._replace(digest="f" * 64, folder="/other") if rank == 3 else own
        monkeypatch.setattr(processes_module, "own_source", lambda: mine)
        with pytest.raises(LaunchError, match="different source code") as caught:
            narrow_world()
        return str(caught.value)

    for text in processes(5, body, tmp_path):
        assert "rank 3 /other" in text


def test_a_failure_reaches_ranks_that_wait_in_other_levels(processes, tmp_path):
    def body(rank):
        world = narrow_world()
        try:
            with collective_errors(world, "adding up"):
                if rank == 3:
                    raise ConfigError("rank 3: of its own")
                world.world_group.all_reduce(torch.ones(1))
        except (ConfigError, PeerError) as error:
            return type(error).__name__, str(error)
        return "went on", ""

    found = processes(5, body, tmp_path)
    assert [kind for kind, _ in found] == [*["PeerError"] * 3, "ConfigError", "PeerError"]
    assert all(re.search(r"rank 3( on \S+)?: of its own", text) for _, text in found)


def test_sockets_of_a_rank_do_not_grow_with_the_world(processes, tmp_path):
    """Each rank was connected with all others: two full meshes of the world, and the user's own."""

    def body(rank):
        before = num_sockets()
        world = narrow_world()
        after = num_sockets()
        world.world_group.all_gather_object("counted")
        return after - before

    found = []
    for number in (4, 12):
        folder = tmp_path / str(number)
        folder.mkdir()
        found.append(processes(number, body, folder))
    few, many = found
    # One more level, with one other rank; its group listens at an address of its own; and of the
    # watchers two more neighbours each, in a process of their own.
    assert max(many) <= max(few) + 2 * 4
