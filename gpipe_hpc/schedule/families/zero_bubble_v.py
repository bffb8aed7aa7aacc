"""Zero-bubble schedules on a V: two stages per rank, with the first and the last on rank 0."""

from gpipe_hpc.schedule.families.orders import RankOrder, in_slots, tabulate
from gpipe_hpc.schedule.table.actions import Action, Op
from gpipe_hpc.schedule.table.placements import wave
from gpipe_hpc.schedule.table.schedule import Schedule


def zb_v(ranks: int, microbatches: int) -> Schedule:
    """Run F, I and W of two stages on every rank so that it is never idle once started.

        rank 0 0F00F10F2......5F05I05W05F15I15W15F25I25W20I00W0...0I10W1...0I20W2
        rank 1 ...1F01F11F24F0...4F14I04W04F24I14W11I01W04I24W21I11W1...1I21W2...
        rank 2 ......2F03F02F13F12F23F23I03W02I02W03I13W12I12W13I23W22I22W2......
        F- forward, I~ input gradient, W+ weight gradient, . idle;
        makespan 22, bubble 18.2% (idle over total)

    K ranks run M micro-batches; F, I and W are the times of a forward, an input gradient and a
    weight gradient of a stage. Every rank keeps the activations of at most 2K (stage, micro-batch)
    pairs, as much memory as K micro-batches of 1F1B, whose stages are twice as large. At F = I = W
    and M of at least 2K, no rank is idle between its first and its last action, and a step takes
    (6 M + K - 1) F. Source: Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, section 6 and
    figure 8.
    """
    made_for = max(microbatches, 2 * ranks - 1)
    rows = [_zb_v_rank(rank, ranks, made_for) for rank in range(ranks)]
    return tabulate("zb_v", wave(ranks, 1, microbatches), rows)


def _zb_v_rank(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    """Return the actions of one rank for at least 2K - 1 micro-batches."""
    down, up = rank, 2 * num_ranks - 1 - rank
    order = RankOrder()
    for _ in range(2 * (num_ranks - rank) - 1):
        order.run(Op.F, down)
    for _ in range(rank):
        order.run(Op.F, up)
        order.run(Op.F, down)
    for _ in range(num_ranks - rank):
        order.run(Op.F, up)
        order.run(Op.I, up)
        order.pay()
    while order.taken(Op.F, up) < num_microbatches:
        if order.taken(Op.F, down) < num_microbatches:
            order.run(Op.F, down)
        order.run(Op.I, down)
        order.pay()
        order.run(Op.F, up)
        order.run(Op.I, up)
        order.pay()
    for _ in range(rank):
        order.run(Op.I, down)
        order.run(Op.I, up)
    for _ in range(num_ranks - rank):
        order.run(Op.I, down)
        order.pay(down)
    for stage in (up, down):
        while order.num_owed(stage):
            order.pay(stage)
    return order.actions


def v_half(ranks: int, microbatches: int) -> Schedule:
    """Repeat a block of F, I and W of both stages that needs half the memory of 1F1B.

        rank 0 0F00F1.........5F05I05W00F2...5F15I10I05W10W0...5F25I20I15W20W1...0I20W2
        rank 1 ...1F0......4F01F1...4I04W04F11F21I01W04I14W14F21I11W14I24W2...1I21W2...
        rank 2 ......2F03F0......2F13F13I02I03W02F22W03F23I12I13W12W1...3I22I23W22W2...
        F- forward, I~ input gradient, W+ weight gradient, . idle;
        makespan 24, bubble 25.0% (idle over total)

    K is the number of ranks; F, I and W are the times of a forward, an input gradient and a weight
    gradient of a stage. Every rank keeps the activations of at most 2 floor(K / 2 + 1) (stage,
    micro-batch) pairs, half the memory of 1F1B. At F = I = W a rank is idle for about 3.5 K F;
    1F1B, with stages twice as large, is idle for 6 (K - 1) F. Source: Qi et al., Pipeline
    Parallelism with Controllable Memory, NeurIPS 2024, figure 4.
    """
    slots = [
        (rank, 6 * index + start, Action(op, stage, index))
        for rank in range(ranks)
        for op, stage, start in _v_half_block(rank, ranks)
        for index in range(microbatches)
    ]
    return tabulate("v_half", wave(ranks, 1, microbatches), in_slots(slots, ranks))


def _v_half_block(rank: int, num_ranks: int) -> list[tuple[Op, int, int]]:
    """Return (op, stage, slot) of one micro-batch; blocks repeat every 6 slots without conflict.

    F and I both advance 2 slots per rank down the V and 1 slot per rank up. With these start slots,
    the four slots of a rank differ modulo 6; the two W take the remaining slots.
    """
    down, up = rank, 2 * num_ranks - 1 - rank
    odd = num_ranks % 2
    forward_up = 3 * num_ranks + (-1 if odd else 1)
    back_down = forward_up + 1
    back_up = back_down + 3 * num_ranks - (2 if odd else -2)
    block = [
        (Op.F, down, 2 * rank),
        (Op.F, up, forward_up - rank),
        (Op.I, up, back_down + 2 * rank),
        (Op.I, down, back_up - rank),
    ]
    left = set(range(6)) - {start % 6 for _, _, start in block}
    for _, stage, start in block[2:]:
        first = min(left, key=lambda slot: (slot - start) % 6)
        left.remove(first)
        block.append((Op.W, stage, start + (first - start) % 6))
    return block
