"""Collective errors: if one rank fails, every rank raises its error."""

from collections.abc import Callable
from socket import gethostname
from typing import TypeVar

from gpipe_hpc.comm.collectives.group import ControlGroup
from gpipe_hpc.errors import CheckpointError

T = TypeVar("T")


def all_or_none(group: ControlGroup, action: Callable[[], T]) -> T:
    """Run `action` on every rank; return its result if it succeeds on all of them. Collective.

    If `action` raises CheckpointError on some ranks, all ranks raise the error of the first of
    them.
    """
    refusal: CheckpointError | None = None
    try:
        value = action()
    except CheckpointError as error:
        refusal = error
    raise_first(group, refusal)
    return value


def raise_first(group: ControlGroup, refusal: CheckpointError | None) -> None:
    """Raise on every rank the error of the first rank that has one; return if none has. Collective.

    The text names that rank and its host, unless it is the first rank and the fault is in the
    checkpoint itself, which all ranks would find.
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
    """Return whether the error was caused by an OSError other than FileNotFoundError."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error is not None and not isinstance(error, FileNotFoundError)
