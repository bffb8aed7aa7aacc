"""Rows handed out with several replicas, over real groups of processes."""

import pytest
import torch

from gpipe_hpc import Pipeline
from gpipe_hpc.comm.world.processes import ProcessWorld
from gpipe_hpc.device.device import HostDevice
from gpipe_hpc.schedule import digest
from gpipe_hpc.schedule.table.rows import Row
from tests.support import batches, linears, mean_square

SIZES = [
    (2, 2),
    pytest.param(4, 2, marks=pytest.mark.slow),
    pytest.param(2, 4, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("stages", "replicas"), SIZES)
def test_each_position_of_each_replica_gets_its_rows_and_trains(
    processes, tmp_path, stages, replicas
):
    """They had been handed out to several replicas on threads alone."""
    ((inputs, targets),) = batches(1, 8 * replicas, dtype=torch.float32)

    def body(rank):
        world = ProcessWorld(HostDevice(), 60.0, width=2)
        pipe = Pipeline(
            linears(8),
            mean_square,
            stages=stages,
            replicas=replicas,
            microbatches=4,
            schedule="zb_v",
            world=world,
        )
        part = pipe.share(len(inputs))
        loss = pipe.step(inputs[part], targets[part]).loss
        pipe.evaluate(inputs[part], targets[part])
        own = [at for at, row in enumerate(pipe.schedule.ranks) if isinstance(row, Row)]
        rows = pipe.schedule.ranks[pipe.stage_rank]
        return own, pipe.stage_rank, digest(pipe.schedule), float(loss), [str(a) for a in rows]

    found = processes(stages * replicas, body, tmp_path)
    assert found[0][0] == list(range(stages)), "rank 0 has made all rows"
    for rank, (own, stage_rank, table, loss, row) in enumerate(found):
        assert stage_rank == rank % stages
        assert rank == 0 or own == [stage_rank]
        assert (table, loss) == found[0][2:4]
        assert row == found[stage_rank][4] and row != found[(stage_rank + 1) % stages][4]
