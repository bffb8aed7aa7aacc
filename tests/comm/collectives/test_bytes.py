"""What ranks really send, counted by their groups: what the plans say, and so the closed forms.

tests/comm/collectives/test_costs.py holds the plans against theory.
"""

import pytest
import torch

from gpipe_hpc.comm.collectives.menu import (
    ALL_GATHERS,
    ALL_REDUCES,
    BROADCASTS,
    REDUCE_SCATTERS,
    start_all_gather,
    start_all_reduce,
    start_broadcast,
    start_reduce_scatter,
)
from gpipe_hpc.comm.collectives.plan import Place, even_counts, num_messages, num_sent
from gpipe_hpc.comm.joining.start import start_world
from gpipe_hpc.comm.threads import run_on_threads

COUNT, BLOCK_BYTES = 5047, 4096  # odd, so that shards and blocks differ in length
BLOCK = BLOCK_BYTES // 4


def cases(size):
    """Return by name what starts an algorithm, and the plan of the rank at a position."""
    counts, found = even_counts(COUNT, size), {}
    for name, planner in ALL_REDUCES.items():
        found[f"all-reduce {name}"] = (
            lambda g, t, n=name: start_all_reduce(g, t, n, block_bytes=BLOCK_BYTES),
            lambda i, p=planner: p(Place(size, i), COUNT, BLOCK),
        )
    for name, planner in BROADCASTS.items():
        found[f"broadcast {name}"] = (
            lambda g, t, n=name: start_broadcast(g, t, size - 1, n, block_bytes=BLOCK_BYTES),
            lambda i, p=planner: p(Place(size, i), size - 1, COUNT, BLOCK),
        )
    for name, planner in REDUCE_SCATTERS.items():
        found[f"reduce-scatter {name}"] = (
            lambda g, t, n=name: start_reduce_scatter(g, t, None, n),
            lambda i, p=planner: p(Place(size, i), counts),
        )
    for name, planner in ALL_GATHERS.items():
        found[f"all-gather {name}"] = (
            lambda g, t, n=name: start_all_gather(g, t, None, n),
            lambda i, p=planner: p(Place(size, i), counts),
        )
    return found


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
    for found in run_on_threads(size, lambda world: counted(world.everybody, size)):
        assert len(found) == len(cases(size))
        assert all(sent == planned for sent, planned in found.values()), found


@pytest.mark.parametrize("size", [2, 4])
def test_between_processes(processes, tmp_path, size):
    def body(rank):
        world = start_world(device="cpu", timeout_s=60)
        return counted(world.everybody, size)

    for rank, found in enumerate(processes(size, body, tmp_path)):
        assert all(sent == planned for sent, planned in found.values()), found
        # All shards but its own, and all but the next one's: twice (R-1)/R of the vector.
        shards = even_counts(COUNT, size)
        ring = 4 * (2 * COUNT - shards[rank] - shards[(rank + 1) % size])
        assert found["all-reduce ring"][0] == (ring, 2 * (size - 1))
