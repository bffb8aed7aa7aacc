"""All-to-all and all-gather in which each rank exchanges directly with every other."""

from collections.abc import Mapping, Sequence

import torch

from gpipe_hpc.comm.collectives.group import Group, PeerTensor
from gpipe_hpc.comm.collectives.shards import shards


def all_to_all(group: Group, whole: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
    """Exchange shards directly with every other rank; return this rank's shard of each vector."""
    parts = shards(whole, counts, group.size)
    own = parts[group.position]
    came = [own if at == group.position else torch.empty_like(own) for at in range(group.size)]
    _exchange(group, dict(enumerate(parts)), dict(enumerate(came)))
    return came


def all_gather(group: Group, whole: torch.Tensor, counts: Sequence[int]) -> None:
    """Fill `whole` with the shards of all ranks by direct exchange with every other rank."""
    parts = shards(whole, counts, group.size)
    own = dict.fromkeys(range(group.size), parts[group.position])
    _exchange(group, own, dict(enumerate(parts)))


def _exchange(
    group: Group, out: Mapping[int, torch.Tensor], into: Mapping[int, torch.Tensor]
) -> None:
    """Send and receive all parts except this rank's own; empty parts are not sent."""

    def pieces(parts: Mapping[int, torch.Tensor]) -> list[PeerTensor]:
        # Ordered by distance from this rank, so that all ranks begin with different peers.
        order = sorted(parts, key=lambda at: (at - group.position) % group.size)
        return [PeerTensor(group.ranks[at], parts[at]) for at in order[1:] if parts[at].numel()]

    group.start_exchange(pieces(out), pieces(into)).wait()
