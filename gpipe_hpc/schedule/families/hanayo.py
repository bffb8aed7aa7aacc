"""Hanayo: wave-shaped stages down and up the ranks, with a single copy of the weights."""

from gpipe_hpc.schedule.families.options import check_integer
from gpipe_hpc.schedule.families.orders import tabulate
from gpipe_hpc.schedule.search.list_scheduling import Priority, Rules, list_schedule
from gpipe_hpc.schedule.table.actions import Op
from gpipe_hpc.schedule.table.placements import wave
from gpipe_hpc.schedule.table.schedule import Schedule


def hanayo(ranks: int, microbatches: int, waves: int = 2) -> Schedule:
    """Run the most advanced action over 2 W stages per rank, backwards first if M <= K.

        rank 0 0F00F1...3F04F03F14F17F07B0===7F17B1===...4B0===3B0===4B1===3B1===0B0===......0B1===
        rank 1 ...1F02F01F12F15F06F05F16F1...6B0===5B0===6B1===5B1===2B0===1B0===2B1===1B1===......
        F- forward, B= backward, . idle; makespan 28, bubble 14.3% (idle over total)

    K ranks run M micro-batches in W waves; F and B are the times of a forward and a backward of a
    stage. Every rank keeps the activations of at most 2 W K (stage, micro-batch) pairs, as much
    memory as K micro-batches of 1F1B; if M is greater than K, forwards run first as far as this
    limit allows. The published bubble at M = K and B = 2F is (2 K - 2) / (3 K W + K - 1); this
    order is below it or within 7 %. Source: Liu et al., Hanayo, SC 2023, figures 5 and 6; the order
    is made by list scheduling.
    """
    num_waves = check_integer("hanayo", "waves", waves)
    placement = wave(ranks, num_waves, microbatches)
    num_stages = placement.num_stages
    rules = Rules(
        durations={Op.F: [1.0] * num_stages, Op.B: [2.0] * num_stages},
        priority=_most_advanced_first(Op.B if microbatches <= ranks else Op.F),
        transfers=[0.0] * num_stages,
        limits=[num_stages] * ranks,
    )
    return tabulate("hanayo", placement, list_schedule(placement, rules))


def _most_advanced_first(first: Op) -> Priority:
    """Return a priority function: op `first`, then the stage closest to the end of its pass."""
    forward = Op.F

    def key(op: Op, stage: int, microbatch: int) -> tuple[int, ...]:
        return op is not first, -stage if op is forward else stage, microbatch

    return key
