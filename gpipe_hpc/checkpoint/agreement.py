"""Refusals that all ranks share: where one finds a fault, every rank raises it."""

from collections.abc import Callable
from socket import gethostname
from typing import TypeVar

from gpipe_hpc.comm.collectives.group import Gathering
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
    """Raise on every rank the refusal of the first rank that has one; return if none has.

    The text names that rank and its host, unless it is the first of all and what it found is no
    trouble of its machine: a fault of the checkpoint itself, which all would find.
    """
    own = None
    if refusal is not None:
        own = (group.ranks[group.position], gethostname(), _is_of_machine(refusal), str(refusal))
    first = group.merge_object(own, lambda ahead, behind: ahead or behind)
    if first is not None:
        rank, host, is_of_machine, text = first
        is_own = len(group.ranks) > 1 and (is_of_machine or rank != group.ranks[0])
        raise CheckpointError(f"rank {rank} on {host}: {text}" if is_own else text) from (
            refusal and refusal.__cause__
        )


def _is_of_machine(error: BaseException | None) -> bool:
    """Say whether the system refused something; that nothing is there says all it can."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error is not None and not isinstance(error, FileNotFoundError)
