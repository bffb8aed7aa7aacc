"""What real ranks ask the store for, connect with and keep open, counted in worlds of 8 and 16."""

import itertools
import os
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from experiments.scale.startup.ranks import layers, mean_square
from gpipe_hpc import Pipeline
from gpipe_hpc.comm.collectives.bruck import partners
from gpipe_hpc.comm.collectives.plan import PlanPosition
from gpipe_hpc.comm.net.gloo import default_group_settings
from gpipe_hpc.comm.world.processes import ProcessWorld
from gpipe_hpc.device.device import HostDevice

LIMIT_S = 120.0
MESHED = 4


class CountingStore(Store):
    """A store that notes which keys this rank reads, waits for or writes."""

    def __init__(self, path, size):
        super().__init__()
        self._store = dist.FileStore(str(path), size)
        self._store.set_timeout(timedelta(seconds=LIMIT_S))
        self.keys = set()

    def set(self, key, value):
        self.keys.add(key)
        self._store.set(key, value)

    def get(self, key):
        self.keys.add(key)
        return self._store.get(key)

    def add(self, key, amount):
        self.keys.add(key)
        return self._store.add(key, amount)

    def check(self, keys):
        self.keys.update(keys)
        return self._store.check(keys)

    def wait(self, keys, timeout=None):
        self.keys.update(keys)
        self._store.wait(keys, *([] if timeout is None else [timeout]))

    def compare_set(self, key, expected, desired):
        self.keys.add(key)
        return self._store.compare_set(key, expected, desired)

    def delete_key(self, key):
        return self._store.delete_key(key)

    def set_timeout(self, timeout):
        self._store.set_timeout(timeout)

    def has_extended_api(self):
        return False

    def clone(self):
        return self


def started(size, folder, rank):
    """Join and build; return keys, the largest mesh, connections of wide groups, sockets."""
    dist.destroy_process_group()
    store, meshes, gloo = CountingStore(folder / "keys", size), [], dist.ProcessGroupGloo
    with default_group_settings():
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)

    class Seen(gloo):
        def __init__(self, store, rank, size, *rest, **named):
            meshes.append(size)
            super().__init__(store, rank, size, *rest, **named)

    dist.ProcessGroupGloo = Seen
    world = ProcessWorld(HostDevice(), LIMIT_S, meshed=MESHED, width=4)
    Pipeline(
        layers(2),
        mean_square,
        stages=2,
        replicas=size // 2,
        microbatches=2,
        partition="uniform",
        schedule="gpipe",
        world=world,
    )
    num_sockets = sum(map(is_socket, os.listdir("/proc/self/fd")))
    near = sum(pairs.num_connected for pairs in world._wide_pairs)
    world.world_group.all_gather_object("counted")
    return len(store.keys), len(meshes), max(meshes), near, num_sockets


def is_socket(number):
    try:
        return os.readlink(f"/proc/self/fd/{number}").startswith("socket:")
    except OSError:
        return False


@pytest.mark.slow
def test_real_ranks_start_with_what_their_levels_need(processes, tmp_path):
    """Only simulated ranks were counted, whose groups asked the store for nothing."""
    found = {}
    for size in (4, 8, 16):
        folder = tmp_path / str(size)
        folder.mkdir()
        found[size] = processes(size, lambda r, n=size, f=folder: started(n, f, r), folder, LIMIT_S)
    keys, groups, largest, near, sockets = (
        [[rank[i] for rank in ranks] for ranks in found.values()] for i in range(5)
    )
    # Twice the ranks are half a level: a group of four for the start, one for the steps, and the
    # copies of a stage, which at 16 ranks are eight, too many for a mesh of four. That is 26 keys;
    # who waits long for another looks at a few more. A group of four that sums in shared memory has
    # two sockets, each twice, to and from three others.
    assert max(keys[0]) <= 40
    for what, most in ((keys, 36), (groups, 6), (sockets, 20)):
        assert all(max(more) - max(less) <= most for less, more in itertools.pairwise(what)), what
    assert max(map(max, largest)) == MESHED
    assert near[-1] == [len(partners(PlanPosition(8, 0)))] * 16
