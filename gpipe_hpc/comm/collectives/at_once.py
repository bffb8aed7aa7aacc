"""All-to-all and all-gather where any two ranks are connected: each rank sends to each, at once."""

from collections.abc import Mapping, Sequence

import torch

from gpipe_hpc.comm.collectives.group import Group, Piece
from gpipe_hpc.comm.collectives.shards import shards


def all_to_all(group: Group, whole: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
    """Do what `Group.all_to_all` says."""
    parts = shards(whole, counts, group.size)
    own = parts[group.position]
    came = [own if at == group.position else torch.empty_like(own) for at in range(group.size)]
    _exchange(group, dict(enumerate(parts)), dict(enumerate(came)))
    return came


def all_gather(group: Group, whole: torch.Tensor, counts: Sequence[int]) -> None:
    """Do what `Group.all_gather` says."""
    parts = shards(whole, counts, group.size)
    own = dict.fromkeys(range(group.size), parts[group.position])
    _exchange(group, own, dict(enumerate(parts)))


def _exchange(
    group: Group, out: Mapping[int, torch.Tensor], into: Mapping[int, torch.Tensor]
) -> None:
    """Send and receive all parts except one's own; nothing travels where there is nothing."""

    def pieces(parts: Mapping[int, torch.Tensor]) -> list[Piece]:
        # At distance d from each, so that nobody is everybody's first.
        order = sorted(parts, key=lambda at: (at - group.position) % group.size)
        return [Piece(group.ranks[at], parts[at]) for at in order[1:] if parts[at].numel()]

    group.start_exchange(pieces(out), pieces(into)).wait()
