"""The order a table imposes: which of its actions must be over before which.

Table and data flow together make a graph. A rank passes its actions in order; an action is passed
once those it waits for are. What cannot be ordered so is a deadlock.
"""

from collections import deque
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, NamedTuple, NoReturn

from gpipe_hpc.errors import ScheduleError
from gpipe_hpc.schedule.table.actions import OF_BUCKETS, RECEIVES, SENDS, Action, Op
from gpipe_hpc.schedule.table.dependencies import (
    CONSUMERS,
    OPTIONAL,
    arrival,
    counterpart,
    dependencies,
    provides,
    skip_of,
)
from gpipe_hpc.schedule.table.schedule import Schedule

Waits = list[tuple[int, ...]]

# Data flow is the same for all micro-batches, so it is looked up by op, stage and peer, a column of
# nodes for each: the node that meets a need of a micro-batch, or NOWHERE.
Kind = tuple[Op, int, int | None]
Column = list[int]
NOWHERE: Final = -1


@dataclass(frozen=True)
class Precedence:
    """A table as a graph; nodes are numbered rank by rank, in table order.

    ``makers[op, stage, peer][microbatch]`` is the node that meets a need; ``waits[node]`` are the
    nodes that an action waits for. ``gathers[stage, rank]`` are the ``UNSHARD`` of a holder, for
    which the first forward of the stage there waits. A wait for another rank's node is a wait for
    a transfer: that node is the ``SEND`` in a lowered table, the value's maker in a bare one.
    """

    schedule: Schedule
    actions: list[Action]
    ranks: list[int]
    starts: list[int]
    makers: dict[Kind, Column]
    waits: Waits
    gathers: dict[tuple[int, int], list[int]] = field(default_factory=dict)

    def where(self, node: int) -> str:
        """Say where a node stands: ``rank 1, position 3, 1B0``."""
        rank = self.ranks[node]
        return f"rank {rank}, position {node - self.starts[rank]}, {self.actions[node]}"

    def refuse(self, node: int, what: str) -> NoReturn:
        """Raise for one node."""
        raise ScheduleError(f"schedule {self.schedule.name!r}, {self.where(node)}: {what}")

    def find(self, need: Action) -> int | None:
        """Return the node that meets a need, None where there is none."""
        column = self.makers.get(kind_of(need))
        if column is None or need.microbatch is None or column[need.microbatch] == NOWHERE:
            return None
        return column[need.microbatch]

    def provide(self, node: int, need: Action) -> int:
        """Return the node that provides what another needs; refuse a need that nobody meets."""
        maker = self.find(need)
        if maker is None:
            self.refuse(node, f"waits for {need}, expected it in the table, got it nowhere; add it")
        return maker

    @cached_property
    def rendezvous_waits(self) -> Waits:
        """Return the waits where every ``SEND`` also waits until its ``RECV`` is posted.

        Every transfer must be whole.
        """
        waits = list(self.waits)
        for kind, sends in self.makers.items():
            if kind[0] in SENDS:
                posts = self.makers[kind_of(counterpart(action_of(kind)))]
                for send, partner in zip(sends, posts, strict=True):
                    if send != NOWHERE:
                        waits[send] = (*waits[send], partner)
        return waits


def kind_of(action: Action) -> Kind:
    """Return what an action has in common with those of other micro-batches."""
    return action.op, action.stage, action.peer


def action_of(kind: Kind) -> Action:
    """Return an action of a kind, of no micro-batch."""
    op, stage, peer = kind
    return Action(op, stage, None, peer)


def build_precedence(schedule: Schedule) -> Precedence:
    """Resolve every dependency of a table.

    Refuses an action that is out of range, on a wrong rank or there twice, and a need unmet.
    """
    actions = [action for row in schedule.ranks for action in row]
    ranks = [rank for rank, row in enumerate(schedule.ranks) for _ in row]
    starts = [0]
    for row in schedule.ranks:
        starts.append(starts[-1] + len(row))
    graph = Precedence(schedule, actions, ranks, starts, {}, [])
    _index(graph)
    _resolve(graph)
    return graph


def _index(graph: Precedence) -> None:
    """Fill in who provides what; refuse an action out of range, out of place or there twice."""
    placement, makers = graph.schedule.placement, graph.makers
    num_microbatches = placement.num_microbatches
    met: dict[Kind, list[tuple[Op, Column]]] = {}
    on_holder: dict[tuple[Action, int], int] = {}
    for node, (action, rank) in enumerate(zip(graph.actions, graph.ranks, strict=True)):
        op, stage, microbatch, peer = action
        columns = met.get((op, stage, peer))
        if (
            columns is None
            or microbatch is None
            or not 0 <= microbatch < num_microbatches
            or placement.rank_of(stage, microbatch) != rank
        ):
            _check_entry(graph, node)
            if op in OF_BUCKETS:  # one on every holder
                first = on_holder.setdefault((action, rank), node)
                if first != node:
                    _refuse_twice(graph, node, first, action)
                if op is Op.UNSHARD:
                    graph.gathers.setdefault((stage, rank), []).append(node)
                continue
            assert microbatch is not None, "checked with the entry"
            columns = met[op, stage, peer] = [
                (need.op, makers.setdefault(kind_of(need), [NOWHERE] * num_microbatches))
                for need in provides(action)
            ]
        for need, column in columns:
            if column[microbatch] != NOWHERE:
                _refuse_twice(graph, node, column[microbatch], action._replace(op=need))
            column[microbatch] = node


def _check_entry(graph: Precedence, node: int) -> None:
    """Refuse one action that names no stage or micro-batch of the table, or is on a wrong rank."""
    placement, rank = graph.schedule.placement, graph.ranks[node]
    op, stage, microbatch, peer = graph.actions[node]
    if not 0 <= stage < placement.num_stages:
        graph.refuse(node, f"no such stage, expected 0 to {placement.num_stages - 1}, got {stage}")
    if peer is not None:
        _check_peer(graph, node)
    if op in OF_BUCKETS:
        if rank not in placement.holders(stage):
            graph.refuse(node, f"wrong rank, expected one of {placement.holders(stage)}")
        return
    if microbatch is None or not 0 <= microbatch < placement.num_microbatches:
        most = placement.num_microbatches - 1
        graph.refuse(node, f"no such micro-batch, expected 0 to {most}, got {microbatch}")
    elif placement.rank_of(stage, microbatch) != rank:
        expected = placement.rank_of(stage, microbatch)
        graph.refuse(node, f"wrong rank, expected rank {expected}, got rank {rank}; move it there")


def _check_peer(graph: Precedence, node: int) -> None:
    """Refuse a peer of an action that is no transfer over a skip of the table."""
    action, skips = graph.actions[node], graph.schedule.skips
    if action.op not in SENDS and action.op not in RECEIVES:
        graph.refuse(node, f"is no transfer, expected no peer, got {action.peer}")
    if skip_of(action) not in skips:
        known = ", ".join(f"{source} to {destination}" for source, destination in skips)
        graph.refuse(
            node,
            f"goes over no skip of the table, expected one of {known or 'none'}, got "
            f"{' to '.join(map(str, skip_of(action) or ()))}; drop it, or name the skip",
        )


def _refuse_twice(graph: Precedence, node: int, first: int, need: Action) -> NoReturn:
    where = graph.where(first)
    graph.refuse(node, f"{need} is done twice, expected once, got it at {where} already; drop one")


class _Need(NamedTuple):
    """What the actions of a kind need: who makes it, and how it comes from elsewhere."""

    action: Action
    makers: Column | None
    posts: Column | None
    sends: Column | None


def _resolve(graph: Precedence) -> None:
    """Fill in the waits of every node; refuse a need that nobody meets."""
    needs: dict[Kind, list[_Need]] = {}
    ranks, append = graph.ranks, graph.waits.append
    leaves_with = _overlaps(graph)
    gathers = dict(graph.gathers)
    for node, action in enumerate(graph.actions):
        op, stage, microbatch, peer = action
        if op in OF_BUCKETS or microbatch is None:
            append(_own_weights(graph, node))
            continue
        kinds = needs.get((op, stage, peer))
        if kinds is None:
            kinds = needs[op, stage, peer] = _needs(graph, action)
        waits: list[int] = []
        rank = ranks[node]
        for need in kinds:
            maker = need.makers[microbatch] if need.makers is not None else NOWHERE
            if maker == NOWHERE:
                if need.action.op in OPTIONAL:
                    continue  # nothing is recomputed or fetched here
                maker = graph.provide(node, need.action._replace(microbatch=microbatch))
            if op in RECEIVES:
                continue  # it posts a buffer; its consumer waits
            if need.posts is not None and ranks[maker] != rank:
                waits.append(need.posts[microbatch])
                maker = need.sends[microbatch] if need.sends is not None else NOWHERE
                if waits[-1] == NOWHERE or maker == NOWHERE:
                    _refuse_untransferred(graph, node, need.action.stage)
            elif leaves_with and ranks[maker] != rank:
                maker = leaves_with.get(maker, maker)
            waits.append(maker)
        if gathers and op is Op.F:
            waits += gathers.pop((stage, rank), ())  # later ones come behind the first anyway
        append(tuple(waits))  # the garbage collector forgets tuples of numbers, not lists


def _overlaps(graph: Precedence) -> dict[int, int]:
    """Return for a forward that is one block with a backward the node at whose end its output is.

    Of a bare table: in a lowered one the sends stand where they are.
    """
    found: dict[int, int] = {}
    if graph.schedule.is_lowered:
        return found
    for forward, backward in graph.schedule.overlaps:
        node, partner = graph.find(forward), graph.find(backward._replace(op=Op.I))
        if node is None or partner is None:
            continue  # whoever needs it says that it is missing
        if graph.ranks[partner] != graph.ranks[node] or partner < node:
            graph.refuse(
                node,
                f"overlaps {backward}, expected it behind on this rank, got "
                f"{graph.where(partner)}; move it there",
            )
        found[node] = partner
    return found


def _refuse_untransferred(graph: Precedence, node: int, source: int) -> NoReturn:
    """Raise for a value of another rank's stage whose transfer is not whole."""
    post = arrival(graph.actions[node], source)
    graph.provide(node, post)
    graph.provide(node, counterpart(post))
    raise AssertionError(f"{post} and its partner are in the table")


def _needs(graph: Precedence, action: Action) -> list[_Need]:
    """Return the needs that the actions of a kind share."""
    schedule = graph.schedule
    column = graph.makers.get
    nowhere = [NOWHERE] * schedule.num_microbatches
    found: list[_Need] = []
    for need in dependencies(action, schedule.num_stages, 1, schedule.skips):
        makers = column(kind_of(need))
        if makers is None and need.op in OPTIONAL:
            continue
        posts: Column | None = None
        sends: Column | None = None
        if schedule.is_lowered and action.op in CONSUMERS and need.stage != action.stage:
            post = arrival(action, need.stage)
            posts = column(kind_of(post), nowhere)
            sends = column(kind_of(counterpart(post)), nowhere)
        found.append(_Need(need, makers, posts, sends))
    return found


def _own_weights(graph: Precedence, node: int) -> tuple[int, ...]:
    """Return what an action of buckets waits for: each holder for what it makes itself."""
    schedule, rank = graph.schedule, graph.ranks[node]
    placement = schedule.placement
    needs = dependencies(graph.actions[node], schedule.num_stages, schedule.num_microbatches)
    return tuple(
        graph.provide(node, need)
        for need in needs
        if placement.rank_of(need.stage, need.microbatch or 0) == rank
    )


def execution_order(graph: Precedence, waits: Waits) -> list[int]:
    """Return the nodes in an order in which ranks can pass them; refuse a deadlock.

    Linear in actions and waits: a blocked rank sleeps until the node it waits for is passed.
    """
    position = graph.starts[:-1]
    passed = bytearray(len(graph.actions))
    sleepers: dict[int, list[int]] = {}
    order: list[int] = []
    awake = deque(range(len(position)))
    while awake:
        rank = awake.popleft()
        node, end = position[rank], graph.starts[rank + 1]
        while node < end:
            blocker = NOWHERE
            for wait in waits[node]:
                if not passed[wait]:
                    blocker = wait
                    break
            if blocker != NOWHERE:
                sleepers.setdefault(blocker, []).append(rank)
                break
            passed[node] = 1
            order.append(node)
            if node in sleepers:
                awake.extend(sleepers.pop(node))
            node += 1
        position[rank] = node
    if len(order) < len(graph.actions):
        raise ScheduleError(_describe_deadlock(graph, sleepers, position))
    return order


def _describe_deadlock(
    graph: Precedence, sleepers: dict[int, list[int]], position: list[int]
) -> str:
    stuck = sorted((rank, wait) for wait, ranks in sleepers.items() for rank in ranks)
    lines = [
        f"  {graph.where(position[rank])} waits for {graph.actions[wait]} "
        f"({graph.where(wait)}, not reached)"
        for rank, wait in stuck
    ]
    return (
        f"schedule {graph.schedule.name!r}: deadlock, expected every rank to finish, "
        f"got {len(stuck)} stuck; reorder one of them:\n" + "\n".join(lines)
    )
