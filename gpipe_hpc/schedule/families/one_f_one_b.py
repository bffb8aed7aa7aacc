"""1F1B: alternate one forward and one backward, so that few activations are kept at once."""

from gpipe_hpc.schedule.table.actions import Action, Op
from gpipe_hpc.schedule.table.placements import one_stage_each
from gpipe_hpc.schedule.table.schedule import Schedule


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """Alternate forward and backward after a warm-up of K - 1 - k forwards on rank k.

        rank 0 F0F1F2F3............B0==..B1==..B2==..B3==
        rank 1 ..F0F1F2........B0==F3B1==..B2==..B3==....
        rank 2 ....F0F1....B0==F2B1==F3B2==..B3==........
        rank 3 ......F0B0==F1B1==F2B2==F3B3==............
        F- forward, B= backward, . idle; makespan 21, bubble 42.9% (idle over total)

    K ranks, numbered k from 0, run M micro-batches; F and B are the times of a forward and a
    backward of a stage. Rank k keeps the activations of min(M, K - k) micro-batches. With equal
    stages, a step takes (M + K - 1)(F + B). Source: PipeDream-Flush (Narayanan et al., ICML 2021,
    figure 3) and DAPPLE (Fan et al., PPoPP 2021, figure 3).
    """
    table = tuple(tuple(_order(rank, ranks, microbatches)) for rank in range(ranks))
    bounds = tuple(min(microbatches, ranks - rank) for rank in range(ranks))
    placement = one_stage_each(ranks, microbatches)
    return Schedule("one_f_one_b", placement, table, max_activations=bounds)


def _order(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    """Return the actions of one rank: warm-up forwards, F and B in turn, cool-down backwards."""
    warmup = min(num_ranks - 1 - rank, num_microbatches)
    order = [Action(Op.F, rank, index) for index in range(warmup)]
    for index in range(warmup, num_microbatches):
        order.append(Action(Op.F, rank, index))
        order.append(Action(Op.B, rank, index - warmup))
    drain = range(num_microbatches - warmup, num_microbatches)
    return order + [Action(Op.B, rank, index) for index in drain]
