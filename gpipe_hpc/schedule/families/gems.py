"""GEMS: two copies of the model in opposite directions, one micro-batch at a time."""

from itertools import pairwise

from gpipe_hpc.errors import ScheduleError
from gpipe_hpc.schedule.families.options import check_integer
from gpipe_hpc.schedule.families.orders import tabulate
from gpipe_hpc.schedule.table.actions import Action, Op
from gpipe_hpc.schedule.table.placements import mirrored
from gpipe_hpc.schedule.table.schedule import Schedule


def gems(ranks: int, microbatches: int, replications: int | None = None) -> Schedule:
    """Alternate micro-batches of two opposite pipelines; on each rank, F follows the other's B.

        rank 0 0F0..................0B0===2F12B1===0F2........................0B2===
        rank 1 ...1F0.........1B0===1F1............1B1===1F2............1B2===......
        rank 2 ......2F02B0===0F1........................0B1===2F22B2===............
        F- forward, B= backward, . idle; makespan 23, bubble 60.9% (idle over total)

    K ranks run M micro-batches; F and B are the times of a forward and a backward of a stage.
    Without `replications`, each pass is one micro-batch, and a rank keeps one micro-batch for any
    M. With `replications`, there are that many passes in each direction; each pass runs all
    forwards, then all backwards, of its share of the micro-batches (MAST: 1, MASTER: more), and a
    rank keeps one pass. `microbatches` counts both directions; each stage is held by two ranks.
    With equal stages and B = 2F, a pair of micro-batches takes (4 K + 2) F. Source: Jain et al.,
    GEMS, SC 2020, designs MAST and MASTER.
    """
    num_passes = microbatches
    if replications is not None:
        num_passes = 2 * check_integer("gems", "replications", replications)
    if num_passes > microbatches:
        raise ScheduleError(
            f"schedule 'gems': {replications} replications need at least {num_passes} "
            f"micro-batches, one per pass, got {microbatches}; raise pipeline.microbatches or "
            f"lower pipeline.options.replications"
        )
    cuts = [index * microbatches // num_passes for index in range(num_passes + 1)]
    passes = [range(*ends) for ends in pairwise(cuts)]
    route_of = [number % 2 for number, one in enumerate(passes) for _ in one]
    rows: list[list[Action]] = []
    for rank in range(ranks):
        row: list[Action] = []
        for number, one in enumerate(passes):
            stage = ranks - 1 - rank if number % 2 else rank
            row += [Action(Op.F, stage, index) for index in one]
            row += [Action(Op.B, stage, index) for index in reversed(one)]
        rows.append(row)
    return tabulate("gems", mirrored(ranks, 2, route_of), rows)
