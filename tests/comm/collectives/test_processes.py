"""The algorithms over Gloo, and what happens when a rank is gone or does something else."""

import os
import signal
import threading
import time

import pytest
import torch

from gpipe_hpc.comm.collectives.group import PeerTensor
from gpipe_hpc.comm.collectives.planned import start_ring_all_reduce
from gpipe_hpc.comm.world.start import start_world
from gpipe_hpc.comm.world.world import collective_errors
from gpipe_hpc.errors import ConfigError, PeerError
from tests.comm.collectives.starts import ALL_REDUCES, BROADCASTS
from tests.support import patience

DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.complex64),
)


def parts_of(size, length, dtype=torch.float64):
    torch.manual_seed(length)
    return [torch.randint(-9, 9, (length,)).to(dtype) for _ in range(size)]


@pytest.mark.parametrize("size", [2, 4])
def test_sums_shards_and_broadcasts_between_processes(processes, tmp_path, size):
    """Whole numbers, so that every order of summing has the same bits."""

    def body(rank):
        world = start_world(device="cpu", timeout_s=60)  # it ends with its last name
        group = world.world_group
        wrong = []
        for algorithm in sorted(ALL_REDUCES.keys() - {"backend"}):
            for length, dtype in [(1000, d) for d in DTYPES] + [(n, DTYPES[0]) for n in (0, 1, 3)]:
                parts = parts_of(size, length, dtype)
                own = parts[rank].clone()
                ALL_REDUCES[algorithm](group, own).wait()
                if not torch.equal(own, sum(parts[1:], parts[0])):
                    wrong.append((algorithm, length, dtype))
        for algorithm in BROADCASTS:
            for root in (0, size - 1):
                parts = parts_of(size, 1000)
                own = parts[rank].clone()
                BROADCASTS[algorithm](group, own, root).wait()
                if not torch.equal(own, parts[root]):
                    wrong.append((algorithm, root))
        for dtype in (torch.bool, torch.float8_e4m3fn):  # what travels, though nothing sums it
            own = torch.full((100,), rank % 2).to(dtype)
            BROADCASTS["scatter_ring"](group, own, 1).wait()
            if not bool((own.float() == 1.0).all()):
                wrong.append(dtype)
        parts = parts_of(size, 999)
        own = parts[rank].clone()
        before = group.sent.num_bytes
        group.start_reduce_scatter(own).wait()
        scattered = group.sent.num_bytes - before
        group.start_all_gather(own).wait()
        if not torch.equal(own, sum(parts[1:], parts[0])):
            wrong.append("reduce-scatter and all-gather")
        return wrong, scattered

    found = processes(size, body, tmp_path)
    assert [wrong for wrong, _ in found] == [[]] * size
    # All shards but its own, once: (R-1)/R of the bytes.
    shards = [len(part) for part in torch.tensor_split(torch.zeros(999), size)]
    assert [sent for _, sent in found] == [8 * (999 - own) for own in shards]


def test_plans_go_on_beside_the_calling_thread_and_the_groups_other_collectives(
    processes, tmp_path
):
    def body(rank):
        world = start_world(device="cpu", timeout_s=60)  # it ends with its last name
        group = world.world_group
        buckets = [torch.full((50_000,), float(rank + i)) for i in range(6)]
        algorithms = ["ring", "butterfly", "rank_order", "hierarchical", "ring", "rabenseifner"]
        pending = [
            ALL_REDUCES[name](group, bucket)
            for bucket, name in zip(buckets, algorithms, strict=True)
        ]
        told = [group.all_gather_object((rank, turn)) for turn in range(3)]
        into = torch.zeros(3)
        group.start_exchange(
            [PeerTensor(1 - rank, torch.ones(3))], [PeerTensor(1 - rank, into)]
        ).wait()
        for each in reversed(pending):
            each.wait()
        assert told == [[(0, turn), (1, turn)] for turn in range(3)] and into.sum() == 3
        return [bucket.unique().tolist() for bucket in buckets]

    assert processes(2, body, tmp_path) == [[[2.0 * i + 1.0] for i in range(6)]] * 2


def test_ranks_that_do_not_start_the_same_are_all_told(processes, tmp_path):
    """Gloo would have left a stale tail, or ended a process."""

    def body(rank):
        world = start_world(device="cpu", timeout_s=60)
        began_s = time.monotonic()
        try:
            with collective_errors(world, "a sum"):
                start_ring_all_reduce(world.world_group, torch.ones(10 + (rank == 2))).wait()
        except (ConfigError, PeerError) as error:
            return str(error), time.monotonic() - began_s

    for told, took_s in processes(3, body, tmp_path):
        assert "ranks call different collectives" in told
        assert "of 10 x float32" in told and "of 11 x float32" in told and took_s < 30 * patience()


@pytest.mark.slow
def test_a_rank_that_dies_within_a_plan_is_named_on_all_others(tmp_path, start_ranks):
    """The news come by the watch; the plan's thread hears of it by its broken connections."""
    script = tmp_path / "dies.py"
    script.write_text(
        "import os, signal, sys, torch\n"
        "from gpipe_hpc.comm.collectives.planned import start_ring_all_reduce\n"
        "from gpipe_hpc.comm.world.start import start_world\n"
        "from gpipe_hpc.comm.world.world import collective_errors\n"
        "world = start_world(device='cpu', timeout_s=60)\n"
        "with collective_errors(world, 'the sums'):\n"
        "    for turn in range(1000):\n"
        "        if turn == 20 and world.rank == 1:\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
        "        start_ring_all_reduce(world.world_group, torch.ones(1000)).wait()\n"
    )
    began_s = time.monotonic()
    ranks = start_ranks(
        3, module="dies", env={"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.getcwd()}"}
    )
    ranks.wait(60)
    assert time.monotonic() - began_s < 45 * patience()
    assert ranks.codes[1] == -signal.SIGKILL
    for rank in (0, 2):
        assert ranks.codes[rank] == 1
        # Mostly the watch's own news, "killed by SIGKILL"; who is slower says whom it has lost.
        assert "rank 1" in ranks.outputs[rank]


def test_who_waits_for_a_plan_says_for_whom(processes, tmp_path, until):
    """The watch names the rank that holds up the others, not all that take part."""

    def body(rank):
        world = start_world(device="cpu", timeout_s=60)
        start_ring_all_reduce(world.world_group, torch.ones(8)).wait()  # they have met
        seen, looking = [], threading.Thread(target=lambda: seen.append(look(world)))
        if rank == 0:
            looking.start()
        if rank == 2:
            until((tmp_path / "seen").exists, 40, "another rank waits for this one")
        start_ring_all_reduce(world.world_group, torch.ones(8)).wait()
        if rank == 0:
            looking.join()
        assert world._pulse.waits_for is None
        return seen

    def look(world):
        pulse = world._pulse
        until(lambda: pulse.waits_for == [2], 40, "this rank waits for rank 2")
        assert pulse.waits
        told = str(pulse)
        (tmp_path / "seen").touch()
        return told

    (told,), _, _ = processes(3, body, tmp_path)
    assert told.endswith("waiting for rank 2")
