"""fairscale's OSS between ranks on threads, with simulated calls of torch.distributed.

OSS uses process groups for ranks and broadcasts. Here a thread group replaces the process group;
its broadcasts are those of the package, so they run on streams of simulated devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch


def show_groups(world: Any) -> None:
    """Present each multi-rank group that a world creates from now on as a group of torch."""
    form = world.group

    def group(members: Any) -> Any:
        formed = form(members)
        if formed.size > 1 and formed.torch_group is None:
            formed.torch_group = formed
        return formed

    world.group = group


@contextmanager
def oss_between_threads() -> Iterator[None]:
    """Make OSS accept such groups as torch's."""
    from fairscale.optim import oss  # it takes a second to load

    def broadcast(tensor: torch.Tensor, src: int, group: Any, async_op: bool) -> Any:
        assert async_op, "OSS waits for all of its broadcasts together"
        return group.start_broadcast(tensor, src)

    played = SimpleNamespace(
        get_world_size=lambda group: group.size,
        get_rank=lambda group: group.position,
        get_backend=lambda group: "threads",
        broadcast=broadcast,
        Backend=SimpleNamespace(NCCL="nccl"),
    )
    with patch.multiple(oss, dist=played, get_global_rank=lambda group, rank: group.ranks[rank]):
        yield
