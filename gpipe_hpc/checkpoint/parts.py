"""States of an optimizer that lie on several ranks: each is put together on the one that writes it.

The others send what they hold of it, one tensor after the other, by way of ranks 1, 2, 4, 8, ...
places away: of a tensor that lies on thousands of ranks, each talks to few. A rank needs memory for
those that it writes or hands on: of the parameters that lie across the ends of shards, no others.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from gpipe_hpc.comm.group import Group, Piece

if TYPE_CHECKING:
    from gpipe_hpc.pipeline import Pipeline


class Part(NamedTuple):
    """Elements of a tensor, in a row, that one rank has; `shape`: that of the whole tensor.

    `stage`: the one whose copies share the tensor.
    """

    stage: int
    name: str
    start: int
    stop: int
    shape: tuple[int, ...]


def put_together(pipe: "Pipeline", own: dict[str, tuple[Part, Tensor]]) -> dict[str, Tensor]:
    """Return the whole tensors of which this rank has the largest part; all ranks call it.

    `own`: this rank's parts, by their names in the checkpoint.
    """
    found: dict[str, Tensor] = {}
    for stage in sorted(pipe.stages):  # in one order on all ranks that share some
        of_stage = {name: each for name, each in own.items() if each[0].stage == stage}
        found |= _put_together(pipe.sharers(stage), pipe.world.rank, of_stage)
    return found


def _put_together(
    group: Group, here: int, own: dict[str, tuple[Part, Tensor]]
) -> dict[str, Tensor]:
    """Return the whole tensors of a stage of which the rank `here` has the largest part."""
    told: list[list[Part]] = group.all_gather_object([part for part, _ in own.values()])
    holders: dict[str, dict[int, Part]] = {}
    for rank, parts in zip(group.ranks, told, strict=True):
        for part in map(Part._make, parts):
            holders.setdefault(part.name, {})[rank] = part
    found: dict[str, Tensor] = {}
    for name in sorted(holders):
        parts_of = holders[name]
        if here not in parts_of:
            continue
        writer = max(parts_of, key=lambda rank: (_size(parts_of[rank]), -rank))
        mine = own[name][1].detach()
        if here == writer:
            whole = mine.new_empty(torch.Size(parts_of[here].shape).numel())
            whole[parts_of[here].start : parts_of[here].stop] = mine
            for side in _sides(parts_of, writer):
                _hand_on(group, side, 0, whole)
            found[name] = whole.view(parts_of[here].shape)
            continue
        (side,) = [side for side in _sides(parts_of, writer) if here in dict(side)]
        place = [rank for rank, _ in side].index(here)
        start, stop = _span(side, place, place + (place & -place))
        row = mine.new_empty(stop - start)
        row[parts_of[here].start - start : parts_of[here].stop - start] = mine
        _hand_on(group, side, place, row, start)
    return found


_Side = list[tuple[int, Part]]
"""The ranks that hold a tensor, from its writer outwards in one direction, and what they hold."""


def _sides(parts_of: Mapping[int, Part], writer: int) -> tuple[_Side, _Side]:
    """Return both sides of a writer, itself the first of each."""
    held = sorted(parts_of.items())
    ahead = [each for each in held if each[0] <= writer]
    behind = [each for each in held if each[0] >= writer]
    return ahead[::-1], behind


def _hand_on(group: Group, side: _Side, place: int, row: Tensor, start: int = 0) -> None:
    """Collect into `row`, which begins at element `start`, what comes from outwards; send it on."""

    def elements(first: int, last: int) -> Tensor:
        begin, end = _span(side, first, last)
        return row[begin - start : end - start]

    distance = 1
    while distance < len(side):
        if place & distance:
            out = Piece(side[place - distance][0], elements(place, place + distance))
            group.start_exchange([out], []).wait()
            return
        if place + distance < len(side):
            into = elements(place + distance, place + 2 * distance)
            group.start_exchange([], [Piece(side[place + distance][0], into)]).wait()
        distance *= 2


def _span(side: _Side, first: int, last: int) -> tuple[int, int]:
    """Return where the elements of some ranks of a side begin and end."""
    parts = [part for _, part in side[first:last]]
    return min(part.start for part in parts), max(part.stop for part in parts)


def _size(part: Part) -> int:
    return part.stop - part.start
