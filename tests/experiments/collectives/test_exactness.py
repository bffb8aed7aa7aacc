"""Every algorithm of the study against the plain result, on threads and over Gloo."""

import pytest
import torch

from experiments.outer.collectives.menu import PLANNERS, hosts_of, run_backend, start
from gpipe_hpc import run_on_threads
from gpipe_hpc.comm.collectives.group import SoloGroup
from gpipe_hpc.comm.collectives.shards import shards
from gpipe_hpc.comm.world.start import start_world
from gpipe_hpc.errors import ConfigError

LENGTHS = (0, 1, 2, 3, 8, 13, 100)
BLOCK_BYTES = 24
CASES = [(c, name) for c, names in PLANNERS.items() for name in names]


def parts_of(size, length):
    """Return whole numbers, so that every order of summing has the same bits."""
    generator = torch.Generator().manual_seed(size * 1000 + length)
    draw = torch.randint(-99, 99, (size, length), generator=generator)
    return list(draw.to(torch.float64))


def expected(collective, parts, rank, root):
    """Return what a rank has in the end, and where it lies in its vector."""
    size, whole = len(parts), slice(None)
    total = torch.stack(parts).sum(0)
    if collective == "all_reduce":
        return total, whole
    if collective == "broadcast":
        return parts[root], whole
    if collective == "reduce":
        return (total, whole) if rank == root else (parts[rank][:0], slice(0, 0))
    if collective == "reduce_scatter":
        stop = sum(len(each) for each in shards(total, None, size)[: rank + 1])
        own = shards(total, None, size)[rank]
        return own, slice(stop - len(own), stop)
    return torch.cat([shards(part, None, size)[i] for i, part in enumerate(parts)]), whole


@pytest.mark.parametrize("size", range(1, 10))
@pytest.mark.parametrize(("collective", "name"), CASES)
def test_what_comes_out_is_the_plain_result(collective, name, size):
    cases = [
        (parts_of(size, length), root, group)
        for length in LENGTHS
        for root in sorted({0, size // 2, size - 1})
        for group in (1, 3)
    ]

    def body(world):
        found = []
        for parts, root, group in cases:
            own = parts[world.rank].clone()
            options = {"block_bytes": BLOCK_BYTES, "hosts": hosts_of(size, group), "root": root}
            start(world.world_group, collective, name, own, **options).wait()
            found.append(own)
        return found

    for rank, found in enumerate(run_on_threads(size, body)):
        for own, (parts, root, group) in zip(found, cases, strict=True):
            right, where = expected(collective, parts, rank, root)
            assert torch.equal(own[where], right), (rank, len(own), root, group)


@pytest.mark.parametrize("size", [3, 4])
def test_between_processes_it_is_what_gloo_itself_makes(processes, tmp_path, size):
    def body(rank):
        world = start_world(device="cpu", timeout_s=60)
        wrong = []
        for collective, name in CASES:
            parts, root = parts_of(size, 12 * 500), size - 1
            own, theirs = parts[rank].clone(), parts[rank].clone()
            options = {"block_bytes": 4096, "hosts": hosts_of(size, 2), "root": root}
            start(world.world_group, collective, name, own, **options).wait()
            run_backend(world.world_group, collective, theirs, root)
            _, where = expected(collective, parts, rank, root)
            if collective == "reduce_scatter":  # the backend's own leaves its shard elsewhere
                theirs[where] = expected(collective, parts, rank, root)[0]
            if not torch.equal(own[where], theirs[where]):
                wrong.append((collective, name))
        return wrong

    assert processes(size, body, tmp_path) == [[]] * size


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithm": "rings"}, "all_reduce: expected one of ring, .*got 'rings'"),
        ({"block_bytes": 0}, "1 byte at least, got 0"),
        ({"root": 1}, "root below 1, got 1"),
        ({"hosts": [0, 0]}, "host of each of 1 ranks, got 2"),
    ],
)
def test_a_mistake_is_answered_before_anything_is_sent(options, message):
    with pytest.raises(ConfigError, match=message):
        start(
            SoloGroup(0),
            "all_reduce",
            options.pop("algorithm", "ring"),
            torch.zeros(6),
            **options,
        )
