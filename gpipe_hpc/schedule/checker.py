"""Static checks of a schedule table: completeness, declared bounds, absence of deadlocks."""

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
    """Raise ScheduleError, naming rank, action and reason, if a table breaks a rule.

    Rules, for compute-only and lowered tables: every action exists once, on its rank, after the
    actions that it needs. A rank posts its receives from another rank in the order of the sends.
    Each bucket of a stage is reduced once on each rank that holds the stage, in the same order on
    ranks that share stages. Sharded parameters are gathered once on each such rank, before the
    forwards of the stage. The numbers of live activations and of posted receives stay within the
    declared bounds. There is no deadlock, whether a ``SEND`` is buffered or blocks until its
    ``RECV`` is posted.

    Args:
        schedule: the table.
        is_apart: whether replicas use local SGD, so that stages held by a single rank need no
            gradient reduction.
    """
    if schedule.num_ranks != schedule.placement.num_ranks:
        raise ScheduleError(
            f"schedule {schedule.name!r}: the table has {schedule.num_ranks} rows, but its "
            f"placement has {schedule.placement.num_ranks} ranks"
        )
    graph = build_precedence(schedule)
    _check_complete(graph)
    _check_own_order(graph)
    if schedule.is_lowered:
        _check_transfers(graph)
        _check_reductions(graph, is_apart=is_apart)
        _check_gathers(graph)
    _check_bounds(schedule)
    _check_deadlock(graph)


def _check_deadlock(graph: Precedence) -> None:
    """Raise on a deadlock, whether a ``SEND`` is buffered or blocks until its ``RECV`` is posted.

    A table that completes with blocking sends also completes with buffered ones.
    """
    try:
        runs(graph, graph.rendezvous_waits)
    except ScheduleError:
        runs(graph, graph.waits)  # prefer the message of a deadlock that buffering does not solve
        raise


def _check_complete(graph: Precedence) -> None:
    """Check that every stage has a forward, and in training a backward, of every micro-batch."""
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


# Ops that are useless without another op, and the message if that is missing.
_FOR: Final = MappingProxyType(
    {
        Op.R: (Op.I, "recomputes for a backward that is not in the table; remove it"),
        Op.FETCH: (Op.I, "fetches for a backward that is not in the table; remove it"),
        Op.OFFLOAD: (
            Op.FETCH,
            "is never fetched; add {missing} before the backward",
        ),
    }
)


def _refuse_missing(schedule: Schedule, what: Action) -> NoReturn:
    assert what.microbatch is not None, f"{what} has no micro-batch"
    rank = schedule.placement.rank_of(what.stage, what.microbatch)
    full = f"or {what._replace(op=Op.B)} " if what.op is not Op.F else ""
    raise ScheduleError(
        f"schedule {schedule.name!r}, rank {rank}: {what} {full}is missing; add it once"
    )


def _has_backward(graph: Precedence) -> bool:
    return any(kind[0] in BACKWARDS for kind in graph.makers)


def _check_own_order(graph: Precedence) -> None:
    """Check that every action comes after the actions of its own rank that it needs."""
    if graph.late:
        node, _, wait = min(graph.late)
        position = wait - graph.starts[graph.ranks[wait]]
        graph.refuse(
            node,
            f"waits for {graph.action(wait)}, which comes later on the same rank, at position "
            f"{position}; move it before this action",
        )


def _check_transfers(graph: Precedence) -> None:
    """Check that sends and receives form pairs between two ranks and match in order."""
    nowhere: Column = [NOWHERE] * graph.schedule.num_microbatches
    for kind, halves in graph.makers.items():
        if kind[0] not in SENDS and kind[0] not in RECEIVES:
            continue
        partners = graph.makers.get(kind_of(counterpart(action_of(kind))), nowhere)
        if _have_partners(graph, halves, partners):
            continue
        for node, partner in zip(halves, partners, strict=True):
            if node == NOWHERE:
                continue
            if partner == NOWHERE:
                missing = counterpart(graph.action(node))
                graph.refuse(node, f"has no partner; add {missing}")
            if graph.ranks[partner] == graph.ranks[node]:
                graph.refuse(
                    node, "transfers a value within one rank, which is not needed; remove it"
                )
    _check_order(graph)


def _have_partners(graph: Precedence, halves: Column, partners: Column) -> bool:
    """Return whether each send or receive in `halves` has its counterpart on another rank."""
    own, others, ranks = map(numbers_of, (halves, partners, graph.ranks))
    own, others = own[own != NOWHERE], others[own != NOWHERE]
    return bool(((others != NOWHERE) & (ranks[others] != ranks[own])).all())


def _check_order(graph: Precedence) -> None:
    """Raise if receives from one rank are posted in a different order than they are sent.

    The order matters across channels, because one queue between two ranks carries all of them.
    """
    ranks, which, numbers = map(numbers_of, (graph.ranks, graph.which, graph.numbers))
    kinds = [at for at, (op, _, _) in enumerate(graph.kinds) if op in SENDS]
    if not kinds:
        return
    partners = [kind_of(counterpart(action_of(graph.kinds[at]))) for at in kinds]
    column = np.full(len(graph.kinds), NOWHERE, np.int32)  # row of `received` for each kind of send
    column[kinds] = np.arange(len(kinds))
    received = np.stack([numbers_of(graph.columns[kind]) for kind in partners])
    sends = np.flatnonzero(column[which] != NOWHERE)
    posts = received[column[which[sends]], numbers[sends]]
    # Sort by pair of ranks, keeping the order in which messages are sent.
    order = np.lexsort((ranks[posts], ranks[sends]))
    sends, posts = sends[order], posts[order]
    are_of_one_pair = (np.diff(ranks[sends]) == 0) & (np.diff(ranks[posts]) == 0)
    is_ahead = are_of_one_pair & (np.diff(posts) < 0)
    if is_ahead.any():
        # Report the first message that is received out of order.
        first = min(np.flatnonzero(is_ahead).tolist(), key=lambda at: int(sends[at + 1]))
        sender = int(ranks[sends[first]])
        _refuse_order(graph, sender, int(posts[first + 1]), int(posts[first]))


def _refuse_order(graph: Precedence, sender: int, post: int, awaited: int) -> NoReturn:
    """Raise because the ``RECV`` at `post` comes before the ``RECV`` of an earlier ``SEND``."""
    expected = graph.action(awaited)
    before = graph.provide(awaited, counterpart(expected))
    graph.refuse(
        post,
        f"is out of order: rank {sender} first sends the message of {expected} "
        f"({graph.where(before)}); post receives in the order of the sends",
    )


def _check_reductions(graph: Precedence, *, is_apart: bool) -> None:
    """Check the gradient reductions and parameter averages of a lowered table.

    All ranks that hold a stage must have the same buckets: one action for all of them, or indices
    from 0, each once. Ranks that share several stages must reduce in the same order, or they would
    deadlock. A table without backward must not reduce. With local SGD (`is_apart`), stages held by
    one rank need no reduction but may be averaged.
    """
    schedule, placement = graph.schedule, graph.schedule.placement
    found: dict[Op, _Found] = {op: defaultdict(dict) for op in (Op.REDUCE_GRAD, Op.AVERAGE)}
    for node in graph.of_buckets:
        action = graph.action(node)
        if action.op in REDUCTIONS:
            if not _has_backward(graph):
                graph.refuse(node, "reduces in a table without backward; remove it")
            found[action.op][action.stage, graph.ranks[node]][action.bucket] = node
    if not _has_backward(graph):
        return
    for stage in range(schedule.num_stages):
        is_needed = not is_apart or len(placement.holders(stage)) > 1
        _check_buckets(graph, Op.REDUCE_GRAD, stage, found[Op.REDUCE_GRAD], is_needed=is_needed)
        _check_buckets(graph, Op.AVERAGE, stage, found[Op.AVERAGE], is_needed=False)
    reduction_order(graph)


def _check_gathers(graph: Precedence) -> None:
    """Check that a stage gathered on one rank is gathered on every rank that holds it."""
    found: _Found = defaultdict(dict)
    for node in graph.of_buckets:
        action = graph.action(node)
        if action.op is Op.UNSHARD:
            found[action.stage, graph.ranks[node]][action.bucket] = node
    for stage in range(graph.schedule.num_stages):
        _check_buckets(graph, Op.UNSHARD, stage, found, is_needed=False)


_Found = dict[tuple[int, int], dict[int | None, int]]
"""For each (stage, rank), the nodes that reduce or gather the stage, by bucket."""


def _check_buckets(
    graph: Precedence, op: Op, stage: int, found: _Found, *, is_needed: bool
) -> None:
    """Check that all ranks that hold a stage run `op` for the same buckets.

    With `is_needed`, a stage without any such action is an error.
    """
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
                    f"missing; add it on each of ranks {holders}"
                )
        for bucket, node in found[stage, rank].items():
            if bucket not in buckets:
                graph.refuse(
                    node,
                    f"is for one bucket, but {Action(op, stage)} already covers all buckets; "
                    "remove one of them",
                )


def _check_bounds(schedule: Schedule) -> None:
    """Check that live activations and posted receives stay within the declared bounds."""
    for what, bounds, count in (
        ("live activations", schedule.max_activations, peak_activations),
        ("posted receives", schedule.max_receives, peak_receives),
    ):
        if bounds is None:
            continue
        if len(bounds) != schedule.num_ranks:
            raise ScheduleError(
                f"schedule {schedule.name!r}: the bounds of {what} need one value for each of "
                f"{schedule.num_ranks} ranks, got {len(bounds)}"
            )
        for rank, (actions, bound) in enumerate(zip(schedule.rows, bounds, strict=True)):
            peak = count(actions)
            if peak.size > bound:
                raise ScheduleError(
                    f"schedule {schedule.name!r}, rank {rank}, position {peak.position}, "
                    f"{actions[peak.position]}: {peak.size} {what}, but the table declares at most "
                    f"{bound}; raise the bound or run backwards earlier"
                )
