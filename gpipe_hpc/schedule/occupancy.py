"""What lives on a rank at once: activations and receive buffers, counted along its list."""

from collections.abc import Iterable

from gpipe_hpc.schedule.actions import RECEIVES, Action, Op
from gpipe_hpc.schedule.dependencies import CONSUMERS, arrival


def peak_activations(actions: Iterable[Action]) -> int:
    """Return the most stage micro-batches kept at once on a rank, given its actions in order.

    One counts from its ``F`` to the end of its ``B`` or ``W``; without either it is not kept.
    """
    actions = tuple(actions)
    freed = {(a.stage, a.microbatch) for a in actions if a.op in (Op.B, Op.W)}
    live = peak = 0
    for action in actions:
        if action.op is Op.F:
            peak = max(peak, live + 1)
            live += (action.stage, action.microbatch) in freed
        elif action.op in (Op.B, Op.W):
            live -= 1
    return peak


def peak_receives(actions: Iterable[Action]) -> int:
    """Return the most receive buffers posted and not yet consumed at once on a rank."""
    posted: set[Action] = set()
    peak = 0
    for action in actions:
        if action.op in RECEIVES:
            posted.add(action)
            peak = max(peak, len(posted))
        elif action.op in CONSUMERS:
            posted.discard(arrival(action))
    return peak
