"""States of an optimizer that lie on several ranks: each is put together on the one that writes it.

The others send what they hold of it, one tensor after the other. A rank needs memory for those that
it writes: of the parameters that lie across the ends of shards, no others.
"""

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
        if here != writer:
            group.start_exchange([Piece(writer, mine)], []).wait()
            continue
        whole = mine.new_empty(torch.Size(parts_of[here].shape).numel())
        whole[parts_of[here].start : parts_of[here].stop] = mine
        others = [
            Piece(rank, whole[part.start : part.stop])
            for rank, part in parts_of.items()
            if rank != here
        ]
        group.start_exchange([], others).wait()
        found[name] = whole.view(parts_of[here].shape)
    return found


def _size(part: Part) -> int:
    return part.stop - part.start
