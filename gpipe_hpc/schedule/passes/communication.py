"""Pass that inserts sends and receives into a compute-only table.

A ``SEND`` directly follows the action that makes its value; sends over skips come last. A ``RECV``
posts its buffer one compute action before its consumer, so that the transfer overlaps with that
compute. If ranks would deadlock with sends that block until their ``RECV`` is posted, a ``RECV`` is
moved earlier. All receives of a rank from another are posted in the order of the sends, over all
channels, so that one queue between two ranks serves all channels.
"""

import math
import sys
from array import array
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpipe_hpc.schedule.table.actions import COMPUTE, SENDS, Op
from gpipe_hpc.schedule.table.dependencies import arrival, counterpart
from gpipe_hpc.schedule.table.precedence import (
    NOWHERE,
    SEVERAL,
    NodeLists,
    Precedence,
    runs,
)
from gpipe_hpc.schedule.table.rows import (
    Kind,
    Row,
    action_of,
    column_of,
    integers,
    kind_of,
    numbers_of,
)
from gpipe_hpc.schedule.table.schedule import Schedule


def add_communication(graph: Precedence) -> Schedule:
    """Add ``SEND`` and ``RECV`` to a compute-only table, given as a graph.

    Raises:
        ScheduleError: the table deadlocks.
    """
    if graph.late:
        runs(graph, graph.waits)  # raises: a rank that waits for a later action of its own is stuck
    traffic = _traffic(graph)
    rendezvous = _Rendezvous(traffic, _due_positions(traffic))
    placed = rendezvous.run()
    if placed is None:
        runs(graph, graph.waits)
    assert placed is not None, f"schedule {graph.schedule.name!r}: cannot be executed"
    rows, bounds = zip(*placed, strict=True)
    return replace(graph.schedule, ranks=rows, max_receives=bounds, overlaps=())


class _TransferKinds(NamedTuple):
    """The ``SEND`` and ``RECV`` kinds of all transfers between two stages in one direction."""

    send: Kind
    post: Kind


class _Transfers(NamedTuple):
    """All values sent between ranks, as columns; a transfer is identified by its index."""

    ways: list[_TransferKinds]
    way: "array[int]"
    microbatch: "array[int]"
    sender: "array[int]"
    receiver: "array[int]"


class _SendRow(NamedTuple):
    """A rank's lane: its compute actions, each followed by the sends of its value; no receives.

    ``which`` and ``numbers`` are columns as in `Row`, and ``which`` indexes ``kinds``.
    ``awaits[index]`` lists the transfers that a compute action needs, or the one that a ``SEND``
    starts.
    """

    kinds: list[Kind]
    which: "array[int]"
    numbers: "array[int]"
    awaits: NodeLists

    def are_of(self, ops: Collection[Op]) -> "NDArray[np.bool_]":
        """Return a mask of the actions whose op is in `ops`."""
        return np.array([op in ops for op, _, _ in self.kinds], bool)[numbers_of(self.which)]


class _TableTransfers(NamedTuple):
    """All transfers of a table, and the lane of each rank."""

    transfers: _Transfers
    lanes: list[_SendRow]


def _traffic(graph: Precedence) -> _TableTransfers:
    """Find all transfers and insert each ``SEND`` after the action that makes its value."""
    transfers = _Transfers([], integers(), integers(), integers(), integers())
    awaited, made = _cross(graph, transfers)
    lanes = [
        _lane(graph, rank, row, transfers, awaited, made)
        for rank, row in enumerate(graph.schedule.rows)
    ]
    return _TableTransfers(transfers, lanes)


def _cross(graph: Precedence, transfers: _Transfers) -> tuple[NodeLists, NodeLists]:
    """Find and number all transfers; return those that each node needs and those that it makes."""
    ranks, which, one = map(numbers_of, (graph.ranks, graph.which, graph.waits.one))
    several = graph.waits.several
    users = np.flatnonzero(one != NOWHERE)
    if several:  # repeat a node once for each of its waits
        num_waits = np.ones(len(users), np.int64)
        at_several = np.flatnonzero(one[users] == SEVERAL)
        waits = [several[node] for node in users[at_several].tolist()]
        num_waits[at_several] = list(map(len, waits))
        users = np.repeat(users, num_waits)
        makers = one[users]
        makers[makers == SEVERAL] = list(chain.from_iterable(waits))
    else:
        makers = one[users]
    crosses = ranks[makers] != ranks[users]
    users, makers = users[crosses], makers[crosses]
    sources = makers
    if graph.leaves_with:
        # The output of a forward overlapped with a backward is sent after the backward.
        forward_of = {backward: forward for forward, backward in graph.leaves_with.items()}
        is_forward = np.array([op is Op.F for op, _, _ in graph.kinds], bool)[which[users]]
        own = makers[is_forward].tolist()
        sources = makers.copy()
        sources[is_forward] = [forward_of.get(maker, maker) for maker in own]
    ends, way = np.unique(
        which[users].astype(np.int64) * len(graph.kinds) + which[sources], return_inverse=True
    )
    for user, source in (divmod(each, len(graph.kinds)) for each in ends.tolist()):
        post = arrival(action_of(graph.kinds[user]), graph.kinds[source][1])
        transfers.ways.append(_TransferKinds(kind_of(counterpart(post)), kind_of(post)))
    columns = way, numbers_of(graph.numbers)[users], ranks[makers], ranks[users]
    for column, values in zip(transfers[1:], columns, strict=True):
        column.frombytes(values.astype(np.int32).tobytes())
    return NodeLists.of(graph.num_nodes, users), NodeLists.of(graph.num_nodes, makers)


def _lane(
    graph: Precedence,
    rank: int,
    row: Row,
    transfers: _Transfers,
    awaited: NodeLists,
    made: NodeLists,
) -> _SendRow:
    """Return the lane of a rank; several sends of one value are ordered by distance in stages."""
    ways, way, microbatch, _, _ = transfers
    start, end = graph.starts[rank], graph.starts[rank + 1]
    makes = numbers_of(made.one)[start:end]
    num_sends = (makes != NOWHERE).astype(np.int64)
    in_turn = [
        (node, _nearest_first(transfers, made.several[start + node]))
        for node in np.flatnonzero(makes == SEVERAL).tolist()
    ]
    for node, sent in in_turn:
        num_sends[node] = len(sent)
    computes = np.arange(len(row)) + np.cumsum(num_sends) - num_sends  # positions in the lane
    one = np.empty(len(row) + int(num_sends.sum()), np.int32)
    is_send = np.ones(len(one), bool)
    is_send[computes] = False
    one[computes] = numbers_of(awaited.one)[start:end]
    one[computes[makes >= 0] + 1] = makes[makes >= 0]
    for node, sent in in_turn:
        one[computes[node] + 1 : computes[node] + 1 + len(sent)] = sent
    sent_ways = numbers_of(way)[one[is_send]]
    places = {kind: place for place, kind in enumerate(row.kinds)}
    place_of = np.zeros(len(ways), np.int32)
    for each in np.unique(sent_ways).tolist():
        place_of[each] = places.setdefault(ways[each].send, len(places))
    which, numbers = np.empty_like(one), np.empty_like(one)
    which[computes], numbers[computes] = numbers_of(row.which), numbers_of(row.numbers)
    which[is_send], numbers[is_send] = place_of[sent_ways], numbers_of(microbatch)[one[is_send]]
    several = {
        int(computes[node]): awaited.several[start + node]
        for node in np.flatnonzero(one[computes] == SEVERAL).tolist()
    }
    return _SendRow(
        list(places), column_of(which), column_of(numbers), NodeLists(column_of(one), several)
    )


def _nearest_first(transfers: _Transfers, sent: tuple[int, ...]) -> list[int]:
    """Return the sends of one action's value in the order in which they are sent."""
    ways, way = transfers.ways, transfers.way
    return sorted(sent, key=lambda each: _distance(ways[way[each]].send))


def _distance(send: Kind) -> int:
    """Return the length of a skip in stages, 0 for a neighbour, which needs its value first."""
    _, stage, peer = send
    return 0 if peer is None else abs(peer - stage)


def _due_positions(traffic: _TableTransfers) -> "array[int]":
    """Return for each transfer the last position in its receiver's lane to post its receive at.

    Receives from one rank are due in the order of its sends, independent of the order of their
    consumers.
    """
    due = integers((0,)) * len(traffic.transfers.way)
    latest = numbers_of(due)
    for lane in traffic.lanes:
        awaited = numbers_of(lane.awaits.one)
        computes = np.flatnonzero(lane.are_of(COMPUTE))
        previous = np.concatenate(([0], computes[:-1]))
        needed = awaited[computes]
        latest[needed[needed >= 0]] = previous[needed >= 0]
        for at in np.flatnonzero(needed == SEVERAL).tolist():
            latest[[*lane.awaits.several[int(computes[at])]]] = previous[at]
    for lane in traffic.lanes:
        for _, sent in _by_receiver(traffic.transfers, lane):
            latest[sent] = np.minimum.accumulate(latest[sent[::-1]])[::-1]
    return due


def _by_receiver(
    transfers: _Transfers, lane: _SendRow
) -> "Iterator[tuple[int, NDArray[np.int32]]]":
    """Yield each receiver of a rank's sends, with the transfers to it in sending order."""
    sent = numbers_of(lane.awaits.one)[lane.are_of(SENDS)]
    receivers = numbers_of(transfers.receiver)[sent]
    order = np.argsort(receivers, kind="stable")
    sent, receivers = sent[order], receivers[order]
    cuts = np.flatnonzero(np.diff(receivers)) + 1
    for own, to in zip(np.split(sent, cuts), np.split(receivers, cuts), strict=True):
        if len(own):
            yield int(to[0]), own


@dataclass
class _BlockedCycle:
    """A cycle of ranks, each blocked at a ``SEND`` to the next, with costs of posting receives.

    A cycle of all ranks may persist through millions of posts, each of which changes two costs. The
    minimum of each block of about sqrt(ranks) costs is therefore stored.
    """

    ranks: list[int]
    place: dict[int, int]
    costs: list[int]

    def __post_init__(self) -> None:
        """Compute the minimum of each block."""
        self.width = math.isqrt(len(self.costs)) or 1
        starts = range(0, len(self.costs), self.width)
        self.least = [min(self.costs[start : start + self.width]) for start in starts]

    def change(self, place: int, cost: int) -> None:
        """Replace a cost; a negative place counts from the end."""
        if place < 0:
            place += len(self.costs)
        before, self.costs[place] = self.costs[place], cost
        block = place // self.width
        if cost < self.least[block]:
            self.least[block] = cost
        elif before == self.least[block]:
            start = block * self.width
            self.least[block] = min(self.costs[start : start + self.width])

    def first(self, cost: int, start: int) -> int | None:
        """Return the first place from `start` on with this cost, which is the minimum, or None."""
        block = start // self.width
        here = self.costs[start : (block + 1) * self.width]
        if cost in here:
            return start + here.index(cost)
        if cost not in self.least[block + 1 :]:
            return None
        start = self.least.index(cost, block + 1) * self.width
        return self.costs.index(cost, start)


class _ReceiveRow(NamedTuple):
    """A rank's row with its receives, and the largest number of buffers posted at once."""

    row: Row
    most: int


# Next receive and due position of a rank that has posted all receives.
_NO_POST: Final = NOWHERE, sys.maxsize


@dataclass
class _Rendezvous:
    """Execution of all lanes with blocking sends, which records where each receive is posted.

    A rank blocks until a transfer it needs is sent, or until the receive of its send is posted.
    Each transfer has at most one rank that waits for it.
    """

    traffic: _TableTransfers
    due: "array[int]"
    awake: deque[int] = field(default_factory=deque)

    def __post_init__(self) -> None:
        """Initialize the state of every rank before its first action."""
        transfers, lanes = self.traffic
        num_ranks, num_transfers = len(lanes), len(transfers.way)
        self.position = [0] * num_ranks
        # Receives that each rank has posted, and the lane position before which each is posted.
        self.posts = [integers() for _ in lanes]
        self.places = [integers() for _ in lanes]
        self.posted, self.sent = bytearray(num_transfers), bytearray(num_transfers)
        # Whether a rank is blocked on a transfer.
        self.wanted = bytearray(num_transfers)
        # Blocked rank -> transfer it waits for: to be posted if the rank is the sender, else to be
        # sent. Longest blocked first. `fresh` lists ranks blocked since the last search for cycles.
        self.asleep: dict[int, int] = {}
        # Rank -> peer of the transfer that it waits for, or last waited for.
        self.blockers = [NOWHERE] * num_ranks
        self.fresh: list[int] = []
        self.ring: _BlockedCycle | None = None

    def _receives_in_order(self) -> "list[array[int]]":
        """Return the transfers that each rank receives, by due position, then in sending order."""
        transfers, lanes = self.traffic
        coming: list[list[NDArray[np.int32]]] = [[] for _ in lanes]
        for lane in lanes:
            for receiver, sent in _by_receiver(transfers, lane):
                coming[receiver].append(sent)
        due = numbers_of(self.due)
        in_turn: list[array[int]] = []
        for each in coming:
            received = np.concatenate(each) if each else np.zeros(0, np.int32)
            in_turn.append(column_of(received[np.argsort(due[received], kind="stable")]))
        return in_turn

    def run(self) -> Iterator["_ReceiveRow"] | None:
        """Execute all lanes and yield the rows with receives; return None on a deadlock."""
        ranks = [self._run(rank, coming) for rank, coming in enumerate(self._receives_in_order())]
        awake = self.awake
        awake.extend(range(len(ranks)))
        while True:
            while awake:
                next(ranks[awake.popleft()], None)
            if not self.asleep:
                return map(self._placed, range(len(ranks)))
            if not self._post_early():
                return None

    def _run(self, rank: int, coming: "array[int]") -> Iterator[None]:
        """Execute one rank's lane, yielding when it blocks; `coming` lists its receives as due."""
        # Local names for speed: this loop is most of the cost of lowering a table.
        lane, transfers = self.traffic.lanes[rank], self.traffic.transfers
        several = lane.awaits.several
        senders, receivers = transfers.sender, transfers.receiver
        sent, posted, wanted = self.sent, self.posted, self.wanted
        asleep, wake = self.asleep, self.awake.append
        add_post, add_place = self.posts[rank].append, self.places[rank].append
        all_due = column_of(numbers_of(self.due)[numbers_of(coming)])
        posts = zip(coming, all_due, strict=True)
        post, due = next(posts, _NO_POST)
        # Actions without transfer need no visit.
        awaited_at = numbers_of(lane.awaits.one)
        at = np.flatnonzero(awaited_at != NOWHERE).astype(np.int32)
        are_sends = lane.are_of(SENDS)[at].tobytes()
        events = zip(column_of(at), column_of(awaited_at[at]), are_sends, strict=True)
        del awaited_at, at
        for index, awaited, is_send in events:
            while due <= index:
                if not posted[post]:
                    posted[post] = 1
                    add_post(post)
                    add_place(due)
                    if wanted[post]:
                        wanted[post] = 0
                        sender = senders[post]
                        del asleep[sender]
                        wake(sender)
                post, due = next(posts, _NO_POST)
            if is_send:
                if not posted[awaited]:
                    self._block_on(rank, index, awaited, receivers[awaited])
                    yield
                sent[awaited] = 1
                if wanted[awaited]:
                    wanted[awaited] = 0
                    receiver = receivers[awaited]
                    del asleep[receiver]
                    wake(receiver)
            elif awaited != SEVERAL:
                if not sent[awaited]:
                    self._block_on(rank, index, awaited, senders[awaited])
                    yield
            else:
                for needed in several[index]:
                    if not sent[needed]:
                        self._block_on(rank, index, needed, senders[needed])
                        yield

    def _placed(self, rank: int) -> "_ReceiveRow":
        """Return a rank's row with its receives, and the largest number posted at once."""
        lane, (ways, way_of, microbatch, _, _) = self.traffic.lanes[rank], self.traffic.transfers
        posts, places = numbers_of(self.posts[rank]), numbers_of(self.places[rank]).astype(np.intp)
        own = Row.in_order(lane.kinds, lane.which, lane.numbers)
        way, which = np.unique(numbers_of(way_of)[posts], return_inverse=True)
        kinds = [ways[each].post for each in way.tolist()]
        row = own.with_ahead(places, kinds, which.astype(np.int32), numbers_of(microbatch)[posts])
        # Number of received messages that are consumed before each position.
        awaited = numbers_of(lane.awaits.one)
        num_taken = ((awaited >= 0) & ~lane.are_of(SENDS)).astype(np.int64)
        for index, needs in lane.awaits.several.items():
            num_taken[index] = len(needs)
        taken = np.cumsum(num_taken)[places] - num_taken[places]
        live = np.arange(1, len(posts) + 1) - taken
        return _ReceiveRow(row, int(live.max(initial=0)))

    def _block_on(self, rank: int, index: int, number: int, other: int) -> None:
        """Block a rank on a transfer with another rank."""
        self.position[rank] = index
        self.asleep[rank] = number
        self.wanted[number] = 1
        self.blockers[rank] = other
        self.fresh.append(rank)

    def _post(self, number: int) -> None:
        """Post the receive of a transfer at its rank's position and unblock its sender."""
        transfers = self.traffic.transfers
        receiver = transfers.receiver[number]
        self.posted[number] = 1
        self.posts[receiver].append(number)
        self.places[receiver].append(self.position[receiver])
        if self.wanted[number]:
            self.wanted[number] = 0
            sender = transfers.sender[number]
            del self.asleep[sender]
            self.awake.append(sender)

    def _post_early(self) -> bool:
        """Break every cycle of blocked ranks by posting one receive early.

        Receives of earlier messages between the two ranks are already posted, so their order is
        kept. Returns False if a cycle has no receive to post: the compute-only table deadlocks.
        """
        fresh, self.fresh = self.fresh, []
        if self._closes_ring_again(fresh):
            number, num_circles = self._cheapest_in_ring(), 1
        else:
            # All earlier cycles were broken, so a new one contains a rank that blocked since.
            circles = self._cycles(each for each in fresh if each in self.asleep)
            number, num_circles = self._cheapest_of_one(circles), len(circles)
        if number is not None:
            self._post(number)
            return True
        # Start from the ranks that have been blocked longest.
        for circle in self._cycles(self.asleep, num_circles):
            costs = self._costs_of_posting(circle)
            if not costs:
                return False
            self._post(min(costs, key=costs.__getitem__))
        return True

    def _closes_ring_again(self, fresh: list[int]) -> bool:
        """Return whether the newly blocked rank closes the same cycle; update costs."""
        ring = self.ring
        if ring is None or len(fresh) != 1:
            return False
        (rank,) = fresh
        place, number = ring.place.get(rank), self.asleep.get(rank)
        if place is None or number is None or self.traffic.transfers.sender[number] != rank:
            return False
        behind = ring.ranks[place + 1 - len(ring.ranks)]
        if self.traffic.transfers.receiver[number] != behind:
            return False
        due, position = self.due, self.position
        ring.change(place - 1, due[self.asleep[ring.ranks[place - 1]]] - position[rank])
        ring.change(place, due[number] - position[behind])
        return True

    def _cheapest_in_ring(self) -> int | None:
        """Return the transfer of the cycle that is cheapest to post, or None.

        Of several, the first is chosen, starting where the longest-blocked rank leads into the
        cycle.
        """
        ring = self.ring
        assert ring is not None, "called with a ring"
        cost = min(ring.least)
        place = ring.first(cost, 0)
        assert place is not None, "one place has the minimum"
        start = ring.place.get(next(iter(self.asleep)), NOWHERE)
        if start > place:
            behind = ring.first(cost, start)
            place = place if behind is None else behind
        elif start == NOWHERE and ring.first(cost, place + 1) is not None:
            return None
        return self.asleep[ring.ranks[place]]

    def _cheapest_of_one(self, circles: list[list[int]]) -> int | None:
        """Return the cheapest transfer to post if exactly one is cheapest, else None."""
        self.ring = None
        if len(circles) != 1:
            return None
        (found,) = circles
        costs = self._costs_of_posting(found)
        if len(costs) == len(found):
            place_of = {rank: place for place, rank in enumerate(found)}
            self.ring = _BlockedCycle(found, place_of, [cost for _, cost in costs.values()])
            return self._cheapest_in_ring()
        in_turn = sorted(costs.values())
        if not in_turn or in_turn[:1] == in_turn[1:2]:
            return None
        return min(costs, key=costs.__getitem__)

    def _costs_of_posting(self, circle: list[int]) -> dict[int, tuple[bool, int]]:
        """Return the cost of posting early each receive that blocks a cycle, by transfer.

        A cost is a pair: whether the receiver is not blocked at a send, and the number of positions
        by which the receive would be posted early.
        """
        receivers, senders = self.traffic.transfers.receiver, self.traffic.transfers.sender
        asleep = self.asleep
        costs: dict[int, tuple[bool, int]] = {}
        for rank in circle:
            number = asleep[rank]
            if senders[number] == rank:
                receiver = receivers[number]
                at_a_send = senders[asleep[receiver]] == receiver
                costs[number] = not at_a_send, self.due[number] - self.position[receiver]
        return costs

    def _cycles(self, starts: Iterable[int], most: int | None = None) -> list[list[int]]:
        """Return the cycles of blocked ranks that are reachable from `starts`.

        `most` is the number of cycles, if known, after which the search stops.
        """
        blockers = self.blockers
        circles: list[list[int]] = []
        # Rank -> index of the path that reached it first.
        ways: dict[int, int] = {}
        for way, rank in enumerate(starts):
            while rank not in ways:
                ways[rank] = way
                rank = blockers[rank]
            if ways[rank] == way:
                circles.append(self._cycle_of(rank))
                if len(circles) == most:
                    break
        return circles

    def _cycle_of(self, first: int) -> list[int]:
        """Return the cycle that contains a rank, starting at that rank."""
        blockers = self.blockers
        circle, rank = [first], blockers[first]
        while rank != first:
            circle.append(rank)
            rank = blockers[rank]
        return circle
