"""Interleaved 1F1B: several stages per rank, run in turn, for a smaller bubble."""

from itertools import chain, pairwise

from gpipe_hpc.schedule.families.options import check_integer
from gpipe_hpc.schedule.families.orders import tabulate
from gpipe_hpc.schedule.table.actions import Action, Op
from gpipe_hpc.schedule.table.placements import looped
from gpipe_hpc.schedule.table.schedule import Schedule


def interleaved(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Alternate forward and backward over the stages of a rank, K micro-batches per stage.

        rank 0 0F00F12F02F10F2...2B0===0F32B1===2F20B0===2F30B1===...2B2===...2B3===0B2===0B3===
        rank 1 ...1F01F13F03B0===3F13B1===1F21B0===1F31B1===3F23B2===3F33B3===1B2===1B3===......
        F- forward, B= backward, . idle; makespan 27, bubble 11.1% (idle over total)

    K ranks, numbered k from 0, with v stages each run M micro-batches; F and B are the times of a
    forward and a backward of a stage. Micro-batches run in even rounds of K or slightly more. Rank
    k starts with 2 (K - 1 - k) + (v - 1) K forwards and keeps one (stage, micro-batch) pair more
    than that. With equal stages and M a multiple of K, a step takes (v M + K - 1)(F + B). Source:
    Narayanan et al., Efficient Large-Scale Language Model Training, SC 2021, figure 4.
    """
    num_loops = check_integer("interleaved", "stages_per_rank", stages_per_rank)
    rounds = _rounds(ranks, microbatches)
    warmup = (num_loops - 1) * max(map(len, rounds))
    forwards = [(loop, index) for one in rounds for loop in range(num_loops) for index in one]
    backwards = [
        (loop, index) for one in rounds for loop in reversed(range(num_loops)) for index in one
    ]
    rows: list[list[Action]] = []
    for rank in range(ranks):
        first = min(warmup + 2 * (ranks - 1 - rank), len(forwards))
        ahead = [Action(Op.F, loop * ranks + rank, index) for loop, index in forwards]
        back = [Action(Op.B, loop * ranks + rank, index) for loop, index in backwards]
        pairs = chain.from_iterable(zip(ahead[first:], back, strict=False))
        rows.append([*ahead[:first], *pairs, *back[len(ahead) - first :]])
    return tabulate("interleaved", looped(ranks, num_loops, microbatches), rows)


def _rounds(num_ranks: int, num_microbatches: int) -> list[range]:
    """Split the micro-batches into even rounds of at least K; fewer than K form one round.

    In a smaller round, a rank would reach its next stage before the first micro-batch arrives
    there.
    """
    num_rounds = max(1, num_microbatches // num_ranks)
    cuts = [index * num_microbatches // num_rounds for index in range(num_rounds + 1)]
    return [range(*ends) for ends in pairwise(cuts)]
