"""The data flow of a training step: which values each action needs and which action makes them.

This is the only definition of the data flow; each op has one row in `_NEEDS`. Lowering, checker,
simulator, memory accounting, rendering and search all use it, mostly through `precedence`,
`lifetimes` and `waits`.
"""

from collections.abc import Collection, Iterator
from enum import Enum, StrEnum, auto
from types import MappingProxyType
from typing import Final, NamedTuple

from gpipe_hpc.schedule.table.actions import RECEIVES, SENDS, Action, Op
from gpipe_hpc.schedule.table.schedule import Placement, Skip


class ValueKind(StrEnum):
    """The kind of value that one action produces and another consumes."""

    OUTPUT = "output"
    GRADIENT = "gradient"
    # Tensors that a forward saves for its backward, or for the recomputation if there is one.
    ACTIVATIONS = "activations"
    # The part of the activations that only the input gradient needs.
    INPUT_SHARE = "activations for the input gradient"
    RECOMPUTED = "recomputed activations"
    COPY = "offloaded copy"
    MESSAGE = "message"
    WEIGHT_GRADIENT = "weight gradient"
    PARAMETERS = "gathered parameters"


class _Location(Enum):
    """Where a required value is made, relative to the stage and micro-batch of its consumer."""

    OWN = auto()  # same stage, same micro-batch
    BEFORE = auto()  # the previous stage and the sources of skips to this stage
    BEHIND = auto()  # the next stage and the destinations of skips from this stage
    PARTNER = auto()  # the other half of a transfer
    ALL = auto()  # same stage, every micro-batch
    STAGE = auto()  # same stage, one action for all micro-batches


class _Dependency(NamedTuple):
    """One dependency of an op: the op that makes the values, their kinds, and where it runs."""

    maker: Op
    things: tuple[ValueKind, ...]
    where: _Location = _Location.OWN


_BACKWARD: Final = (
    _Dependency(Op.F, (ValueKind.ACTIVATIONS, ValueKind.INPUT_SHARE)),
    _Dependency(Op.FETCH, (ValueKind.ACTIVATIONS,)),
    _Dependency(Op.R, (ValueKind.RECOMPUTED,)),
    _Dependency(Op.I, (ValueKind.GRADIENT,), _Location.BEHIND),
)
_NEEDS: Final = MappingProxyType(
    {
        Op.F: (
            _Dependency(Op.UNSHARD, (ValueKind.PARAMETERS,), _Location.STAGE),
            _Dependency(Op.F, (ValueKind.OUTPUT,), _Location.BEFORE),
        ),
        Op.UNSHARD: (),
        Op.B: _BACKWARD,
        Op.I: _BACKWARD,
        # I passes on the activations that W needs.
        Op.W: (_Dependency(Op.I, (ValueKind.ACTIVATIONS, ValueKind.RECOMPUTED)),),
        Op.R: (
            _Dependency(Op.F, (ValueKind.ACTIVATIONS,)),
            _Dependency(Op.FETCH, (ValueKind.ACTIVATIONS,)),
        ),
        Op.OFFLOAD: (_Dependency(Op.F, (ValueKind.ACTIVATIONS,)),),
        Op.FETCH: (_Dependency(Op.OFFLOAD, (ValueKind.COPY,)),),
        Op.SEND_F: (_Dependency(Op.F, (ValueKind.OUTPUT,)),),
        Op.SEND_B: (_Dependency(Op.I, (ValueKind.GRADIENT,)),),
        Op.RECV_F: (_Dependency(Op.SEND_F, (ValueKind.MESSAGE,), _Location.PARTNER),),
        Op.RECV_B: (_Dependency(Op.SEND_B, (ValueKind.MESSAGE,), _Location.PARTNER),),
        Op.REDUCE_GRAD: (_Dependency(Op.W, (ValueKind.WEIGHT_GRADIENT,), _Location.ALL),),
        Op.AVERAGE: (_Dependency(Op.W, (ValueKind.WEIGHT_GRADIENT,), _Location.ALL),),
    }
)
# Ops whose result is needed only if the table contains them.
OPTIONAL: Final = frozenset({Op.R, Op.FETCH, Op.UNSHARD})
# For each op that uses a value of another stage: the op that receives it from another rank.
ARRIVES_BY: Final = MappingProxyType(
    {
        op: Op.RECV_F if rule.where is _Location.BEFORE else Op.RECV_B
        for op, rules in _NEEDS.items()
        for rule in rules
        if rule.where in (_Location.BEFORE, _Location.BEHIND)
    }
)
CONSUMERS: Final = frozenset(ARRIVES_BY)

_COUNTERPART: Final = {
    Op.SEND_F: (Op.RECV_F, 1),
    Op.RECV_F: (Op.SEND_F, -1),
    Op.SEND_B: (Op.RECV_B, -1),
    Op.RECV_B: (Op.SEND_B, 1),
}
# A full backward B is equivalent to these two.
_HALVES: Final = (Op.I, Op.W)


class Need(NamedTuple):
    """An action whose result is required, and the kinds of values that are used, main one first."""

    action: Action
    things: tuple[ValueKind, ...]


def needs(
    action: Action, num_stages: int, num_microbatches: int, skips: Collection[Skip] = ()
) -> tuple[Need, ...]:
    """Return the actions whose results an action requires, with the values used; own stage first.

    A ``B`` also satisfies a need for ``I`` or ``W``, because it does both (see `provides`). A need
    for ``R``, ``FETCH`` or ``UNSHARD`` applies only if the table contains that action; ``UNSHARD``
    is returned without a bucket and stands for all buckets of the stage on the same rank. In a
    lowered table, a value made on another rank arrives through the ``RECV`` returned by `arrival`.
    The destination of a skip needs the forward of its source, and the source needs the gradient of
    its destination. ``REDUCE_GRAD`` and ``AVERAGE`` need every ``W`` of their stage; each rank that
    holds the stage waits for those that it runs itself.
    """
    op, stage, microbatch, _ = action
    found: list[Need] = []
    for maker, things, where in _NEEDS[op]:
        if where is _Location.OWN:
            found.append(Need(Action(maker, stage, microbatch), things))
        elif where is _Location.PARTNER:
            found.append(Need(counterpart(action), things))
        elif where is _Location.STAGE:
            found.append(Need(Action(maker, stage), things))
        elif where is _Location.ALL:
            found += (Need(Action(maker, stage, m), things) for m in range(num_microbatches))
        else:
            others = _neighbours(stage, where, num_stages, skips)
            found += (Need(Action(maker, other, microbatch), things) for other in others)
    return tuple(found)


def _neighbours(
    stage: int, where: _Location, num_stages: int, skips: Collection[Skip]
) -> Iterator[int]:
    """Yield the stages that a stage receives values from: its neighbour first, then over skips."""
    if where is _Location.BEFORE:
        if stage > 0:
            yield stage - 1
        yield from (source for source, destination in skips if destination == stage)
    else:
        if stage < num_stages - 1:
            yield stage + 1
        yield from (destination for source, destination in skips if source == stage)


def dependencies(
    action: Action, num_stages: int, num_microbatches: int, skips: Collection[Skip] = ()
) -> tuple[Action, ...]:
    """Return the actions whose results an action needs, as in `needs`."""
    return tuple(need.action for need in needs(action, num_stages, num_microbatches, skips))


def provides(action: Action) -> tuple[Action, ...]:
    """Return the needs that an action satisfies: itself or, for a ``B``, both ``I`` and ``W``."""
    if action.op is Op.B:
        return tuple(Action(half, action.stage, action.microbatch) for half in _HALVES)
    return (action,)


def users_of(maker: Op) -> frozenset[Op]:
    """Return the ops that require the result of `maker` for the same stage and micro-batch."""
    return frozenset(
        op
        for op, rules in _NEEDS.items()
        if any(rule.maker is maker and rule.where is _Location.OWN for rule in rules)
    )


def uses(op: Op) -> frozenset[ValueKind]:
    """Return the kinds of values of its own stage and micro-batch that an op consumes."""
    own = (rule for rule in _NEEDS[op] if rule.where is _Location.OWN)
    return frozenset(thing for rule in own for thing in rule.things)


def makes(op: Op) -> frozenset[ValueKind]:
    """Return the kinds of values that an op produces, without those that it only passes on."""
    provided = _HALVES if op is Op.B else (op,)
    wanted = (rule for rules in _NEEDS.values() for rule in rules if rule.maker in provided)
    return frozenset(thing for rule in wanted for thing in rule.things) - uses(op)


def counterpart(action: Action) -> Action:
    """Return the other half of a transfer: the ``RECV`` of a ``SEND`` or vice versa."""
    assert action.op in SENDS or action.op in RECEIVES, f"{action} is not a transfer"
    op, step = _COUNTERPART[action.op]
    if action.peer is not None:
        return Action(op, action.peer, action.microbatch, action.stage)
    return Action(op, action.stage + step, action.microbatch)


def skip_of(transfer: Action) -> Skip | None:
    """Return the skip that a transfer uses, forward or backward, or None between neighbours."""
    if transfer.peer is None:
        return None
    if transfer.op in (Op.SEND_F, Op.RECV_B):
        return transfer.stage, transfer.peer
    return transfer.peer, transfer.stage


def arrival(action: Action, source: int | None = None) -> Action:
    """Return the ``RECV`` that delivers an action's input from another rank.

    `source` is the stage that made the value; None means the neighbour.
    """
    assert action.op in CONSUMERS, f"{action} uses no value of another stage"
    op, stage, microbatch, _ = action
    neighbour = stage - 1 if op is Op.F else stage + 1
    return Action(ARRIVES_BY[op], stage, microbatch, None if source == neighbour else source)


class Channel(NamedTuple):
    """One direction between two stages on one route; messages arrive in the order sent (FIFO)."""

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
