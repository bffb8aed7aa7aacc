"""The checker: proves, before anything runs, that a table trains and cannot hang."""

from collections import defaultdict
from types import MappingProxyType
from typing import Final, NoReturn

import numpy as np

from gpipe_hpc.errors import ScheduleError
from gpipe_hpc.schedule.garbage import collector_paused
from gpipe_hpc.schedule.table.actions import BACKWARDS, RECEIVES, REDUCTIONS, SENDS, Action, Op
from gpipe_hpc.schedule.table.collectives import reduction_order
from gpipe_hpc.schedule.table.dependencies import counterpart
from gpipe_hpc.schedule.table.lifetimes import peak_activations, peak_receives
from gpipe_hpc.schedule.table.precedence import (
    NOWHERE,
    Column,
    Precedence,
    build_precedence,
    runs,
)
from gpipe_hpc.schedule.table.rows import action_of, kind_of, numbers_of
from gpipe_hpc.schedule.table.schedule import Schedule


@collector_paused()
def check(schedule: Schedule, *, is_apart: bool = False) -> None:
    """Raise ScheduleError if a table, bare or lowered, breaks a rule; name rank, action and reason.

    Rules: every action exists once, on its rank, after what it needs. A rank receives from another
    in the order of the sends. Each bucket of a stage is reduced once on each holder, in one order
    if ranks share stages; gathered parameters are gathered once on each holder, before the stage's
    forwards. Live activations and posted receives stay within declared bounds. There is no
    deadlock, whether a ``SEND`` is buffered or blocks until its ``RECV`` is posted.

    Args:
        schedule: the table.
        is_apart: whether replicas train separately, so that stages of a single holder are not
            reduced.
    """
    if schedule.num_ranks != schedule.placement.num_ranks:
        raise ScheduleError(
            f"schedule {schedule.name!r}: number of ranks differs from the placement's, "
            f"expected {schedule.placement.num_ranks}, got {schedule.num_ranks}"
        )
    graph = build_precedence(schedule)
    _check_complete(graph)
    _check_own_order(graph)
    if schedule.is_lowered:
        _check_transfers(graph)
        _check_reductions(graph, is_apart=is_apart)
        _check_gathers(graph)
    _check_bounds(schedule)
    _check_ends(graph)


def _check_ends(graph: Precedence) -> None:
    """Refuse a deadlock, whether a ``SEND`` is buffered or blocks until its ``RECV`` is posted.

    Who ends with sends that block ends with others too: then ranks wait for less.
    """
    try:
        runs(graph, graph.rendezvous_waits)
    except ScheduleError:
        runs(graph, graph.waits)  # what hangs in any case is told so
        raise


def _check_complete(graph: Precedence) -> None:
    """Every stage runs every micro-batch forward and, unless the table only evaluates, backward."""
    schedule = graph.schedule
    nothing: Column = [NOWHERE] * schedule.num_microbatches
    ops = (Op.F, Op.I, Op.W) if _has_backward(graph) else (Op.F,)
    for stage in range(schedule.num_stages):
        for op in ops:
            column = graph.makers.get((op, stage, None), nothing)
            if NOWHERE in column:
                _refuse_missing(schedule, Action(op, stage, column.index(NOWHERE)))
    for (op, stage, _), column in graph.makers.items():
        if op not in _FOR:
            continue
        what_for, refusal = _FOR[op]
        users = graph.makers.get((what_for, stage, None), nothing)
        for node, user in zip(column, users, strict=True):
            if node != NOWHERE and user == NOWHERE:
                missing = graph.action(node)._replace(op=what_for)
                graph.refuse(node, refusal.format(missing=missing))


# What is there for another action alone, and how it is refused without that.
_FOR: Final = MappingProxyType(
    {
        Op.R: (Op.I, "recomputes for a backward that is not in the table; drop it"),
        Op.FETCH: (Op.I, "fetches for a backward that is not in the table; drop it"),
        Op.OFFLOAD: (
            Op.FETCH,
            "is not brought back, expected {missing} ahead of its backward, got none; add it",
        ),
    }
)


def _refuse_missing(schedule: Schedule, what: Action) -> NoReturn:
    assert what.microbatch is not None, f"{what} has no micro-batch"
    rank = schedule.placement.rank_of(what.stage, what.microbatch)
    full = f"or {what._replace(op=Op.B)} " if what.op is not Op.F else ""
    raise ScheduleError(
        f"schedule {schedule.name!r}, rank {rank}: {what} is missing, expected it {full}"
        "once, got none; add it"
    )


def _has_backward(graph: Precedence) -> bool:
    return any(kind[0] in BACKWARDS for kind in graph.makers)


def _check_own_order(graph: Precedence) -> None:
    """What an action needs of its own rank comes earlier in the rank's list."""
    if graph.late:
        node, _, wait = min(graph.late)
        position = wait - graph.starts[graph.ranks[wait]]
        graph.refuse(
            node,
            f"waits for {graph.action(wait)}, expected it earlier on this rank, "
            f"got it at position {position}; move it ahead",
        )


def _check_transfers(graph: Precedence) -> None:
    """Sends and receives come in pairs, only between ranks, in one order between any two."""
    nowhere: Column = [NOWHERE] * graph.schedule.num_microbatches
    for kind, halves in graph.makers.items():
        if kind[0] not in SENDS and kind[0] not in RECEIVES:
            continue
        partners = graph.makers.get(kind_of(counterpart(action_of(kind))), nowhere)
        if _are_transferred(graph, halves, partners):
            continue
        for node, partner in zip(halves, partners, strict=True):
            if node == NOWHERE:
                continue
            if partner == NOWHERE:
                missing = counterpart(graph.action(node))
                graph.refuse(node, f"has no partner, expected {missing}, got none; add it")
            if graph.ranks[partner] == graph.ranks[node]:
                graph.refuse(node, "moves a value within its rank, expected no transfer; drop it")
    _check_order(graph)


def _are_transferred(graph: Precedence, halves: Column, partners: Column) -> bool:
    """Say whether all halves of some transfers have a partner on another rank."""
    own, others, ranks = map(numbers_of, (halves, partners, graph.ranks))
    own, others = own[own != NOWHERE], others[own != NOWHERE]
    return bool(((others != NOWHERE) & (ranks[others] != ranks[own])).all())


def _check_order(graph: Precedence) -> None:
    """Refuse receives of what one rank sends another that are posted in another order than sent.

    Whichever channels they are of: one queue between the two ranks carries all of them.
    """
    ranks, which, numbers = map(numbers_of, (graph.ranks, graph.which, graph.numbers))
    kinds = [at for at, (op, _, _) in enumerate(graph.kinds) if op in SENDS]
    if not kinds:
        return
    partners = [kind_of(counterpart(action_of(graph.kinds[at]))) for at in kinds]
    column = np.full(len(graph.kinds), NOWHERE, np.int32)  # of `received`, by the kind of a send
    column[kinds] = np.arange(len(kinds))
    received = np.stack([numbers_of(graph.columns[kind]) for kind in partners])
    sends = np.flatnonzero(column[which] != NOWHERE)
    posts = received[column[which[sends]], numbers[sends]]
    # By pairs of ranks, what one sends the other in the order of its list.
    order = np.lexsort((ranks[posts], ranks[sends]))
    sends, posts = sends[order], posts[order]
    are_of_one_pair = (np.diff(ranks[sends]) == 0) & (np.diff(ranks[posts]) == 0)
    is_ahead = are_of_one_pair & (np.diff(posts) < 0)
    if is_ahead.any():
        # Of several, the one that is sent first.
        first = min(np.flatnonzero(is_ahead).tolist(), key=lambda at: int(sends[at + 1]))
        sender = int(ranks[sends[first]])
        _refuse_order(graph, sender, int(posts[first + 1]), int(posts[first]))


def _refuse_order(graph: Precedence, sender: int, post: int, awaited: int) -> NoReturn:
    """Raise for a ``RECV`` posted ahead of another whose ``SEND`` goes first."""
    expected = graph.action(awaited)
    before = graph.provide(awaited, counterpart(expected))
    graph.refuse(
        post,
        f"is out of order among what rank {sender} sends here, expected {expected} ahead of it, "
        f"to match {graph.where(before)}; post in the order of the sends",
    )


def _check_reductions(graph: Precedence, *, is_apart: bool) -> None:
    """A lowered table with a backward reduces each stage on each holder, another one nothing.

    All holders of a stage have the same buckets: all in one, or those from 0 on, each once. Holders
    of several stages take part in the same order, or they would wait for one another. Where
    replicas train apart, stages that one rank holds need no reduction, but may be averaged.
    """
    schedule, placement = graph.schedule, graph.schedule.placement
    found: dict[Op, _Found] = {op: defaultdict(dict) for op in (Op.REDUCE_GRAD, Op.AVERAGE)}
    for node in graph.of_buckets:
        action = graph.action(node)
        if action.op in REDUCTIONS:
            if not _has_backward(graph):
                graph.refuse(node, "reduces in a table without backward; drop it")
            found[action.op][action.stage, graph.ranks[node]][action.bucket] = node
    if not _has_backward(graph):
        return
    for stage in range(schedule.num_stages):
        is_needed = not is_apart or len(placement.holders(stage)) > 1
        _check_buckets(graph, Op.REDUCE_GRAD, stage, found[Op.REDUCE_GRAD], is_needed=is_needed)
        _check_buckets(graph, Op.AVERAGE, stage, found[Op.AVERAGE], is_needed=False)
    reduction_order(graph)


def _check_gathers(graph: Precedence) -> None:
    """A stage whose parameters are gathered on one holder has them gathered on each."""
    found: _Found = defaultdict(dict)
    for node in graph.of_buckets:
        action = graph.action(node)
        if action.op is Op.UNSHARD:
            found[action.stage, graph.ranks[node]][action.bucket] = node
    for stage in range(graph.schedule.num_stages):
        _check_buckets(graph, Op.UNSHARD, stage, found, is_needed=False)


_Found = dict[tuple[int, int], dict[int | None, int]]
"""The nodes that reduce, or gather, a stage on a rank, by bucket."""


def _check_buckets(
    graph: Precedence, op: Op, stage: int, found: _Found, *, is_needed: bool
) -> None:
    """All holders of a stage have the same buckets; `is_needed`: all of them at least."""
    schedule, holders = graph.schedule, graph.schedule.placement.holders(stage)
    all_in_one = any(None in found[stage, rank] for rank in holders)
    most = max((len(found[stage, rank]) for rank in holders), default=0)
    if not most and not is_needed:
        return
    buckets = (None,) if all_in_one or not most else tuple(range(most))
    for rank in holders:
        for bucket in buckets:
            if bucket not in found[stage, rank]:
                raise ScheduleError(
                    f"schedule {schedule.name!r}, rank {rank}: {Action(op, stage, bucket)} is "
                    f"missing, expected one on each of ranks {holders}, got none; add it"
                )
        for bucket, node in found[stage, rank].items():
            if bucket not in buckets:
                graph.refuse(
                    node,
                    f"is of one bucket beside {Action(op, stage)}, which is of all of them, "
                    "expected one or the other; drop one",
                )


def _check_bounds(schedule: Schedule) -> None:
    """Live activations and posted receives stay within what the schedule declares."""
    for what, bounds, count in (
        ("live activations", schedule.max_activations, peak_activations),
        ("posted receives", schedule.max_receives, peak_receives),
    ):
        if bounds is None:
            continue
        if len(bounds) != schedule.num_ranks:
            raise ScheduleError(
                f"schedule {schedule.name!r}: bounds of {what}, expected one for each of "
                f"{schedule.num_ranks} ranks, got {len(bounds)}"
            )
        for rank, (actions, bound) in enumerate(zip(schedule.rows, bounds, strict=True)):
            peak = count(actions)
            if peak.size > bound:
                raise ScheduleError(
                    f"schedule {schedule.name!r}, rank {rank}, position {peak.position}, "
                    f"{actions[peak.position]}: too many {what}, expected at most {bound}, "
                    f"got {peak.size}; declare more or run backwards sooner"
                )
