"""DualPipe and DualPipeV: forwards of one direction overlap with backwards of the other."""

from collections.abc import Sequence
from functools import partial

from gpipe_hpc.schedule.families.options import even_ranks
from gpipe_hpc.schedule.families.orders import RankOrder, tabulate
from gpipe_hpc.schedule.table.actions import Op
from gpipe_hpc.schedule.table.placements import mirrored, wave
from gpipe_hpc.schedule.table.schedule import Placement, Schedule


def dualpipe(ranks: int, microbatches: int) -> Schedule:
    """Feed micro-batches from both ends; each half of the ranks runs the order of `dualpipe_v`.

        rank 0 0F00F20F43F13I13W13F30F63B3===...3F50B0===3B5===...3F70B2===3B7===0I40W40I60W6
        rank 1 ...1F02F11F22F31F42B1===2F51B0===1F62B3===2F71B2===2B5===1B4===...2I71I62W71W6
        rank 2 ...1F12F01F32F21F52B0===2F41B1===1F72B2===2F61B3===2B4===1B5===...2I61I72W61W7
        rank 3 0F10F30F53F03I03W03F20F73B2===...3F40B1===3B4===...3F60B3===3B6===0I50W50I70W7
        F- forward, B= backward, I~ input gradient, W+ weight gradient, . idle;
        makespan 26, bubble 7.7% (idle over total)

    K ranks run M micro-batches; F, I and W are the times of a forward, an input gradient and a
    weight gradient of a stage. `microbatches` counts both directions, which alternate; each stage
    is held by two ranks. Every rank keeps at most K + 1 micro-batches. An F and the B that it
    overlaps form one block: they are computed one after the other and their results are sent
    together. At F = I = W = t and even M of at least 2K, a rank is idle for (K - 2) t of
    (3 M + K - 2) t, and for half of that if each result were sent at once. Source: DeepSeek-AI,
    DeepSeek-V3 Technical Report, 2024, figure 5.
    """
    even_ranks("dualpipe", ranks)
    half = ranks // 2
    made_for = max(-(-microbatches // 2), ranks)
    orders: list[RankOrder] = []
    for rank in range(ranks):
        near, far = min(rank, ranks - 1 - rank), max(rank, ranks - 1 - rank)
        # The downward pipeline has stage `rank` on this rank and runs the even micro-batches.
        order = RankOrder(partial(_in_turn, rank))
        orders.append(_rank(order, near, half, made_for, (near, far)))
    route_of = [index % 2 for index in range(microbatches)]
    return _table("dualpipe", mirrored(ranks, 2, route_of), orders)


def dualpipe_v(ranks: int, microbatches: int) -> Schedule:
    """Run DualPipe on a V of 2K stages: half as many ranks, and one copy of the weights.

        rank 0 0F00F10F23F03I03W03F10F33B1===...3F20B0===3B2===...3F30B1===3B3===0I20W20I30W3
        rank 1 ...1F02F01F12F11F22B0===2F21B0===1F32B1===2F31B1===2B2===1B2===...2I31I32W31W3
        F- forward, B= backward, I~ input gradient, W+ weight gradient, . idle;
        makespan 26, bubble 7.7% (idle over total)

    K ranks run M micro-batches; F, I and W are the times of a forward, an input gradient and a
    weight gradient of a stage. Every rank keeps at most 2K + 1 micro-batches over its two stages.
    At F = I = W = t / 2 for each stage and M of at least 2K, a rank is idle for (K - 1) t of
    (3 M + K - 1) t. Source: DeepSeek-AI, DualPipe, dualpipev.py, 2025, after the V of Qi et al.
    """
    made_for = max(microbatches, 2 * ranks)
    orders = [
        _rank(RankOrder(), rank, ranks, made_for, (rank, 2 * ranks - 1 - rank))
        for rank in range(ranks)
    ]
    return _table("dualpipe_v", wave(ranks, 1, microbatches), orders)


def _table(name: str, placement: Placement, orders: Sequence[RankOrder]) -> Schedule:
    rows = [order.actions for order in orders]
    overlaps = [pair for order in orders for pair in order.overlaps]
    return tabulate(name, placement, rows, overlaps)


def _in_turn(rank: int, stage: int, index: int) -> int:
    """Return the index of the `index`-th micro-batch that runs a stage on a mirrored rank."""
    return 2 * index + (stage != rank)


def _rank(
    order: RankOrder, rank: int, num_ranks: int, num_each: int, stages: tuple[int, int]
) -> RankOrder:
    """Fill in the order of a rank whose two stages are `rank` steps from either end; return it.

    Each of the two stages runs `num_each` micro-batches, at least 2K.
    """
    near, far = stages
    behind = num_ranks - 1 - rank
    for _ in range(2 * behind):
        order.run(Op.F, near)
    for _ in range(rank + 1):
        order.run(Op.F, near)
        order.run(Op.F, far)
    for _ in range(behind):
        order.run(Op.I, far)
        order.pay()
        order.run(Op.F, far)
    for step in range(num_each - 2 * num_ranks + rank + 1):
        if step or behind:
            order.overlap(near, far)
        else:  # on the last rank, do not delay the first gradient by a block
            order.run(Op.F, near)
            order.run(Op.B, far)
        order.overlap(far, near)
    for _ in range(behind):
        order.run(Op.B, far)
        order.overlap(far, near)
    # The second half runs only I here; its W fills idle slots at the end.
    ends = [stage for _ in range(rank + 1) for stage in (far, near)]
    for index, stage in enumerate(ends):
        order.run(Op.B if index <= rank else Op.I, stage)
    for _ in range(behind):
        order.pay()
        order.run(Op.I, near)
    for _ in range(rank + 1):
        order.pay()
    return order
