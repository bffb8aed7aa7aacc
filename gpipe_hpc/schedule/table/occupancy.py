"""What lives on a rank at once: activations and receive buffers, counted along its list."""

from collections.abc import Sequence
from typing import NamedTuple

from gpipe_hpc.schedule.table.actions import RECEIVES, Action, Op
from gpipe_hpc.schedule.table.dependencies import ARRIVES_BY


class Peak(NamedTuple):
    """The most of something at once, and the position in the list that first reaches it."""

    size: int
    position: int


def peak_activations(actions: Sequence[Action]) -> Peak:
    """Return the most stage micro-batches kept at once on a rank, given its actions in order.

    One counts from its ``F`` to the end of its ``B`` or ``W``, but not from ``OFFLOAD`` to
    ``FETCH``; without a backward it is not kept.
    """
    freed = {(a.stage, a.microbatch) for a in actions if a.op in (Op.B, Op.W)}
    live, peak = 0, Peak(0, 0)
    for position, action in enumerate(actions):
        if action.op in (Op.F, Op.FETCH):
            if live + 1 > peak.size:
                peak = Peak(live + 1, position)
            live += (action.stage, action.microbatch) in freed
        elif action.op in (Op.B, Op.W, Op.OFFLOAD):
            live -= 1
    return peak


def peak_receives(actions: Sequence[Action]) -> Peak:
    """Return the most receive buffers posted at once on a rank, given its actions in order.

    One counts from its ``RECV`` to the end of the action that consumes it, together with those of
    the skips that lead to it.
    """
    posted: dict[tuple[Op, int, int | None], int] = {}
    live, peak = 0, Peak(0, 0)
    for position, (op, stage, microbatch, _) in enumerate(actions):
        if op in RECEIVES:
            place = op, stage, microbatch
            posted[place] = posted.get(place, 0) + 1
            live += 1
            if live > peak.size:
                peak = Peak(live, position)
        elif op in ARRIVES_BY:
            live -= posted.pop((ARRIVES_BY[op], stage, microbatch), 0)
    return peak
