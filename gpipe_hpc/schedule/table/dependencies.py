"""The data flow of a training step: which action needs the result of which.

The only place that states it. Lowering, checker and simulator read it from here.
"""

from collections.abc import Collection
from types import MappingProxyType
from typing import Final, NamedTuple

from gpipe_hpc.schedule.table.actions import RECEIVES, SENDS, Action, Op
from gpipe_hpc.schedule.table.schedule import Placement, Skip

# The ops that may need what another stage made.
CONSUMERS: Final = frozenset({Op.F, Op.B, Op.I})
# By which op that comes from another rank.
ARRIVES_BY: Final = MappingProxyType({Op.F: Op.RECV_F, Op.B: Op.RECV_B, Op.I: Op.RECV_B})
# What is needed only where the table has it.
OPTIONAL: Final = frozenset({Op.R, Op.FETCH})

_COUNTERPART: Final = {
    Op.SEND_F: (Op.RECV_F, 1),
    Op.RECV_F: (Op.SEND_F, -1),
    Op.SEND_B: (Op.RECV_B, -1),
    Op.RECV_B: (Op.SEND_B, 1),
}


def dependencies(
    action: Action, num_stages: int, num_microbatches: int, skips: Collection[Skip] = ()
) -> tuple[Action, ...]:
    """Return the actions whose results an action needs, those of its own stage first.

    A need for ``I`` or ``W`` is also met by ``B``, which is the two in one (see `provides`). A need
    for ``R`` or ``FETCH`` binds where the table has that action. In a lowered table a value made on
    another rank comes through the ``RECV`` that `arrival` names. The destination of a skip needs
    the forward of its source, the source the gradient of its destination. ``REDUCE_GRAD`` needs
    every ``W`` of its stage; each rank that holds the stage waits for those it runs itself.
    """
    op, stage, microbatch, _ = action
    match op:
        case Op.F:
            before = [stage - 1] if stage > 0 else []
            before += [source for source, destination in skips if destination == stage]
            return tuple(Action(Op.F, other, microbatch) for other in before)
        case Op.B | Op.I:
            own = (Action(kind, stage, microbatch) for kind in (Op.F, Op.FETCH, Op.R))
            behind = [stage + 1] if stage < num_stages - 1 else []
            behind += [destination for source, destination in skips if source == stage]
            return (*own, *(Action(Op.I, other, microbatch) for other in behind))
        case Op.W:
            return (Action(Op.I, stage, microbatch),)
        case Op.R:
            return Action(Op.F, stage, microbatch), Action(Op.FETCH, stage, microbatch)
        case Op.FETCH:
            return (Action(Op.OFFLOAD, stage, microbatch),)
        case Op.SEND_F | Op.OFFLOAD:
            return (Action(Op.F, stage, microbatch),)
        case Op.SEND_B:
            return (Action(Op.I, stage, microbatch),)
        case Op.RECV_F | Op.RECV_B:
            return (counterpart(action),)
        case Op.REDUCE_GRAD:
            return tuple(Action(Op.W, stage, index) for index in range(num_microbatches))


def provides(action: Action) -> tuple[Action, ...]:
    """Return the needs that an action meets: itself, and for ``B`` its ``I`` and its ``W``."""
    if action.op is Op.B:
        return (
            Action(Op.I, action.stage, action.microbatch),
            Action(Op.W, action.stage, action.microbatch),
        )
    return (action,)


def counterpart(action: Action) -> Action:
    """Return the other half of a transfer: of a ``SEND`` its ``RECV``, and the reverse."""
    assert action.op in SENDS or action.op in RECEIVES, f"{action} is no half of a transfer"
    op, step = _COUNTERPART[action.op]
    if action.peer is not None:
        return Action(op, action.peer, action.microbatch, action.stage)
    return Action(op, action.stage + step, action.microbatch)


def skip_of(transfer: Action) -> Skip | None:
    """Return the skip that a transfer goes over, forward or back; None if it is a neighbour's."""
    if transfer.peer is None:
        return None
    if transfer.op in (Op.SEND_F, Op.RECV_B):
        return transfer.stage, transfer.peer
    return transfer.peer, transfer.stage


def arrival(action: Action, source: int | None = None) -> Action:
    """Return the ``RECV`` by which an action gets what another stage on another rank made.

    `source` is that stage: the neighbour if None, else one that a skip leads from.
    """
    assert action.op in CONSUMERS, f"{action} needs nothing of another stage"
    op, stage, microbatch, _ = action
    neighbour = stage - 1 if op is Op.F else stage + 1
    return Action(ARRIVES_BY[op], stage, microbatch, None if source == neighbour else source)


class Channel(NamedTuple):
    """One direction between two stages on one route; first in, first out."""

    source: int
    destination: int
    route: int


def channel_of(transfer: Action, placement: Placement) -> Channel:
    """Return the channel of a ``SEND`` or ``RECV``."""
    assert transfer.microbatch is not None, f"{transfer} has no micro-batch"
    other = counterpart(transfer).stage
    route = placement.route_of[transfer.microbatch]
    if transfer.op in SENDS:
        return Channel(transfer.stage, other, route)
    return Channel(other, transfer.stage, route)
