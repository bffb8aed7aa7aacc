"""GPipe: all forwards, then all backwards."""

from gpipe_hpc.schedule.table.actions import Action, Op
from gpipe_hpc.schedule.table.placements import one_stage_each
from gpipe_hpc.schedule.table.schedule import Schedule


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """Fill the pipeline with every micro-batch, then drain it, last micro-batch first.

        rank 0 F0F1F2F3..................B3==B2==B1==B0==
        rank 1 ..F0F1F2F3............B3==B2==B1==B0==....
        rank 2 ....F0F1F2F3......B3==B2==B1==B0==........
        rank 3 ......F0F1F2F3B3==B2==B1==B0==............
        F- forward, B= backward, . idle; makespan 21, bubble 42.9% (idle over total)

    K ranks run M micro-batches; F and B are the times of a forward and a backward of a stage. Every
    rank keeps the activations of all micro-batches. With equal stages, a step takes
    (M + K - 1)(F + B). Source: Huang et al., GPipe, NeurIPS 2019, figure 2c.
    """
    forwards = range(microbatches)
    table = tuple(
        tuple(Action(Op.F, rank, index) for index in forwards)
        + tuple(Action(Op.B, rank, index) for index in reversed(forwards))
        for rank in range(ranks)
    )
    placement = one_stage_each(ranks, microbatches)
    return Schedule("gpipe", placement, table, max_activations=(microbatches,) * ranks)
