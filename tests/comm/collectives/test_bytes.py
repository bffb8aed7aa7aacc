"""What ranks really send, counted by their groups: what the plans say."""

from collections import defaultdict

import pytest
import torch

from gpipe_hpc.comm.collectives.direct import rank_order_all_reduce
from gpipe_hpc.comm.collectives.hierarchy import hierarchical_all_reduce
from gpipe_hpc.comm.collectives.plan import PlanPosition, even_counts
from gpipe_hpc.comm.collectives.planned import (
    start_all_gather,
    start_ordered_all_reduce,
    start_reduce_scatter,
    start_ring_all_reduce,
)
from gpipe_hpc.comm.collectives.ring import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from gpipe_hpc.comm.world.start import start_world
from gpipe_hpc.comm.world.threads import run_on_threads
from tests.comm.collectives.fitting_plans import num_messages, num_sent

COUNT = 5047  # odd, so that shards differ in length


def cases(size):
    """Return by name what starts an algorithm, and the plan of the rank at a position."""
    counts = even_counts(COUNT, size)
    return {
        "ring": (start_ring_all_reduce, lambda i: ring_all_reduce(PlanPosition(size, i), COUNT)),
        "rank_order": (
            start_ordered_all_reduce,
            lambda i: rank_order_all_reduce(PlanPosition(size, i), COUNT),
        ),
        "reduce_scatter": (
            start_reduce_scatter,
            lambda i: ring_reduce_scatter(PlanPosition(size, i), counts),
        ),
        "all_gather": (start_all_gather, lambda i: ring_all_gather(PlanPosition(size, i), counts)),
    }


@pytest.mark.parametrize("hosts", [[0, 0, 1, 1], [0, 1, 0, 1], [0, 0, 0, 1, 1], [0, 1, 2]])
def test_a_hierarchical_sum_crosses_between_hosts_once_for_each(hosts):
    """2 (H-1)/H of the vector leave each host, however many ranks it has."""
    size, count = len(hosts), 12 * 5
    leaving = defaultdict(int)
    for position in range(size):
        plan = hierarchical_all_reduce(PlanPosition(size, position), count, hosts)
        for step in plan:
            for move in step.sends:
                if hosts[move.peer] != hosts[position]:
                    leaving[hosts[position]] += move.span.length
    num_hosts = len(set(hosts))
    assert set(leaving.values()) == {2 * count * (num_hosts - 1) // num_hosts}


def counted(group, size):
    """Return by name the bytes and messages that this rank sends, and those of its plan."""
    found = {}
    for name, (start, plan) in cases(size).items():
        before = group.sent.num_bytes, group.sent.num_messages
        start(group, torch.zeros(COUNT)).wait()
        own = group.sent.num_bytes - before[0], group.sent.num_messages - before[1]
        own_plan = plan(group.position)
        found[name] = own, (4 * num_sent(own_plan), num_messages(own_plan))
    return found


@pytest.mark.parametrize("size", range(2, 10))
def test_on_threads(size):
    for found in run_on_threads(size, lambda world: counted(world.world_group, size)):
        assert len(found) == len(cases(size))
        assert all(sent == planned for sent, planned in found.values()), found


@pytest.mark.parametrize("size", [2, 4])
def test_between_processes(processes, tmp_path, size):
    def body(rank):
        world = start_world(device="cpu", timeout_s=60)
        return counted(world.world_group, size)

    for rank, found in enumerate(processes(size, body, tmp_path)):
        assert all(sent == planned for sent, planned in found.values()), found
        # All shards but its own, and all but the next one's: twice (R-1)/R of the vector.
        shards = even_counts(COUNT, size)
        ring = 4 * (2 * COUNT - shards[rank] - shards[(rank + 1) % size])
        assert found["ring"][0] == (ring, 2 * (size - 1))
