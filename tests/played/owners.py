"""fairscale's OSS between ranks that are threads: what it asks torch.distributed for is played.

It knows ranks by process groups, and broadcasts over them. Here a group of threads stands for one;
its broadcasts are as the package's own, so on played devices they are on streams.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch


def show_groups(world: Any) -> None:
    """Let each group of several ranks that a world forms from now on be one of torch's, too."""
    form = world.group

    def group(members: Any) -> Any:
        formed = form(members)
        if formed.size > 1 and formed.torch_group is None:
            formed.torch_group = formed
        return formed

    world.group = group


@contextmanager
def oss_between_threads() -> Iterator[None]:
    """Let OSS take such groups for torch's."""
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
