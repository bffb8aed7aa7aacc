"""Hanayo: stages in waves down and up the ranks, without a second copy of the weights."""

from gpipe_hpc.schedule.actions import Action, Op
from gpipe_hpc.schedule.greedy import Rules, list_schedule
from gpipe_hpc.schedule.options import whole
from gpipe_hpc.schedule.orders import tabulate
from gpipe_hpc.schedule.placements import wave
from gpipe_hpc.schedule.table import Schedule


def hanayo(ranks: int, microbatches: int, waves: int = 2) -> Schedule:
    """Run backwards first, then the forwards that are furthest on, over 2 W stages a rank.

        rank 0 0F00F1...3F04F03F14F17F07B0===7F17B1===...4B0===3B0===4B1===3B1===0B0===......0B1===
        rank 1 ...1F02F01F12F15F06F05F16F1...6B0===5B0===6B1===5B1===2B0===1B0===2B1===1B1===......
        F- forward, B= backward, . idle; makespan 28, bubble 14.3% (idle over total)

    Every rank keeps 2 W K stage micro-batches at most, as much memory as K of 1F1B. The published
    bubble at M = K and B = 2F is (2 K - 2) / (3 K W + K - 1); this order is below it or within 7 %.
    Source: Liu et al., Hanayo, SC 2023, figures 5 and 6; the order is made by list scheduling.
    """
    num_waves = whole("hanayo", "waves", waves)
    placement = wave(ranks, num_waves, microbatches)
    num_stages = placement.num_stages
    rules = Rules(
        durations={Op.F: [1.0] * num_stages, Op.B: [2.0] * num_stages},
        priority=_backward_then_deepest,
        transfers=[0.0] * num_stages,
        limits=[num_stages] * ranks,
    )
    return tabulate("hanayo", placement, list_schedule(placement, rules))


def _backward_then_deepest(action: Action) -> tuple[int, ...]:
    forward = action.op is Op.F
    return forward, -action.stage if forward else action.stage, action.microbatch or 0
