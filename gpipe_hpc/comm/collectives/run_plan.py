"""Execution of a plan: exchange the messages of each step and add or copy what is received."""

from collections.abc import Callable, Sequence
from itertools import groupby

import torch

from gpipe_hpc.comm.collectives.plan import ElementSpan, Plan, PlanMove, PlanStep

Exchange = Callable[[Sequence[tuple[int, torch.Tensor]], Sequence[tuple[int, torch.Tensor]]], None]
"""Sends and receives tensors, each with the position of a rank; blocks until all are complete."""


Combine = Callable[[torch.Tensor, torch.Tensor], object]
"""Combines both tensors into the first one."""


def plus(own: torch.Tensor, other: torch.Tensor) -> None:
    """Add `other` to `own` in place."""
    own += other


def run_plan(
    plan: Plan,
    flat: torch.Tensor,
    position: int,
    exchange: Exchange,
    combine: Combine = plus,
) -> None:
    """Execute the plan of the rank at `position` in place on `flat`.

    `combine(own, received)` adds a received term in place, by default by a sum; it must be
    commutative. Uses temporary memory for the largest number of elements added in one step. With
    NCCL no call blocks the host: `exchange` makes the current stream wait for the messages.
    """
    scratch = flat.new_empty(max((_num_added(step) for step in plan), default=0))
    for step in plan:
        came = torch.split(scratch[: _num_added(step)], [move.span.length for move in step.adds])
        into = [(move.peer, part) for move, part in zip(step.adds, came, strict=True)]
        into += [(move.peer, _at(flat, move.span)) for move in step.takes]
        exchange([(move.peer, _at(flat, move.span)) for move in step.sends], into)
        terms = sorted(zip(step.adds, came, strict=True), key=lambda term: term[0].span)
        for span, same in groupby(terms, key=lambda term: term[0].span):
            _add(_at(flat, span), list(same), position, combine)


def _num_added(step: PlanStep) -> int:
    return sum(move.span.length for move in step.adds)


def _at(flat: torch.Tensor, span: ElementSpan) -> torch.Tensor:
    return flat[span.start : span.stop]


def _add(
    own: torch.Tensor,
    terms: Sequence[tuple[PlanMove, torch.Tensor]],
    position: int,
    combine: Combine,
) -> None:
    """Add received terms and this rank's own value `own`, in rank order, into `own`.

    Swapping two operands of one addition does not change its result, so the first sum may be added
    to `own` instead of `own` to it.
    """
    before = [part for move, part in sorted(terms, key=_by_peer) if move.peer < position]
    behind = [part for move, part in sorted(terms, key=_by_peer) if move.peer > position]
    if before:
        first, *others = before
        for part in others:
            combine(first, part)
        combine(own, first)  # equals first + own
    for part in behind:
        combine(own, part)


def _by_peer(term: tuple[PlanMove, torch.Tensor]) -> int:
    return term[0].peer
