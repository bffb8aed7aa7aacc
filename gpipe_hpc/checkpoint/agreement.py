"""Refusals that all ranks share: where one finds a fault, every rank raises it."""

from collections.abc import Callable
from typing import TypeVar

from gpipe_hpc.comm.group import Gathering
from gpipe_hpc.errors import CheckpointError

T = TypeVar("T")


def all_or_none(group: Gathering, action: Callable[[], T]) -> T:
    """Return what `action` gives on this rank, once it has worked on every rank of the group.

    Raises CheckpointError on all of them if it does so on one: the text is the first rank's.
    """
    refusal: CheckpointError | None = None
    try:
        value = action()
    except CheckpointError as error:
        refusal = error
    raise_first(group, refusal)
    return value


def raise_first(group: Gathering, refusal: CheckpointError | None) -> None:
    """Raise on every rank the refusal of the first rank that has one; return if none has."""
    own = None if refusal is None else (group.ranks[group.position], str(refusal))
    first = group.merge_object(own, lambda ahead, behind: ahead or behind)
    if first is not None:
        rank, text = first
        # Where rank 0 finds it too, it is not this rank's own trouble.
        raise CheckpointError(f"rank {rank}: {text}" if rank != group.ranks[0] else text) from (
            refusal and refusal.__cause__
        )
