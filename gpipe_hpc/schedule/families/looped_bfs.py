"""Looped BFS: several stages per rank, each run over all micro-batches before the next."""

from gpipe_hpc.schedule.families.options import check_integer
from gpipe_hpc.schedule.families.orders import tabulate
from gpipe_hpc.schedule.table.actions import Action, Op
from gpipe_hpc.schedule.table.placements import looped
from gpipe_hpc.schedule.table.schedule import Schedule


def looped_bfs(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Run all micro-batches through one stage of a rank after the other; backwards in reverse.

        rank 0 0F00F10F20F32F02F12F22F3.........2B3===2B2===2B1===2B0===0B3===0B2===0B1===0B0===
        rank 1 ...1F01F11F21F33F03F13F23F33B3===3B2===3B1===3B0===1B3===1B2===1B1===1B0===......
        F- forward, B= backward, . idle; makespan 27, bubble 11.1% (idle over total)

    K ranks of v stages each run M micro-batches; F and B are the times of a forward and a backward
    of a stage. Every rank keeps the activations of v M (stage, micro-batch) pairs. With equal
    stages, a step takes (v max(M, K) + min(M, K) - 1)(F + B). Source: Lamy-Poirier, Breadth-First
    Pipeline Parallelism, MLSys 2023, figure 4.
    """
    num_loops = check_integer("looped_bfs", "stages_per_rank", stages_per_rank)
    rows: list[list[Action]] = []
    for rank in range(ranks):
        stages, each = range(rank, ranks * num_loops, ranks), range(microbatches)
        row = [Action(Op.F, stage, index) for stage in stages for index in each]
        row += [
            Action(Op.B, stage, index) for stage in reversed(stages) for index in reversed(each)
        ]
        rows.append(row)
    return tabulate("looped_bfs", looped(ranks, num_loops, microbatches), rows)
