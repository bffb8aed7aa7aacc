"""Bytes between ranks, in pieces: threads, shared memory, and Gloo as between hosts."""

import pytest
import torch

from gpipe_hpc import run_on_threads
from gpipe_hpc.comm.transport import byte_moves
from gpipe_hpc.comm.transport.byte_moves import ByteRoute, ByteTransfers
from gpipe_hpc.comm.world.processes import ProcessWorld
from gpipe_hpc.device.device import HostDevice


def exchanged(world, sizes):
    """Exchange twice, each rank with the next; return all bytes that came."""
    sent = [torch.arange(size).to(torch.uint8) for size in sizes]
    moves = [ByteRoute(rank, (rank + 1) % world.size) for rank in range(world.size)]
    came = []
    lines = ByteTransfers(world, moves, serial=0)
    source = (world.rank - 1) % world.size
    for _ in range(2):
        lines.run(
            {(world.rank + 1) % world.size: sent[world.rank]},
            {source: sizes[source]},
            lambda origin, piece: came.append((origin, piece.tolist())),
        )
        world.world_group.all_gather_object(None)
    assert {origin for origin, _ in came} <= {source}
    assert all(len(piece) <= 100 for _, piece in came)
    return [number for _, piece in came for number in piece]


def expected(sizes):
    return [2 * [n % 256 for n in range(sizes[(r - 1) % len(sizes)])] for r in range(len(sizes))]


@pytest.mark.parametrize("sizes", [(0, 0), (1, 350), (300, 300), (5, 0, 1000)])
def test_bytes_arrive_whole_and_in_order(monkeypatch, sizes):
    monkeypatch.setattr(byte_moves, "PIECE_BYTES", 100)
    came = run_on_threads(len(sizes), lambda world: exchanged(world, sizes))
    assert came == expected(sizes)


@pytest.mark.parametrize("shares_memory", [True, False])
def test_bytes_arrive_between_processes(monkeypatch, processes, tmp_path, shares_memory):
    monkeypatch.setattr(byte_moves, "PIECE_BYTES", 100)
    sizes = (1, 350, 1000)

    def body(rank):
        world = ProcessWorld(HostDevice(), 30.0, shares_memory=shares_memory)
        return exchanged(world, sizes)

    assert processes(3, body, tmp_path) == expected(sizes)
