"""The execution order that a table imposes, as a graph in which actions wait for other actions.

The nodes are the actions; the edges come from the table and from the data flow. A rank executes its
actions in order, each once the actions that it waits for are done. If no order satisfies all waits,
the table deadlocks.

Nodes are numbered rank by rank, in table order. Their properties are stored in integer columns, a
few bytes per node, so that tables of millions of actions are processed in seconds.
"""

from array import array
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from operator import itemgetter
from typing import Final, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from gpipe_hpc.errors import ScheduleError
from gpipe_hpc.schedule.table.actions import COPIES, OF_BUCKETS, RECEIVES, SENDS, Action, Op
from gpipe_hpc.schedule.table.dependencies import (
    CONSUMERS,
    OPTIONAL,
    arrival,
    counterpart,
    dependencies,
    provides,
    skip_of,
)
from gpipe_hpc.schedule.table.rows import Kind, action_of, column_of, integers, kind_of, numbers_of
from gpipe_hpc.schedule.table.schedule import Schedule

# Data flow is the same for all micro-batches, so nodes are looked up by kind of action. A column
# has the node of each micro-batch, or NOWHERE.
Column = Sequence[int]
NOWHERE: Final = -1
SEVERAL: Final = -2
# Ops that run asynchronously: their result is not ready when the next action starts.
_ASYNCHRONOUS: Final = COPIES | {Op.UNSHARD}


class NodeLists:
    """Lists of integers, one list for each node, for example the nodes that it waits for.

    Most lists have no or one entry.
    """

    def __init__(self, one: "array[int]", several: dict[int, tuple[int, ...]]) -> None:
        """Create lists from columns.

        Args:
            one: for each node its integer, `NOWHERE` if none, or `SEVERAL` if listed in `several`.
            several: the integers of nodes that have more than one.
        """
        self.one, self.several = one, several

    @classmethod
    def of_none(cls, num_nodes: int) -> "NodeLists":
        """Return empty lists for all nodes."""
        return cls(integers((NOWHERE,)) * num_nodes, {})

    @classmethod
    def of(cls, num_nodes: int, nodes: "NDArray[np.intp]") -> "NodeLists":
        """Return for each node the indices at which it occurs in `nodes`."""
        links = cls.of_none(num_nodes)
        one = numbers_of(links.one)
        order = np.argsort(nodes, kind="stable")
        has, first, num = np.unique(nodes[order], return_index=True, return_counts=True)
        one[has] = np.where(num == 1, order[first], SEVERAL)
        of_several = (each[num > 1].tolist() for each in (has, first, num))
        for node, start, many in zip(*of_several, strict=True):
            links.several[node] = tuple(order[start : start + many].tolist())
        return links

    def copy(self) -> "NodeLists":
        """Return a copy that can be modified."""
        return NodeLists(self.one[:], dict(self.several))

    def add(self, node: int, number: int) -> None:
        """Append an integer to the list of a node."""
        if self.one[node] == NOWHERE:
            self.one[node] = number
        else:
            self.several[node] = (*self[node], number)
            self.one[node] = SEVERAL

    def __getitem__(self, node: int) -> tuple[int, ...]:
        """Return the integers of a node, in the order in which they were added."""
        number = self.one[node]
        if number == SEVERAL:
            return self.several[node]
        return () if number == NOWHERE else (number,)


class _TableError(NamedTuple):
    """An error at a node, and a function that raises it; the first in table order is raised."""

    node: int
    order: int
    refuse: Callable[[], NoReturn]


class LateWait(NamedTuple):
    """A node that needs a later node of its own rank; `order` is the position among its needs."""

    node: int
    order: int
    wait: int


@dataclass(frozen=True)
class Precedence:
    """A table as a graph of actions and waits.

    ``kinds[which[node]]`` is the kind of a node's action and ``numbers[node]`` its micro-batch or
    bucket. ``columns[kind][microbatch]`` is the node of an action; ``makers[kind][microbatch]`` is
    the node that satisfies a need, which is a ``B`` if the table has no separate ``I`` and ``W``.
    `of_buckets` lists the nodes of reductions and all-gathers. ``gathers[stage, rank]`` lists the
    ``UNSHARD`` nodes that the first forward of the stage on the rank waits for.

    ``waits[node]`` lists the nodes that a node waits for, in the order of its needs, without
    compute that its rank has run before. If it waits for a transfer from another rank, the listed
    node is the ``SEND`` in a lowered table and the action that makes the value in a compute-only
    one. `late` lists nodes needed by an earlier node of the same rank. In compute-only tables,
    `leaves_with` maps a forward that is overlapped with a backward to the node of that backward,
    because the forward's output is available only after both.
    """

    schedule: Schedule
    kinds: list[Kind]
    which: "array[int]"
    numbers: "array[int]"
    ranks: "array[int]"
    starts: list[int]
    waits: NodeLists
    columns: dict[Kind, "array[int]"] = field(default_factory=dict)
    makers: dict[Kind, Column] = field(default_factory=dict)
    of_buckets: list[int] = field(default_factory=list)
    gathers: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    late: list[LateWait] = field(default_factory=list)
    leaves_with: dict[int, int] = field(default_factory=dict)

    @property
    def num_nodes(self) -> int:
        """Return the number of actions in the table."""
        return len(self.which)

    @property
    def actions(self) -> Iterator[Action]:
        """Yield the actions of all nodes, in order."""
        return chain.from_iterable(self.schedule.rows)

    def action(self, node: int) -> Action:
        """Return the action of a node."""
        return action_of(self.kinds[self.which[node]], self.numbers[node])

    def where(self, node: int) -> str:
        """Return the position of a node as text: ``rank 1, position 3, 1B0``."""
        rank = self.ranks[node]
        return f"rank {rank}, position {node - self.starts[rank]}, {self.action(node)}"

    def refuse(self, node: int, what: str) -> NoReturn:
        """Raise `ScheduleError` for a node, with its position in the message."""
        raise ScheduleError(f"schedule {self.schedule.name!r}, {self.where(node)}: {what}")

    def find(self, need: Action) -> int | None:
        """Return the node that satisfies a need, or None if there is none."""
        column = self.makers.get(kind_of(need))
        if column is None or need.microbatch is None or column[need.microbatch] == NOWHERE:
            return None
        return column[need.microbatch]

    def provide(self, node: int, need: Action) -> int:
        """Return the node that satisfies a need of `node`; raise if there is none."""
        maker = self.find(need)
        if maker is None:
            self.refuse(node, f"waits for {need}, which is missing from the table; add it")
        return maker

    @cached_property
    def rendezvous_waits(self) -> NodeLists:
        """Return the waits if each ``SEND`` also blocks until its ``RECV`` is posted.

        Every transfer must have both halves.
        """
        waits = self.waits.copy()
        one = numbers_of(waits.one)
        for kind, column in self.columns.items():
            if kind[0] not in SENDS:
                continue
            sends = numbers_of(column)
            posts = numbers_of(self.columns[kind_of(counterpart(action_of(kind)))])
            sends, posts = sends[sends != NOWHERE], posts[sends != NOWHERE]
            is_free = one[sends] == NOWHERE
            one[sends[is_free]] = posts[is_free]
            others = sends[~is_free].tolist(), posts[~is_free].tolist()
            for send, post in zip(*others, strict=True):
                waits.add(send, post)
        return waits


def build_precedence(schedule: Schedule) -> Precedence:
    """Build the graph of a table and resolve all dependencies.

    Raises:
        ScheduleError: an action is out of range, on a wrong rank or duplicated, or the result that
            an action needs is missing from the table.
    """
    places: dict[Kind, int] = {}
    which, numbers, ranks = integers(), integers(), integers()
    starts = [0]
    for rank, row in enumerate(schedule.rows):
        place = [places.setdefault(kind, len(places)) for kind in row.kinds]
        which.extend(column_of(np.array(place, np.int32)[numbers_of(row.which)]))
        numbers.extend(row.numbers)
        ranks.extend(integers((rank,)) * len(row))
        starts.append(len(which))
    waits = NodeLists.of_none(len(which))
    graph = Precedence(schedule, list(places), which, numbers, ranks, starts, waits)
    _index(graph)
    _resolve(graph)
    return graph


def _refuse_first(faults: list[_TableError]) -> None:
    """Raise the first fault in table order, if there is any."""
    if faults:
        min(faults, key=itemgetter(0, 1)).refuse()


def _index(graph: Precedence) -> None:
    """Number the actions of the graph; raise if one is out of range, misplaced or duplicated."""
    schedule = graph.schedule
    num_microbatches = schedule.num_microbatches
    faults: list[_TableError] = []
    on_holder: dict[tuple[Action, int], int] = {}
    regular = [_is_regular(kind, schedule) for kind in graph.kinds]
    which, numbers = numbers_of(graph.which), numbers_of(graph.numbers)
    is_placed = np.array(regular, bool)[which] & (numbers >= 0) & (numbers < num_microbatches)
    nodes = np.flatnonzero(is_placed)
    stages = np.array([stage for _, stage, _ in graph.kinds], np.int32)
    at_home = (
        _rank_of_each(schedule)[stages[which[nodes]], numbers[nodes]]
        == numbers_of(graph.ranks)[nodes]
    )
    is_placed[nodes[~at_home]] = False
    nodes = nodes[at_home]
    # One array of nodes per kind; the first of several nodes of one micro-batch is recorded.
    columns = np.full((len(regular), num_microbatches), NOWHERE, np.int32)
    columns[which[nodes[::-1]], numbers[nodes[::-1]]] = nodes[::-1]
    again = nodes[columns[which[nodes], numbers[nodes]] != nodes].tolist()
    for kind, is_regular, own in zip(graph.kinds, regular, columns, strict=True):
        if is_regular:
            graph.columns[kind] = column_of(own)
    for node in again:
        first = int(columns[which[node], numbers[node]])
        need = provides(graph.action(node))[0]
        faults.append(_TableError(node, 0, partial(_refuse_twice, graph, node, first, need)))
    for node in np.flatnonzero(~is_placed).tolist():
        faults += _index_bucket_action(graph, node, on_holder)
    for kind, column in graph.columns.items():
        for order, need in enumerate(provides(action_of(kind))):
            faults += _provide(graph, kind_of(need), column, order)
    _refuse_first(faults)


def _rank_of_each(schedule: Schedule) -> "NDArray[np.int32]":
    """Return the rank of each stage (rows) for each micro-batch (columns)."""
    placement = schedule.placement
    routes = np.array(placement.routes, np.int32)
    return routes.T[:, np.array(placement.route_of, np.int32)]


def _is_regular(kind: Kind, schedule: Schedule) -> bool:
    """Return whether actions of a kind belong to micro-batches and have a valid stage and peer."""
    op, stage, peer = kind
    if op in OF_BUCKETS or not 0 <= stage < schedule.num_stages:
        return False
    return peer is None or _is_over_a_skip(kind, schedule)


def _is_over_a_skip(kind: Kind, schedule: Schedule) -> bool:
    is_transfer = kind[0] in SENDS or kind[0] in RECEIVES
    return is_transfer and skip_of(action_of(kind)) in schedule.skips


def _index_bucket_action(
    graph: Precedence, node: int, on_holder: dict[tuple[Action, int], int]
) -> Iterator[_TableError]:
    """Record a bucket action, of which each rank that holds the stage has one; yield any fault."""
    action, rank = graph.action(node), graph.ranks[node]
    try:
        _check_entry(graph, node)
    except ScheduleError:
        yield _TableError(node, 0, partial(_refuse_entry, graph, node))
        return
    first = on_holder.setdefault((action, rank), node)
    if first != node:
        yield _TableError(node, 0, partial(_refuse_twice, graph, node, first, action))
    graph.of_buckets.append(node)
    if action.op is Op.UNSHARD:
        graph.gathers.setdefault((action.stage, rank), []).append(node)


def _refuse_entry(graph: Precedence, node: int) -> NoReturn:
    _check_entry(graph, node)
    raise AssertionError(f"{graph.where(node)} is valid")


def _provide(
    graph: Precedence, need: Kind, column: "array[int]", order: int
) -> Iterator[_TableError]:
    """Register the nodes of a column as makers of a need; yield a fault for each duplicate."""
    others = graph.makers.get(need)
    if others is None:
        graph.makers[need] = column
        return
    both = integers(others)
    for microbatch, (other, node) in enumerate(zip(others, column, strict=True)):
        if node == NOWHERE:
            continue
        both[microbatch] = node
        if other != NOWHERE:
            first, again = sorted((other, node))
            what = action_of(need, microbatch)
            yield _TableError(again, order, partial(_refuse_twice, graph, again, first, what))
    graph.makers[need] = both


def _check_entry(graph: Precedence, node: int) -> None:
    """Raise if an action names an invalid stage or micro-batch, or is on a wrong rank."""
    placement, rank = graph.schedule.placement, graph.ranks[node]
    op, stage, microbatch, peer = graph.action(node)
    if not 0 <= stage < placement.num_stages:
        graph.refuse(node, f"stage must be 0 to {placement.num_stages - 1}, got {stage}")
    if peer is not None:
        _check_peer(graph, node)
    if op in OF_BUCKETS:
        if rank not in placement.holders(stage):
            graph.refuse(node, f"wrong rank, stage {stage} is on {placement.holders(stage)}")
        return
    if microbatch is None or not 0 <= microbatch < placement.num_microbatches:
        most = placement.num_microbatches - 1
        graph.refuse(node, f"micro-batch must be 0 to {most}, got {microbatch}")
    elif placement.rank_of(stage, microbatch) != rank:
        expected = placement.rank_of(stage, microbatch)
        graph.refuse(node, f"wrong rank, the stage is on rank {expected}; move the action there")


def _check_peer(graph: Precedence, node: int) -> None:
    """Raise if an action with a peer is not a transfer over a skip of the table."""
    action, skips = graph.action(node), graph.schedule.skips
    if action.op not in SENDS and action.op not in RECEIVES:
        graph.refuse(node, f"only SEND and RECV take a peer, got {action.peer}")
    if skip_of(action) not in skips:
        known = ", ".join(f"{source} to {destination}" for source, destination in skips)
        graph.refuse(
            node,
            f"uses the skip {' to '.join(map(str, skip_of(action) or ()))}, but the table declares "
            f"{known or 'none'}; remove the action or declare the skip",
        )


def _refuse_twice(graph: Precedence, node: int, first: int, need: Action) -> NoReturn:
    where = graph.where(first)
    graph.refuse(node, f"{need} occurs twice, first at {where}; remove one")


class _KindDependency(NamedTuple):
    """A dependency shared by all actions of a kind: the nodes that make and transfer its value."""

    action: Action
    makers: Column
    posts: Column | None
    sends: Column | None


def _resolve(graph: Precedence) -> None:
    """Fill in the waits of all nodes; raise if a needed action is missing."""
    faults: list[_TableError] = []
    _join_blocks(graph)
    for kind, nodes in graph.columns.items():
        for order, need in enumerate(_needs(graph, kind)):
            faults += _link(graph, kind, nodes, order, need)
    for node in graph.of_buckets:
        faults += _link_own_weights(graph, node)
    _refuse_first(faults)
    _link_gathers(graph)


def _join_blocks(graph: Precedence) -> None:
    """Record overlapped forward and backward pairs of a compute-only table in `leaves_with`.

    In a lowered table, the position of the send expresses the overlap.
    """
    if graph.schedule.is_lowered:
        return
    column_of, ranks = graph.makers.get, graph.ranks
    for forward, backward in graph.schedule.overlaps:
        op, stage, microbatch, peer = forward
        _, behind, of_backward, _ = backward
        forwards, backwards = column_of((op, stage, peer)), column_of((Op.I, behind, None))
        if forwards is None or backwards is None or microbatch is None or of_backward is None:
            continue  # reported as missing by the action that needs it
        node, partner = forwards[microbatch], backwards[of_backward]
        if node == NOWHERE or partner == NOWHERE:
            continue
        if ranks[partner] != ranks[node] or partner < node:
            graph.refuse(
                node,
                f"overlaps {backward}, which must come later on the same rank but is at "
                f"{graph.where(partner)}",
            )
        graph.leaves_with[node] = partner


def _needs(graph: Precedence, kind: Kind) -> list[_KindDependency]:
    """Return the dependencies that all actions of a kind share."""
    schedule, action = graph.schedule, action_of(kind)
    nowhere = [NOWHERE] * schedule.num_microbatches
    found: list[_KindDependency] = []
    for need in dependencies(action, schedule.num_stages, 1, schedule.skips):
        makers = graph.makers.get(kind_of(need))
        if makers is None and need.op in OPTIONAL:
            continue
        posts: Column | None = None
        sends: Column | None = None
        if schedule.is_lowered and action.op in CONSUMERS and need.stage != action.stage:
            post = arrival(action, need.stage)
            posts = graph.makers.get(kind_of(post), nowhere)
            sends = graph.makers.get(kind_of(counterpart(post)), nowhere)
        found.append(_KindDependency(need, makers or nowhere, posts, sends))
    return found


def _link(
    graph: Precedence, kind: Kind, nodes: Column, order: int, need: _KindDependency
) -> Iterator[_TableError]:
    """Add one dependency to the waits of a kind's nodes; yield a fault for each missing value."""
    ranks, waits, late, leaves_with = graph.ranks, graph.waits, graph.late, graph.leaves_with
    one = waits.one
    posts_a_buffer = kind[0] in RECEIVES  # the consumer waits instead
    is_optional, is_beside = need.action.op in OPTIONAL, need.action.op in _ASYNCHRONOUS
    is_own = need.action.stage == kind[1]
    if is_own and not is_beside and not posts_a_buffer and _all_precede(need.makers, nodes):
        return
    if not is_beside and not leaves_with and _link_vectorised(graph, kind, nodes, need):
        return
    for microbatch, (node, maker) in enumerate(zip(nodes, need.makers, strict=True)):
        if node == NOWHERE:
            continue
        if maker == NOWHERE:
            if not is_optional:  # an absent R or FETCH means no recomputation or offloading
                what = need.action._replace(microbatch=microbatch)
                yield _TableError(node, 2 * order, partial(_refuse_unmet, graph, node, what))
        elif posts_a_buffer:
            continue
        elif ranks[maker] == ranks[node]:
            if maker > node:
                late.append(LateWait(node, 2 * order, maker))
            if maker > node or is_beside:
                waits.add(node, maker)
        elif need.posts is None or need.sends is None:
            source = leaves_with.get(maker, maker) if leaves_with else maker
            if one[node] == NOWHERE:
                one[node] = source  # as `add` does
            else:
                waits.add(node, source)
        else:
            post, send = need.posts[microbatch], need.sends[microbatch]
            if post == NOWHERE or send == NOWHERE:
                yield _TableError(
                    node,
                    2 * order,
                    partial(_refuse_untransferred, graph, node, need.action.stage),
                )
                continue
            if post > node:
                late.append(LateWait(node, 2 * order, post))
                waits.add(node, post)
            if one[node] == NOWHERE:
                one[node] = send  # as `add` does
            else:
                waits.add(node, send)


def _link_vectorised(graph: Precedence, kind: Kind, nodes: Column, need: _KindDependency) -> bool:
    """Do the work of `_link` with numpy if nothing is missing or late; return whether it did."""
    users, makers = numbers_of(nodes), numbers_of(need.makers)
    there = users != NOWHERE
    users, makers = users[there], makers[there]
    if (makers == NOWHERE).any():
        return False
    if kind[0] in RECEIVES:
        return True
    ranks, one = numbers_of(graph.ranks), numbers_of(graph.waits.one)
    is_own = ranks[makers] == ranks[users]
    if (makers > users)[is_own].any():
        return False
    elsewhere = ~is_own
    sources, users = makers[elsewhere], users[elsewhere]
    if need.posts is not None and need.sends is not None:
        posts = numbers_of(need.posts)[there][elsewhere]
        sources = numbers_of(need.sends)[there][elsewhere]
        if ((posts == NOWHERE) | (sources == NOWHERE) | (posts > users)).any():
            return False
    if (one[users] != NOWHERE).any():
        return False
    one[users] = sources
    return True


def _all_precede(makers: Column, nodes: Column) -> bool:
    """Return whether both columns are complete and every maker precedes its consumer.

    Both columns are nodes of one rank.
    """
    first, then = numbers_of(makers), numbers_of(nodes)
    return bool(((first != NOWHERE) & (first < then)).all())


def _refuse_unmet(graph: Precedence, node: int, need: Action) -> NoReturn:
    graph.provide(node, need)
    raise AssertionError(f"{need} is in the table")


def _refuse_untransferred(graph: Precedence, node: int, source: int) -> NoReturn:
    """Raise because the ``SEND`` or ``RECV`` of a value from another rank is missing."""
    post = arrival(graph.action(node), source)
    graph.provide(node, post)
    graph.provide(node, counterpart(post))
    raise AssertionError(f"{post} and its partner are in the table")


def _link_own_weights(graph: Precedence, node: int) -> Iterator[_TableError]:
    """Make a bucket action wait for the last weight gradient of its stage on its own rank.

    Weight gradients that come later in the row are added as further waits and reported as late.
    """
    schedule, rank = graph.schedule, graph.ranks[node]
    rank_of, last = schedule.placement.rank_of, NOWHERE
    action = graph.action(node)
    for need in dependencies(action, schedule.num_stages, 1):
        makers = graph.makers.get(kind_of(need), [NOWHERE] * schedule.num_microbatches)
        if _all_precede(makers, [node] * len(makers)) and len(schedule.placement.routes) == 1:
            graph.waits.add(node, max(makers))
            continue
        for order, maker in enumerate(makers):
            if rank_of(need.stage, order) != rank:
                continue
            if maker == NOWHERE:
                what = need._replace(microbatch=order)
                yield _TableError(node, order, partial(_refuse_unmet, graph, node, what))
            elif maker > node:
                graph.late.append(LateWait(node, order, maker))
                graph.waits.add(node, maker)
            else:
                last = max(last, maker)
    if last != NOWHERE:
        graph.waits.add(node, last)


def _link_gathers(graph: Precedence) -> None:
    """Make the first forward of a stage on each rank wait for its ``UNSHARD`` actions."""
    for (stage, rank), gathers in graph.gathers.items():
        forwards = graph.columns.get((Op.F, stage, None), ())
        own = (node for node in forwards if node != NOWHERE and graph.ranks[node] == rank)
        first = min(own, default=None)  # later forwards run after the first
        for order, gather in enumerate(gathers if first is not None else ()):
            assert first is not None, "there is one"
            graph.waits.add(first, gather)
            if gather > first:
                graph.late.append(LateWait(first, _AFTER_NEEDS + order, gather))


_AFTER_NEEDS: Final = 2**30


def execution_order(graph: Precedence, waits: NodeLists) -> "array[int]":
    """Return all nodes in an order that the ranks can execute; raise on a deadlock."""
    return integers(chain.from_iterable(runs(graph, waits)))


def runs(graph: Precedence, waits: NodeLists) -> list[range]:
    """Return an executable order of all nodes as ranges of consecutive nodes of one rank.

    Takes time linear in actions and waits: a blocked rank is suspended until the node that it waits
    for is done.

    Raises:
        ScheduleError: the table deadlocks; the message lists the blocked ranks and their waits.
    """
    position = graph.starts[:-1]
    # For each rank: (node, suspended rank) pairs that wait for its nodes, sorted by node.
    sleepers: list[list[tuple[int, int]]] = [[] for _ in position]
    found: list[range] = []
    awake = deque(range(len(position)))
    ways = [_pass(graph, waits, rank, position, sleepers) for rank in awake]
    while awake:
        rank = awake.popleft()
        first = position[rank]
        next(ways[rank], None)
        reached = position[rank]
        found.append(range(first, reached))
        asleep = sleepers[rank]
        while asleep and asleep[0][0] < reached:
            awake.append(asleep.pop(0)[1])
    if sum(map(len, found)) < graph.num_nodes:
        raise ScheduleError(_describe_deadlock(graph, sleepers, position))
    return found


def _pass(
    graph: Precedence,
    waits: NodeLists,
    rank: int,
    position: list[int],
    sleepers: list[list[tuple[int, int]]],
) -> Iterator[None]:
    """Advance one rank through its nodes; record its position, and yield when it has to wait."""
    ranks, one, several = graph.ranks, waits.one, waits.several
    start, end = graph.starts[rank], graph.starts[rank + 1]
    # Nodes without waits need no visit.
    waiting = np.flatnonzero(numbers_of(one)[start:end] != NOWHERE) + start
    for node in column_of(waiting.astype(np.int32)):
        position[rank] = node
        wait = one[node]
        if wait != SEVERAL:
            other = ranks[wait]
            if position[other] <= wait:
                insort(sleepers[other], (wait, rank), key=itemgetter(0))
                yield
            continue
        for each in several[node]:
            other = ranks[each]
            if position[other] <= each:
                insort(sleepers[other], (each, rank), key=itemgetter(0))
                yield
    position[rank] = end


def _describe_deadlock(
    graph: Precedence, sleepers: list[list[tuple[int, int]]], position: list[int]
) -> str:
    stuck = sorted((rank, wait) for each in sleepers for wait, rank in each)
    lines = [
        f"  {graph.where(position[rank])} waits for {graph.action(wait)} "
        f"({graph.where(wait)}, not reached)"
        for rank, wait in stuck
    ]
    return (
        f"schedule {graph.schedule.name!r}: deadlock, {len(stuck)} ranks cannot finish; "
        f"reorder the actions of one of them:\n" + "\n".join(lines)
    )
