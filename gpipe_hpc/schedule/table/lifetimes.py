"""Lifetimes of values in a rank's action list: from which action to which each value is in memory.

A value exists from the start of the action that makes it to the end of the last action that uses
it, as the data flow in `dependencies` defines. Checker, memory accounting, rendering, planner and
search count these lifetimes.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpipe_hpc.schedule.table.actions import COMPUTE, RECEIVES, SENDS, Action, Op
from gpipe_hpc.schedule.table.dependencies import (
    ARRIVES_BY,
    CONSUMERS,
    ValueKind,
    counterpart,
    makes,
    needs,
    provides,
    uses,
)
from gpipe_hpc.schedule.table.rows import Row, numbers_of
from gpipe_hpc.schedule.table.schedule import Skip

# Values that a rank keeps for a later action of the same stage and micro-batch.
_KEPT: Final = frozenset(
    {ValueKind.ACTIVATIONS, ValueKind.INPUT_SHARE, ValueKind.RECOMPUTED, ValueKind.COPY}
)
_MAKES: Final = MappingProxyType({op: tuple(sorted(makes(op) & _KEPT)) for op in Op})
_USES: Final = MappingProxyType({op: tuple(sorted(uses(op) & _KEPT)) for op in Op})
# Values passed from one stage to another.
_PASSED_ON: Final = frozenset({ValueKind.OUTPUT, ValueKind.GRADIENT})
# Ops that complete the backward of a micro-batch on a stage.
ENDS_BACKWARD: Final = frozenset(op for op in Op if ValueKind.WEIGHT_GRADIENT in makes(op))
STARTS_ACTIVATIONS: Final = frozenset(op for op in COMPUTE if ValueKind.ACTIVATIONS in makes(op))

# A stage and a micro-batch of it.
Place = tuple[int, int | None]


class Lifetime(NamedTuple):
    """The lifetime of a value: from the start of one action of a rank to the end of another.

    `first` and `last` are positions in the rank's action list. `stage` and `microbatch` are those
    of the action that makes the value, or of its ``RECV``. `peer` is the stage that the value is
    passed to or, for a receive buffer, received from.
    """

    thing: ValueKind
    stage: int
    microbatch: int | None
    first: int
    last: int
    peer: int | None = None

    @property
    def place(self) -> Place:
        """Return the (stage, micro-batch) pair."""
        return self.stage, self.microbatch


def kept_lifetimes(row: Sequence[Action], things: Collection[ValueKind] = _KEPT) -> list[Lifetime]:
    """Return the lifetimes of values that a rank keeps between actions of a stage and micro-batch.

    ``ACTIVATIONS`` exist from ``F`` and ``RECOMPUTED`` from ``R``, both to the end of ``B`` or
    ``W``, or of the action that made them if there is no backward. ``INPUT_SHARE`` is the part of
    both that is freed after ``B`` or ``I``. A ``COPY`` is in host memory from ``OFFLOAD`` to
    ``FETCH``; for the times when the original is not on the device, see `offloaded_lifetimes`.
    """
    make = {op: [thing for thing in own if thing in things] for op, own in _MAKES.items()}
    use = {op: [thing for thing in own if thing in things] for op, own in _USES.items()}
    first: dict[tuple[ValueKind, int, int | None], int] = {}
    last: dict[tuple[ValueKind, int, int | None], int] = {}
    for at, (op, stage, microbatch, _) in enumerate(row):
        for thing in use[op]:
            last[thing, stage, microbatch] = at
        for thing in make[op]:
            first.setdefault((thing, stage, microbatch), at)
    return [Lifetime(*key, start, last.get(key, start)) for key, start in first.items()]


def offloaded_lifetimes(row: Sequence[Action]) -> list[Lifetime]:
    """Return the lifetimes during which offloaded activations are in host memory only.

    The copy to the host runs in parallel with the compute action after the ``OFFLOAD``, and memory
    is reused only after both. The activations are therefore absent from the end of that action to
    the start of ``FETCH``. Activations fetched before that are omitted. All values are of kind
    ``COPY``.
    """
    found: list[Lifetime] = []
    leaving: list[Place] = []
    gone: dict[Place, int] = {}
    for at, (op, stage, microbatch, _) in enumerate(row):
        if op is Op.OFFLOAD:
            leaving.append((stage, microbatch))
        elif op in COMPUTE:
            gone.update(dict.fromkeys(leaving, at))
            leaving.clear()
        elif op is Op.FETCH and (stage, microbatch) in gone:
            found.append(Lifetime(ValueKind.COPY, stage, microbatch, gone[stage, microbatch], at))
    return found


def received(row: Sequence[Action]) -> list[Lifetime]:
    """Return the lifetimes of a rank's receive buffers, as values of kind ``MESSAGE``.

    A buffer exists from its ``RECV`` to the end of the action that consumes the message, or to the
    end of the list if no action does.
    """
    posted: dict[tuple[Op, int, int | None], list[tuple[int, int | None]]] = defaultdict(list)
    lives: list[Lifetime] = []

    def end(place: tuple[Op, int, int | None], last: int) -> None:
        for first, peer in posted.pop(place, ()):
            lives.append(Lifetime(ValueKind.MESSAGE, *place[1:], first, last, peer))

    for at, (op, stage, microbatch, peer) in enumerate(row):
        if op in RECEIVES:
            posted[op, stage, microbatch].append((at, peer))
        elif op in ARRIVES_BY:
            end((ARRIVES_BY[op], stage, microbatch), at)
    for place in list(posted):
        end(place, len(row) - 1)
    return lives


def in_flight(
    row: Sequence[Action], num_stages: int, skips: Collection[Skip] = ()
) -> Iterator[Lifetime]:
    """Yield the lifetimes of outputs and gradients passed on by a rank's stages, one per consumer.

    Each value exists from the action that makes it to its ``SEND``, or to the action of another
    stage on the same rank that consumes it.
    """
    makers: dict[Action, int] = {}
    wanted: dict[tuple[Op, int, int | None], list[tuple[Action, ValueKind]]] = {}
    for at, action in enumerate(row):
        op, stage, microbatch, peer = action
        if op in SENDS or op in CONSUMERS:
            kind = op, stage, peer
            if kind not in wanted:
                wanted[kind] = [
                    (need.action, thing)
                    for need in needs(action, num_stages, 1, skips)
                    for thing in need.things
                    if thing in _PASSED_ON
                ]
            for need, thing in wanted[kind]:
                first = makers.get(need._replace(microbatch=microbatch))
                if first is not None:
                    yield Lifetime(thing, need.stage, microbatch, first, at, _consumer(action))
        for need in provides(action):
            makers[need] = at


def _consumer(action: Action) -> int:
    """Return the stage that consumes a value: a ``SEND``'s destination, else the action's stage."""
    return counterpart(action).stage if action.op in SENDS else action.stage


class Peak(NamedTuple):
    """The largest number of values that exist at once, and the position that first reaches it."""

    size: int
    position: int


def peak_activations(row: Sequence[Action]) -> Peak:
    """Return the largest number of micro-batches of a stage whose activations a rank keeps at once.

    Each (stage, micro-batch) pair counts as one, whether it keeps full activations or only inputs
    for recomputation. Pairs that are offloaded (`offloaded_lifetimes`) do not count.
    """
    row = Row.of(row)
    ops = row.ops
    # Activations are added at the start of an action and freed at the end of an action.
    added: list[_Positions] = []
    freed: list[_Positions] = []
    if any(ValueKind.ACTIVATIONS in _MAKES[op] for op in ops):
        firsts, lasts = _bounds_of_lifetimes(row, ValueKind.ACTIVATIONS)
        added.append(firsts)
        freed.append(lasts)
    if Op.OFFLOAD in ops:
        gone, back = _bounds_of_offloads(row)
        freed.append(gone)
        added.append(back)
    return _peak(np.sort(np.concatenate(added)), np.sort(np.concatenate(freed))) if added else _NONE


_Positions = NDArray[np.intp]
"""Positions in a rank's list."""


def _bounds_of_lifetimes(row: Row, thing: ValueKind) -> tuple[_Positions, _Positions]:
    """Return the positions where values of a kind are made, and those of their last use."""
    makes, made = _places(row, [stage if thing in _MAKES[op] else -1 for op, stage, _ in row.kinds])
    uses, used = _places(row, [stage if thing in _USES[op] else -1 for op, stage, _ in row.kinds])
    made, first = np.unique(made, return_index=True)
    used, last = np.unique(used[::-1], return_index=True)
    firsts = makes[first]
    lasts = firsts.copy()
    _, own, user = np.intersect1d(made, used, assume_unique=True, return_indices=True)
    lasts[own] = uses[::-1][last[user]]
    return firsts, lasts


def _bounds_of_offloads(row: Row) -> tuple[_Positions, _Positions]:
    """Return the positions after which activations are offloaded, and those of their return."""
    firsts, lasts = _bounds_of_lifetimes(row, ValueKind.COPY)
    computes = np.array([op in COMPUTE for op, _, _ in row.kinds], bool)[numbers_of(row.which)]
    at = np.append(np.flatnonzero(computes), len(row))
    gone = at[np.searchsorted(at, firsts, "right")]
    return gone[gone < lasts], lasts[gone < lasts]


def _places(row: Row, groups: Sequence[int]) -> "tuple[_Positions, NDArray[np.int64]]":
    """Return the positions of selected actions, and a key for each from its group and micro-batch.

    `groups` has the group number of each kind of action of the row; -1 leaves the kind out.
    """
    group = np.array(groups, np.int64)[numbers_of(row.which)]
    at = np.flatnonzero(group >= 0)
    return at, (group[at] << 32) + numbers_of(row.numbers)[at]


def bounds_of(rows: Iterable[Sequence[Action]]) -> tuple[int, ...]:
    """Return the peak number of kept activations of each rank, for `Schedule.max_activations`."""
    return tuple(peak_activations(row).size for row in rows)


def peak_receives(row: Sequence[Action]) -> Peak:
    """Return the largest number of receive buffers that a rank has posted at once."""
    row = Row.of(row)
    # Group receives by stage and by direction (outputs or gradients).
    awaited = [(op, stage) for op, stage, _ in row.kinds if op in RECEIVES]
    group = {each: number for number, each in enumerate(dict.fromkeys(awaited))}
    posts = [op in RECEIVES for op, _, _ in row.kinds]
    wanted = [(ARRIVES_BY.get(op, op), stage) for op, stage, _ in row.kinds]
    at, keys = _places(row, [group.get(each, -1) for each in wanted])
    if not len(at):
        return _NONE
    is_post = np.array(posts, bool)[numbers_of(row.which)[at]]
    # Sort by group and micro-batch, in list order; a receive is followed by its consumer.
    order = np.argsort(keys, kind="stable")
    takes = np.where(is_post[order], len(order), np.arange(len(order)))
    taken_by = np.minimum.accumulate(takes[::-1])[::-1]
    taker = order[np.minimum(taken_by, len(order) - 1)]
    is_taken = is_post[order] & (taken_by < len(order)) & (keys[taker] == keys[order])
    return _peak(at[is_post], np.sort(at[taker[is_taken]]))


def _peak(added: _Positions, freed: _Positions) -> Peak:
    """Return the peak number of values, given the sorted positions where values are made and freed.

    A value is added at the start of an action and freed at the end of one.
    """
    sizes = np.arange(1, len(added) + 1) - np.searchsorted(freed, added)
    most = int(np.argmax(sizes)) if len(sizes) else 0
    return Peak(int(sizes[most]), int(added[most])) if len(sizes) and sizes[most] > 0 else _NONE


_NONE: Final = Peak(0, 0)
