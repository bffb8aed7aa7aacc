"""Connections between the ranks of a mesh."""

import pytest
import torch
from torch import nn

from gpipe_hpc import LayerSpec, Pipeline
from gpipe_hpc.comm.collectives.group import SoloGroup
from gpipe_hpc.comm.world.mesh import Mesh
from gpipe_hpc.comm.world.threads import ThreadGroup
from gpipe_hpc.device.device import HostDevice
from gpipe_hpc.engine.wiring import Wiring
from gpipe_hpc.schedule import build
from gpipe_hpc.schedule.table.placements import copies_in_rows
from tests.schedule.conftest import VARIANTS, label
from tests.simulated.world import run_simulated
from tests.support import mean_square

MESH = Mesh(64, 16)
SOME = (0, 1, 7, 16 * 20 + 15, 1023)


class OneRank:
    """World of which only one rank exists; it records the channels that it opens."""

    size = MESH.size
    device = HostDevice()

    def __init__(self, rank):
        self.rank = rank

    def group(self, members):
        return SoloGroup(self.rank)

    def transport(self, channels, device=None):
        self.channels = channels


def test_rank_has_few_queues_with_any_schedule_and_many_replicas():
    """Regression: 16 stages x 64 replicas formed up to 15,360 queues, one after the other.

    A rank has two neighbours and one queue in each direction. With partial replicas, the neighbours
    are all ranks that hold the next or previous stage.
    """
    for variant in VARIANTS:
        name, options = variant
        table = build(name, ranks=16, microbatches=32, **options)
        for rank in SOME:
            world = OneRank(rank)
            Wiring.connect(world, MESH, [table] * MESH.replicas)
            ends = {(c.source_rank, c.destination_rank) for c in world.channels}
            assert {MESH.replica_of(end) for pair in ends for end in pair} == {rank // 16}
            own = [pair for pair in ends if rank in pair]
            rows = max(len(table.placement.holders(s)) for s in range(table.num_stages))
            most = 2 * rows if copies_in_rows(table.placement) else 4
            assert 2 <= len(own) <= most, label(variant)


@pytest.mark.parametrize(
    "options",
    [
        {"replicas": 2, "normalise_over_replicas": True},
        {"replicas": 2, "outer": {"every": 2}},
        {"schedule": "chimera", "stages": 4},
    ],
    ids=lambda options: ", ".join(map(str, options)),
)
def test_no_group_runs_its_first_collective_within_a_step(monkeypatch, options):
    """Regression: batch norm's group did, and connecting ranks takes seconds on an accelerator."""
    called: list[ThreadGroup] = []
    collective = ThreadGroup._collective

    def record_group(group, tensor, result):
        called.append(group)
        return collective(group, tensor, result)

    monkeypatch.setattr(ThreadGroup, "_collective", record_group)

    def body(world):
        layer = LayerSpec(nn.Linear, 4, 4)
        ends = layer.tied({"weight": "w"})
        layers = [ends, LayerSpec(nn.BatchNorm1d, 4), layer, layer, LayerSpec(nn.Tanh), ends]
        pipe = Pipeline(layers, mean_square, microbatches=2, world=world, **options)
        world.world_group.all_reduce(torch.zeros(1))
        before = set(map(id, called))
        world.world_group.all_reduce(torch.zeros(1))
        inputs, targets = torch.randn(2, 16, 4)
        part = pipe.share(16)
        pipe.step(inputs[part], targets[part])
        return before

    before, *_ = run_simulated(4, body).results
    within = {id(group) for group in called} - before
    assert len(before) > 4 and not within
