"""Wide groups over Gloo: few connections, the mesh's bits, and the cause of a failure."""

import gc
import os
import re
import signal
import weakref

import pytest
import torch

from gpipe_hpc import Pipeline
from gpipe_hpc.comm.collectives.bruck import partners
from gpipe_hpc.comm.collectives.plan import PlanPosition
from gpipe_hpc.comm.collectives.sparse_group import SparseGroup
from gpipe_hpc.comm.world.processes import ProcessWorld
from gpipe_hpc.comm.world.world import collective_errors
from gpipe_hpc.device.device import HostDevice
from gpipe_hpc.errors import ConfigError, PeerError
from tests.support import batches, linears, mean_square

from .test_sparse_group import DTYPES, part_of


def world_of(meshed: int) -> ProcessWorld:
    return ProcessWorld(HostDevice(), 60.0, meshed=meshed)


def test_sums_have_the_bits_of_gloos_own(processes, tmp_path):
    size = 8

    def body(rank):
        world = world_of(meshed=3)
        (narrow,) = [world_of(meshed=size).group([range(size)])]
        wide = world.group([range(size)])
        assert isinstance(wide, SparseGroup) and not isinstance(narrow, SparseGroup)
        wrong = []
        cases = [(n, torch.float32) for n in (0, 1, 17, 5000)]
        for length, dtype in cases + [(101, d) for d in DTYPES if d is not torch.int16]:
            for act in (
                lambda group, own: group.start_all_reduce(own),
                lambda group, own: group.start_ordered_all_reduce(own),
                lambda group, own: group.start_reduce_scatter(own),
            ):
                results = [part_of(rank, length, dtype) for _ in range(2)]
                for group, own in zip((narrow, wide), results, strict=True):
                    act(group, own).wait()
                    group.start_all_gather(own).wait()
                if not torch.equal(*results):
                    wrong.append((length, dtype))
        pairs = world._wide_pairs[-1]
        return wrong, pairs.num_connected

    assert processes(size, body, tmp_path) == [([], 5)] * size


def test_training_over_wide_groups_has_the_same_bits(processes, tmp_path):
    data = batches(2, 24)
    outers = (
        {},
        {"order": "rank"},
        {"compress": "float16"},
        {"compress": "topk", "topk_fraction": 0.3},
        {"shard": "flat"},
        {"shard": "oss"},
    )

    def body(rank):
        found = []
        for meshed in (2, 9):
            world = world_of(meshed)
            for outer in outers:
                pipe = Pipeline(
                    linears(3), mean_square, stages=1, replicas=8, world=world, outer=outer
                )
                optimizer = pipe.optimizer(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
                for inputs, targets in data:
                    part = pipe.share(24)
                    loss = pipe.step(inputs[part].float(), targets[part].float()).loss
                    optimizer.step()
                found.append((loss, {n: p.tolist() for n, p in pipe.named_parameters()}))
            connected = {pairs.num_connected for pairs in world._wide_pairs}
            assert connected == ({len(partners(PlanPosition(8, rank)))} if meshed == 2 else set())
        return found

    for found in processes(8, body, tmp_path):
        half = len(outers)
        assert found[:half] == found[half:]


def test_torch_broadcasts_over_what_it_sees_of_a_wide_group(processes, tmp_path):
    def body(rank):
        world = world_of(meshed=2)
        group = world.group([range(1, 8)] if rank else [range(1)])
        if rank == 0:
            return None
        assert isinstance(group, SparseGroup)
        shown, found = group.torch_group, []
        for root in range(1, 8):
            own = torch.tensor([rank])
            torch.distributed.broadcast(own, root, group=shown)
            work = torch.distributed.broadcast(own + 10, root, group=shown, async_op=True)
            work.wait()
            found.append(own.item())
        place = torch.distributed.get_rank(shown), torch.distributed.get_world_size(shown)
        assert group.torch_group is shown and place == (rank - 1, 7)
        peers, this = world._wide_pairs[-1].num_connected, weakref.ref(world)
        del world, group, shown
        gc.collect()
        assert this() is None, "what torch sees of a group keeps no world alive"
        return found, peers

    alone, *others = processes(8, body, tmp_path)
    assert alone is None and others == [(list(range(1, 8)), 6)] * 7


def test_a_failure_is_told_to_ranks_that_wait_in_a_sum(processes, tmp_path):
    def body(rank):
        world = world_of(meshed=2)
        group = world.group([range(5)])
        try:
            with collective_errors(world, "adding up"):
                group.all_reduce(torch.ones(3))
                if rank == 3:
                    raise ConfigError("rank 3: of its own")
                group.all_reduce(torch.ones(3))
        except (ConfigError, PeerError) as error:
            return type(error).__name__, str(error)
        return "went on", ""

    found = processes(5, body, tmp_path)
    assert [kind for kind, _ in found] == [*["PeerError"] * 3, "ConfigError", "PeerError"]
    assert all(re.search(r"rank 3( on \S+)?: of its own", text) for _, text in found)


@pytest.mark.slow
def test_a_rank_that_dies_in_a_sum_is_named_on_all_others(tmp_path, start_ranks):
    script = tmp_path / "dies.py"
    script.write_text(
        "import os, signal, torch\n"
        "from gpipe_hpc.comm.world.start import start_world\n"
        "from gpipe_hpc.comm.world.processes import ProcessWorld\n"
        "from gpipe_hpc.comm.world.world import collective_errors\n"
        "world = start_world(device='cpu', timeout_s=60)\n"
        "world._meshed = 2\n"
        "group = world.group([range(4)])\n"
        "with collective_errors(world, 'the sums'):\n"
        "    for turn in range(1000):\n"
        "        if turn == 20 and world.rank == 1:\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
        "        group.all_reduce(torch.ones(1000))\n"
    )
    ranks = start_ranks(
        4, module="dies", env={"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.getcwd()}"}
    )
    ranks.wait(120)
    assert ranks.codes[1] == -signal.SIGKILL
    for rank in (0, 2, 3):
        assert ranks.codes[rank] == 1
        assert "rank 1" in ranks.outputs[rank]
