"""What torch sees of a group that is none of its own, for libraries that ask for one of torch's."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from gpipe_hpc.comm.collectives.group import Pending

NAME: Final = "gpipe_hpc_wide"
"""What torch calls this backend."""

StartBroadcast = Callable[[torch.Tensor, int], Pending]
"""Starts filling a tensor with that of a world rank."""


class TorchFace(dist.ProcessGroup):
    """A group of torch's that knows its ranks and broadcasts: what fairscale's OSS needs.

    Torch itself connects nobody for it. Its methods have the names and arguments by which torch
    calls them.
    """

    def __init__(self, options: Any, start_broadcast: StartBroadcast) -> None:
        # The one way in for a class of Python, which torch's own types do not name.
        initialise: Any = super().__init__
        initialise(options.group_rank, options.group_size)
        self._ranks: Sequence[int] = tuple(options.global_ranks_in_group)
        self._start_broadcast = start_broadcast
        self._set_group_name(options.group_id)
        self._set_group_desc("undefined")

    def broadcast(self, *given: Any, **named: Any) -> dist.Work:
        """Start filling a tensor with the root's."""
        ((tensor,), options) = given
        return _PendingWork(self._start_broadcast(tensor, self._ranks[options.rootRank]))


class _PendingWork(dist.Work):
    def __init__(self, pending: Pending) -> None:
        super().__init__()
        self._pending = pending

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._pending.wait()
        return True


def register() -> None:
    """Let torch make such groups; its `backend_options` are what starts a broadcast."""
    dist.Backend.register_backend(NAME, TorchFace, extended_api=True, devices=["cpu"])
