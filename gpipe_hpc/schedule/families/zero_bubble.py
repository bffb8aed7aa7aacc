"""Zero-bubble schedules with one stage per rank: delayed weight gradients fill idle time."""

from gpipe_hpc.schedule.families.orders import RankOrder, tabulate
from gpipe_hpc.schedule.table.actions import Action, Op
from gpipe_hpc.schedule.table.placements import one_stage_each
from gpipe_hpc.schedule.table.schedule import Schedule


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """Order actions as in 1F1B, with ``W`` on rank k delayed by k micro-batches after ``I``.

        rank 0 F0F1F2F3......I0W0I1W1I2W2I3W3
        rank 1 ..F0F1F2....I0F3I1W0I2W1I3W2W3
        rank 2 ....F0F1..I0F2I1F3I2W0I3W1W2W3
        rank 3 ......F0I0F1I1F2I2F3I3W0W1W2W3
        F- forward, I~ input gradient, W+ weight gradient, . idle;
        makespan 15, bubble 20.0% (idle over total)

    K ranks, numbered k from 0, run M micro-batches; F, I and W are the times of a forward, an input
    gradient and a weight gradient of a stage. Every rank keeps min(M, K) micro-batches, of which k
    only wait for ``W``. With equal stages, W at most min(F, I) and M at least K, a step takes
    M (F + I + W) + (K - 1)(F + I - W). Source: Qi et al., Zero Bubble Pipeline Parallelism, ICLR
    2024, figure 2.
    """
    return _delayed_weights("zb_h1", ranks, microbatches, depth=1)


def zb_h2(ranks: int, microbatches: int) -> Schedule:
    """Warm up twice as long as `zb_h1`, with ``W`` on rank k delayed by 2k micro-batches.

        rank 0 F0F1F2F3F4I0W0I1W1I2W2I3W3I4W4....
        rank 1 ..F0F1F2I0F3I1F4I2W0I3W1I4W2W3W4..
        rank 2 ....F0I0F1I1F2I2F3I3F4I4W0W1W2W3W4
        F- forward, I~ input gradient, W+ weight gradient, . idle;
        makespan 17, bubble 11.8% (idle over total)

    K ranks, numbered k from 0, run M micro-batches; F, I and W are the times of a forward, an input
    gradient and a weight gradient of a stage. Every rank keeps min(M, 2K - 1) micro-batches. At
    F = I = W and M of at least 2K - 1, no rank is idle between its first and its last action. Ranks
    start one after the other and all wait for the last, so a step takes M (F + I + W) + (K - 1) F.
    Source: as `zb_h1`, figure 3.
    """
    return _delayed_weights("zb_h2", ranks, microbatches, depth=2)


def _delayed_weights(name: str, ranks: int, microbatches: int, depth: int) -> Schedule:
    """Build a table like that of 1F1B; `depth` scales the warm-up and the delay of ``W``.

    Rank k of K warms up with depth * (K - 1 - k) forwards and delays each ``W`` by depth * k
    micro-batches.
    """
    rows: list[list[Action]] = []
    for rank in range(ranks):
        order = RankOrder()
        for step in range(-depth * (ranks - 1 - rank), microbatches + depth * rank):
            if order.taken(Op.F, rank) < microbatches:
                order.run(Op.F, rank)
            if 0 <= step < microbatches:
                order.run(Op.I, rank)
            if step >= depth * rank:
                order.pay()
        rows.append(order.actions)
    return tabulate(name, one_stage_each(ranks, microbatches), rows)
