"""Messages of bytes between the copies of a stage."""

from collections.abc import Sequence

import torch

from gpipe_hpc.comm.group import Group, Piece


def gather(group: Group, own: torch.Tensor) -> list[torch.Tensor]:
    """Return the uint8[n] of every copy in rank order, each of as many bytes as one's own."""
    others = [position for position in range(group.size) if position != group.position]
    came = exchange(group, dict.fromkeys(others, own), dict.fromkeys(others, own.numel()))
    return [came.get(position, own) for position in range(group.size)]


def exchange(
    group: Group, sends: dict[int, torch.Tensor], sizes: dict[int, int]
) -> dict[int, torch.Tensor]:
    """Send uint8[n] to copies, by position, and return those that come, of `sizes` bytes.

    Nothing is sent where there is nothing to say.
    """
    device = next((each.device for each in sends.values()), torch.device("cpu"))
    out = {at: each for at, each in sends.items() if each.numel()}
    into = {at: torch.empty(n, dtype=torch.uint8, device=device) for at, n in sizes.items()}
    pending = group.start_exchange(
        _pieces(group, out), _pieces(group, {at: t for at, t in into.items() if t.numel()})
    )
    pending.wait()
    return into


def _pieces(group: Group, parts: dict[int, torch.Tensor]) -> Sequence[Piece]:
    # At distance d from each, so that nobody is everybody's first.
    order = sorted(parts, key=lambda at: (at - group.position) % group.size)
    return [Piece(group.ranks[at], parts[at]) for at in order]
