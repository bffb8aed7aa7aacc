"""A minimal torch process group over one of our groups, for libraries that require one."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from gpipe_hpc.comm.collectives.group import CollectiveHandle

NAME: Final = "gpipe_hpc_wide"
"""Name under which the backend is registered with torch."""

StartBroadcast = Callable[[torch.Tensor, int], CollectiveHandle]
"""Starts overwriting a tensor with that of a world rank."""


class TorchGroupAdapter(dist.ProcessGroup):
    """A torch process group that offers only its ranks and `broadcast`, as fairscale's OSS needs.

    torch opens no connections for it. Its methods have the names and arguments with which torch
    calls them.
    """

    def __init__(self, options: Any, start_broadcast: StartBroadcast) -> None:
        # torch's type stubs do not declare this constructor, the only one usable from Python.
        initialise: Any = super().__init__
        initialise(options.group_rank, options.group_size)
        self._ranks: Sequence[int] = tuple(options.global_ranks_in_group)
        self._start_broadcast = start_broadcast
        self._set_group_name(options.group_id)
        self._set_group_desc("undefined")

    def broadcast(self, *given: Any, **named: Any) -> dist.Work:
        """Start overwriting a tensor with that of the root."""
        ((tensor,), options) = given
        return _PendingWork(self._start_broadcast(tensor, self._ranks[options.rootRank]))


class _PendingWork(dist.Work):
    def __init__(self, pending: CollectiveHandle) -> None:
        super().__init__()
        self._pending = pending

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._pending.wait()
        return True


def register() -> None:
    """Register the backend with torch; new groups need a `StartBroadcast` as `backend_options`."""
    dist.Backend.register_backend(NAME, TorchGroupAdapter, extended_api=True, devices=["cpu"])
