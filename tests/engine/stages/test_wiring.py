"""How the ranks of a mesh are connected."""

from gpipe_hpc.comm.device import HostDevice
from gpipe_hpc.comm.group import SoloGroup
from gpipe_hpc.comm.mesh import Mesh
from gpipe_hpc.engine.stages.wiring import wire
from gpipe_hpc.schedule import build
from gpipe_hpc.schedule.table.placements import copies_in_rows
from tests.schedule.conftest import VARIANTS, label

MESH = Mesh(64, 16)
SOME = (0, 1, 7, 16 * 20 + 15, 1023)


class OneRank:
    """A rank of a world that is not there; it notes what it opens."""

    size = MESH.size
    device = HostDevice()

    def __init__(self, rank):
        self.rank = rank

    def group(self, members):
        return SoloGroup(self.rank)

    def transport(self, channels, device=None):
        self.channels = channels


def test_a_rank_has_few_queues_whatever_the_schedule_and_the_number_of_replicas():
    """16 stages x 64 replicas would have formed up to 15,360, each after a sum of the world.

    Two neighbours, one queue each way. Beside the hole of a row stand all that fill it.
    """
    for variant in VARIANTS:
        name, options = variant
        table = build(name, ranks=16, microbatches=32, **options)
        for rank in SOME:
            world = OneRank(rank)
            wire(world, MESH, [table] * MESH.replicas)
            ends = {(c.source_rank, c.destination_rank) for c in world.channels}
            assert {MESH.replica_of(end) for pair in ends for end in pair} == {rank // 16}
            own = [pair for pair in ends if rank in pair]
            rows = max(len(table.placement.holders(s)) for s in range(table.num_stages))
            most = 2 * rows if copies_in_rows(table.placement) else 4
            assert 2 <= len(own) <= most, label(variant)
