"""Who lives when: from which action of a rank's list to which each thing is there.

Read off the data flow: a thing is there from the start of the action that makes it to the end of
the last one that needs it. Checker, memory, drawings, planning and searches all count these lives.
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
    Thing,
    counterpart,
    makes,
    needs,
    provides,
    uses,
)
from gpipe_hpc.schedule.table.rows import Row, numbers_of
from gpipe_hpc.schedule.table.schedule import Skip

# What stays with its stage and micro-batch, from one action of the rank to a later one.
_STAYS: Final = frozenset({Thing.ACTIVATIONS, Thing.INPUT_SHARE, Thing.RECOMPUTED, Thing.COPY})
_MAKES: Final = MappingProxyType({op: tuple(sorted(makes(op) & _STAYS)) for op in Op})
_USES: Final = MappingProxyType({op: tuple(sorted(uses(op) & _STAYS)) for op in Op})
# What goes from one stage to another.
_GOES: Final = frozenset({Thing.OUTPUT, Thing.GRADIENT})
# With these the backward of a stage's micro-batch is done.
ENDS_BACKWARD: Final = frozenset(op for op in Op if Thing.WEIGHT_GRADIENT in makes(op))
STARTS_ACTIVATIONS: Final = frozenset(op for op in COMPUTE if Thing.ACTIVATIONS in makes(op))

# A stage and a micro-batch of it.
Place = tuple[int, int | None]


class Life(NamedTuple):
    """A thing and when it is there: from the start of one action of a rank to the end of another.

    `first` and `last` are positions in the rank's list; `stage` and `microbatch` those of the
    action that makes it, or of the ``RECV``; `peer` is the stage that a value goes to, or for one
    in a receive buffer comes from.
    """

    thing: Thing
    stage: int
    microbatch: int | None
    first: int
    last: int
    peer: int | None = None

    @property
    def place(self) -> Place:
        """Return stage and micro-batch."""
        return self.stage, self.microbatch


def kept(row: Sequence[Action], things: Collection[Thing] = _STAYS) -> list[Life]:
    """Return the lives of what a rank keeps for actions of the same stage and micro-batch.

    ``ACTIVATIONS`` of a place are there from its ``F``, ``RECOMPUTED`` from its ``R``, both to the
    end of its ``B`` or ``W``; without a backward, to the end of what made them. ``INPUT_SHARE`` is
    the part of both that ends with ``B`` or ``I``. A ``COPY`` is on the host from ``OFFLOAD`` to
    ``FETCH``; when the device is without the original, `away` says.
    """
    make = {op: [thing for thing in own if thing in things] for op, own in _MAKES.items()}
    use = {op: [thing for thing in own if thing in things] for op, own in _USES.items()}
    first: dict[tuple[Thing, int, int | None], int] = {}
    last: dict[tuple[Thing, int, int | None], int] = {}
    for at, (op, stage, microbatch, _) in enumerate(row):
        for thing in use[op]:
            last[thing, stage, microbatch] = at
        for thing in make[op]:
            first.setdefault((thing, stage, microbatch), at)
    return [Life(*key, start, last.get(key, start)) for key, start in first.items()]


def away(row: Sequence[Action]) -> list[Life]:
    """Return when what a rank keeps is on the host alone; things are ``COPY``.

    A copy to the host runs beside the compute action behind the ``OFFLOAD``. Whatever is given
    memory next waits for it: from the end of that action to the start of ``FETCH`` the device is
    without the original. Of what comes back sooner there is no life.
    """
    found: list[Life] = []
    leaving: list[Place] = []
    gone: dict[Place, int] = {}
    for at, (op, stage, microbatch, _) in enumerate(row):
        if op is Op.OFFLOAD:
            leaving.append((stage, microbatch))
        elif op in COMPUTE:
            gone.update(dict.fromkeys(leaving, at))
            leaving.clear()
        elif op is Op.FETCH and (stage, microbatch) in gone:
            found.append(Life(Thing.COPY, stage, microbatch, gone[stage, microbatch], at))
    return found


def received(row: Sequence[Action]) -> list[Life]:
    """Return the lives of a rank's receive buffers; things are ``MESSAGE``.

    One is there from its ``RECV`` to the end of the action that takes what came, together with
    those of the skips that lead to it; to the end of the list where none does.
    """
    posted: dict[tuple[Op, int, int | None], list[tuple[int, int | None]]] = defaultdict(list)
    lives: list[Life] = []

    def end(place: tuple[Op, int, int | None], last: int) -> None:
        for first, peer in posted.pop(place, ()):
            lives.append(Life(Thing.MESSAGE, *place[1:], first, last, peer))

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
) -> Iterator[Life]:
    """Yield the lives of outputs and gradients that leave a stage of the rank, one for each taker.

    Each is there from the action that makes it to its ``SEND``, or to the action of another stage
    of the same rank that takes it.
    """
    makers: dict[Action, int] = {}
    wanted: dict[tuple[Op, int, int | None], list[tuple[Action, Thing]]] = {}
    for at, action in enumerate(row):
        op, stage, microbatch, peer = action
        if op in SENDS or op in CONSUMERS:
            kind = op, stage, peer
            if kind not in wanted:
                wanted[kind] = [
                    (need.action, thing)
                    for need in needs(action, num_stages, 1, skips)
                    for thing in need.things
                    if thing in _GOES
                ]
            for need, thing in wanted[kind]:
                first = makers.get(need._replace(microbatch=microbatch))
                if first is not None:
                    yield Life(thing, need.stage, microbatch, first, at, _taker(action))
        for need in provides(action):
            makers[need] = at


def _taker(action: Action) -> int:
    """Return the stage that takes a value: the one a ``SEND`` leads to, else the action's own."""
    return counterpart(action).stage if action.op in SENDS else action.stage


class Peak(NamedTuple):
    """The most of something at once, and the position in the list that first reaches it."""

    size: int
    position: int


def peak_activations(row: Sequence[Action]) -> Peak:
    """Return the most stage micro-batches kept at once on a rank, given its actions in order.

    Whole or for recomputation, each counts as one, but not while it is `away`.
    """
    row = Row.of(row)
    ops = row.ops
    # Where one comes, at the start of an action, and where one goes, at the end of an action.
    added: list[_Positions] = []
    freed: list[_Positions] = []
    if any(Thing.ACTIVATIONS in _MAKES[op] for op in ops):
        firsts, lasts = _bounds_of_lives(row, Thing.ACTIVATIONS)
        added.append(firsts)
        freed.append(lasts)
    if Op.OFFLOAD in ops:
        gone, back = _bounds_of_absences(row)
        freed.append(gone)
        added.append(back)
    return _peak(np.sort(np.concatenate(added)), np.sort(np.concatenate(freed))) if added else _NONE


_Positions = NDArray[np.intp]
"""Positions in a rank's list."""


def _bounds_of_lives(row: Row, thing: Thing) -> tuple[_Positions, _Positions]:
    """Return where a thing of each stage and micro-batch is made first, and where used last."""
    makes, made = _places(row, [stage if thing in _MAKES[op] else -1 for op, stage, _ in row.kinds])
    uses, used = _places(row, [stage if thing in _USES[op] else -1 for op, stage, _ in row.kinds])
    made, first = np.unique(made, return_index=True)
    used, last = np.unique(used[::-1], return_index=True)
    firsts = makes[first]
    lasts = firsts.copy()
    _, own, user = np.intersect1d(made, used, assume_unique=True, return_indices=True)
    lasts[own] = uses[::-1][last[user]]
    return firsts, lasts


def _bounds_of_absences(row: Row) -> tuple[_Positions, _Positions]:
    """Return behind which actions something is `away`, and at which it comes back."""
    firsts, lasts = _bounds_of_lives(row, Thing.COPY)
    computes = np.array([op in COMPUTE for op, _, _ in row.kinds], bool)[numbers_of(row.which)]
    at = np.append(np.flatnonzero(computes), len(row))
    gone = at[np.searchsorted(at, firsts, "right")]
    return gone[gone < lasts], lasts[gone < lasts]


def _places(row: Row, groups: Sequence[int]) -> "tuple[_Positions, NDArray[np.int64]]":
    """Return where the actions of some kinds stand, and group and micro-batch of each as a number.

    `groups`: that of each kind of the row, -1 for none.
    """
    group = np.array(groups, np.int64)[numbers_of(row.which)]
    at = np.flatnonzero(group >= 0)
    return at, (group[at] << 32) + numbers_of(row.numbers)[at]


def bounds_of(rows: Iterable[Sequence[Action]]) -> tuple[int, ...]:
    """Return for each rank what its order keeps, as a table declares it."""
    return tuple(peak_activations(row).size for row in rows)


def peak_receives(row: Sequence[Action]) -> Peak:
    """Return the most receive buffers posted at once on a rank, given its actions in order."""
    row = Row.of(row)
    # What a stage awaits: outputs, or gradients.
    awaited = [(op, stage) for op, stage, _ in row.kinds if op in RECEIVES]
    group = {each: number for number, each in enumerate(dict.fromkeys(awaited))}
    posts = [op in RECEIVES for op, _, _ in row.kinds]
    wanted = [(ARRIVES_BY.get(op, op), stage) for op, stage, _ in row.kinds]
    at, keys = _places(row, [group.get(each, -1) for each in wanted])
    if not len(at):
        return _NONE
    is_post = np.array(posts, bool)[numbers_of(row.which)[at]]
    # By what is awaited, each time in the order of the list; behind a post comes who takes it.
    order = np.argsort(keys, kind="stable")
    takes = np.where(is_post[order], len(order), np.arange(len(order)))
    taken_by = np.minimum.accumulate(takes[::-1])[::-1]
    taker = order[np.minimum(taken_by, len(order) - 1)]
    is_taken = is_post[order] & (taken_by < len(order)) & (keys[taker] == keys[order])
    return _peak(at[is_post], np.sort(at[taker[is_taken]]))


def _peak(added: _Positions, freed: _Positions) -> Peak:
    """Return the most at once; given sorted, where one is added and behind what one is freed."""
    sizes = np.arange(1, len(added) + 1) - np.searchsorted(freed, added)
    most = int(np.argmax(sizes)) if len(sizes) else 0
    return Peak(int(sizes[most]), int(added[most])) if len(sizes) and sizes[most] > 0 else _NONE


_NONE: Final = Peak(0, 0)
