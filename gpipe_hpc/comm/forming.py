"""Process groups of torch, formed by their members alone.

`dist.new_group` has every rank of the world take part, or derives the name of a group from how many
the process has, which ranks need not agree on. Here a name says the world, the ranks, and how many
groups these ranks have formed before: that is the same on all members, and nobody else is asked.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist
import torch.distributed.distributed_c10d as torch_groups

LAZY_VARIABLE: Final = "TORCH_GLOO_LAZY_INIT"


class Former:
    """Forms the groups of one world; `name` tells it from other worlds of the same ranks.

    `meet`: returns once all members of a group have called it. Forming itself waits for them on the
    store, where the failure of one would not end the wait.
    """

    def __init__(
        self,
        name: str,
        timeout: timedelta,
        backend: str,
        meet: Callable[[str, Collection[int]], None] = lambda name, ranks: None,
    ) -> None:
        self._meet = meet
        self._name, self._timeout, self._backend = name, timeout, backend
        self._num_formed: Counter[tuple[int, ...]] = Counter()

    def form(self, ranks: Sequence[int], backend: str | None = None) -> dist.ProcessGroup:
        """Form a group of world ranks, this one among them; each of them calls it, nobody else.

        `backend`: None for that of the other groups. Over Gloo all members are connected with one
        another then, so a group should be small.
        """
        members = tuple(ranks)
        self._num_formed[members] += 1
        digest = hashlib.sha256(str(members).encode()).hexdigest()[:32]
        name = f"{self._name}_{digest}_{self._num_formed[members]}"
        self._meet(f"forming group {name}", members)
        torch_side: Any = torch_groups
        default = torch_side._get_default_group()
        _, store = torch_side._world.pg_map[default]
        with connecting(lazily=False), _unbound(default):
            formed, _ = torch_side._new_process_group_helper(
                len(members),
                members.index(default.rank()),
                list(members),
                dist.Backend(backend or self._backend),
                store,
                group_name=name,
                timeout=self._timeout,
            )
        places = {rank: position for position, rank in enumerate(members)}
        torch_side._world.pg_group_ranks[formed] = places
        group: dist.ProcessGroup = formed
        return group


@contextmanager
def _unbound(default: Any) -> Iterator[None]:
    """Let the default group have no device of its own meanwhile, if its user gave it one.

    NCCL would else split the new group off from it, in which all ranks of the world take part.
    """
    bound = default.bound_device_id
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = bound


@contextmanager
def connecting(*, lazily: bool) -> Iterator[None]:
    """Let Gloo's groups that are formed meanwhile connect two ranks when they first need it.

    A group of the whole world is formed `lazily`: else each rank would connect with all others, and
    ask the store for each. A group that steps use is not: the first message between two ranks would
    wait until both ends touch it, and nothing could end that wait.
    """
    before = os.environ.get(LAZY_VARIABLE)
    os.environ[LAZY_VARIABLE] = "1" if lazily else "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[LAZY_VARIABLE]
        else:
            os.environ[LAZY_VARIABLE] = before
