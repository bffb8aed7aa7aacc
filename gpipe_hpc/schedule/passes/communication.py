"""Pass: place sends and receives.

A ``SEND`` stands right after the action that makes its value, those over skips last. A ``RECV``
posts a buffer one compute action ahead of its consumer, so that the transfer overlaps that compute.
Where ranks would then block one another, were every ``SEND`` to wait until its ``RECV`` is posted,
a post moves up. Of all that goes from one rank to another, over whichever channels, the posts stand
in the order of the sends: one queue between the two then serves all channels.
"""

import math
import sys
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, compress, count
from typing import NamedTuple

import numpy as np

from gpipe_hpc.schedule.table.actions import COMPUTE, SENDS, Op
from gpipe_hpc.schedule.table.dependencies import arrival, counterpart
from gpipe_hpc.schedule.table.precedence import (
    NOWHERE,
    SEVERAL,
    Links,
    Precedence,
    column_of,
    numbers_of,
    runs,
)
from gpipe_hpc.schedule.table.rows import Kind, Row, RowWriter, action_of, integers, kind_of
from gpipe_hpc.schedule.table.schedule import Schedule


def add_communication(graph: Precedence) -> Schedule:
    """Add ``SEND`` and ``RECV`` wherever a value crosses ranks; refuse a table that deadlocks.

    `graph` is that of a bare table.
    """
    if graph.late:
        runs(graph, graph.waits)  # which a rank that waits for itself cannot pass
    traffic = _traffic(graph)
    rendezvous = _Rendezvous(traffic, _due(traffic))
    placed = rendezvous.run()
    if placed is None:
        runs(graph, graph.waits)
    assert placed is not None, f"schedule {graph.schedule.name!r}: has an order"
    bounds = tuple(rendezvous.most)
    return replace(graph.schedule, ranks=placed, max_receives=bounds, overlaps=())


class _Way(NamedTuple):
    """What the transfers of all micro-batches between two stages have in common."""

    send: Kind
    post: Kind


class _Transfers(NamedTuple):
    """All values that cross ranks. They are known by their number, the place in each column."""

    ways: list[_Way]
    way: "array[int]"
    microbatch: "array[int]"
    sender: "array[int]"
    receiver: "array[int]"


class _Lane(NamedTuple):
    """A rank's list without receives: its compute actions, and behind what makes a value its sends.

    ``which`` and ``numbers`` are columns as those of a `Row`, ``kinds`` what they lead to.
    ``awaits[index]`` are the transfers that a compute action needs, or the one that a ``SEND``
    starts.
    """

    kinds: list[Kind]
    which: "array[int]"
    numbers: "array[int]"
    awaits: Links


class _Traffic(NamedTuple):
    """All transfers of a table, and each rank's list with its sends."""

    transfers: _Transfers
    lanes: list[_Lane]


def _traffic(graph: Precedence) -> _Traffic:
    """Find what crosses ranks, and put each ``SEND`` behind what makes its value."""
    transfers = _Transfers([], integers(), integers(), integers(), integers())
    awaited, made = _cross(graph, transfers)
    lanes = [
        _lane(graph, rank, row, transfers, awaited, made)
        for rank, row in enumerate(graph.schedule.rows)
    ]
    return _Traffic(transfers, lanes)


def _cross(graph: Precedence, transfers: _Transfers) -> tuple[Links, Links]:
    """Number what crosses ranks; return which transfers each node needs, and which it makes."""
    ranks, which, one = map(numbers_of, (graph.ranks, graph.which, graph.waits.one))
    several = graph.waits.several
    users = np.flatnonzero(one != NOWHERE)
    if several:  # once for each wait
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
        # The output of a forward that is one block with a backward leaves at that one's end.
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
        transfers.ways.append(_Way(kind_of(counterpart(post)), kind_of(post)))
    columns = way, numbers_of(graph.numbers)[users], ranks[makers], ranks[users]
    for column, values in zip(transfers[1:], columns, strict=True):
        column.frombytes(values.astype(np.int32).tobytes())
    return Links.of(graph.num_nodes, users), Links.of(graph.num_nodes, makers)


def _lane(
    graph: Precedence, rank: int, row: Row, transfers: _Transfers, awaited: Links, made: Links
) -> _Lane:
    """Return a rank's list with its sends; what the nearest stage gets goes first."""
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
    computes = np.arange(len(row)) + np.cumsum(num_sends) - num_sends  # their places in the lane
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
    return _Lane(list(places), column_of(which), column_of(numbers), Links(column_of(one), several))


def _nearest_first(transfers: _Transfers, sent: tuple[int, ...]) -> list[int]:
    """Return what one action makes for several stages in the order in which it is sent."""
    ways, way = transfers.ways, transfers.way
    return sorted(sent, key=lambda each: _distance(ways[way[each]].send))


def _distance(send: Kind) -> int:
    """Return how far a skip leads, 0 for none: what the nearest stage gets, it needs first."""
    _, stage, peer = send
    return 0 if peer is None else abs(peer - stage)


def _due(traffic: _Traffic) -> "array[int]":
    """Return for each transfer the index in its receiver's lane ahead of which to post at latest.

    Posts of what one rank sends another are due in the order of the sends, whatever the order of
    their consumers.
    """
    transfers, lanes = traffic
    due = integers((0,)) * len(transfers.way)
    for lane in lanes:
        previous = 0
        computes = [op in COMPUTE for op, _, _ in lane.kinds]
        for index, (which, needed) in enumerate(zip(lane.which, lane.awaits.one, strict=True)):
            if computes[which]:
                if needed >= 0:
                    due[needed] = previous
                elif needed == SEVERAL:
                    for number in lane.awaits.several[index]:
                        due[number] = previous
                previous = index
    for lane in lanes:
        sends = [op in SENDS for op, _, _ in lane.kinds]
        latest: dict[int, int] = {}  # by the receiver, from the last send to the first
        starts = map(sends.__getitem__, reversed(lane.which))
        for number in compress(reversed(lane.awaits.one), starts):
            receiver = transfers.receiver[number]
            before = latest.get(receiver, sys.maxsize)
            if due[number] < before:
                latest[receiver] = due[number]
            else:
                due[number] = before
    return due


@dataclass
class _Ring:
    """Ranks that wait in a circle, each at a ``SEND`` to the next.

    `costs` are those of posting what each rank sends. A circle of all ranks may stand through
    millions of posts, each of which changes two of them: so the least of each block of about
    sqrt(ranks) costs is kept.
    """

    ranks: list[int]
    place: dict[int, int]
    costs: list[int]

    def __post_init__(self) -> None:
        """Find the least of each block."""
        self.width = math.isqrt(len(self.costs)) or 1
        starts = range(0, len(self.costs), self.width)
        self.least = [min(self.costs[start : start + self.width]) for start in starts]

    def change(self, place: int, cost: int) -> None:
        """Enter another cost; a place from the end may be counted backwards."""
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
        """Return the first place from `start` on of a cost that is the least of all, or None."""
        block = start // self.width
        here = self.costs[start : (block + 1) * self.width]
        if cost in here:
            return start + here.index(cost)
        if cost not in self.least[block + 1 :]:
            return None
        start = self.least.index(cost, block + 1) * self.width
        return self.costs.index(cost, start)


@dataclass
class _Rendezvous:
    """Ranks that run their lists with blocking sends, and write down what they did.

    A rank sleeps until a transfer it needs is sent, or until one it sends is posted; nobody else
    waits for that.
    """

    traffic: _Traffic
    due: "array[int]"
    awake: deque[int] = field(default_factory=deque)

    def __post_init__(self) -> None:
        """Start every rank at its first action."""
        transfers, lanes = self.traffic
        num_ranks, num_transfers = len(lanes), len(transfers.way)
        self.position = [0] * num_ranks
        self.placed = [RowWriter(lane.kinds) for lane in lanes]
        self.posted, self.sent = bytearray(num_transfers), bytearray(num_transfers)
        # How many posted buffers wait on each rank for who takes what comes, and the most so far.
        self.live, self.most = [0] * num_ranks, [0] * num_ranks
        # Rank -> the transfer it sleeps for: to be posted if it is the sender, else to be sent.
        # Who has slept for longest comes first; `fresh` fell asleep since circles were looked for.
        self.asleep: dict[int, int] = {}
        # Rank -> the rank at the other end of the transfer that it sleeps or last slept for.
        self.blockers = [NOWHERE] * num_ranks
        self.fresh: list[int] = []
        self.ring: _Ring | None = None

    def _posts(self) -> list["array[int]"]:
        """Return for each rank what it receives: as it is due, else as its senders send it."""
        transfers, lanes = self.traffic
        posts = [integers() for _ in lanes]
        receivers = transfers.receiver
        for lane in lanes:
            sends = [op in SENDS for op, _, _ in lane.kinds]
            starts = map(sends.__getitem__, lane.which)
            for number in compress(lane.awaits.one, starts):
                posts[receivers[number]].append(number)
        return [integers(sorted(each, key=self.due.__getitem__)) for each in posts]

    def run(self) -> tuple[Row, ...] | None:
        """Run all lists to their end and return them with their receives; None: they deadlock."""
        ranks = [self._run(rank, posts) for rank, posts in enumerate(self._posts())]
        awake = self.awake
        awake.extend(range(len(ranks)))
        while True:
            while awake:
                next(ranks[awake.popleft()], None)
            if not self.asleep:
                return tuple(writer.row() for writer in self.placed)
            if not self._post_ahead():
                return None

    def _run(self, rank: int, posts: "array[int]") -> Iterator[None]:
        """Run one rank; yield whenever it sleeps. `posts` is what it receives, as it is due."""
        # Names of its own for all that it reads: this is most of the work of lowering a table.
        lane, transfers = self.traffic.lanes[rank], self.traffic.transfers
        several, sends = lane.awaits.several, [op in SENDS for op, _, _ in lane.kinds]
        way_of, senders, receivers = transfers.way, transfers.sender, transfers.receiver
        due, sent, posted, live, most = self.due, self.sent, self.posted, self.live, self.most
        asleep, wake, writer = self.asleep, self.awake.append, self.placed[rank]
        place_kind, place_number = writer.which.append, writer.numbers.append
        ways = set(map(way_of.__getitem__, posts))
        place_of = {way: writer.place(transfers.ways[way].post) for way in ways}
        coming = iter(posts)
        post = next(coming, NOWHERE)
        next_due = sys.maxsize if post == NOWHERE else due[post]
        columns = zip(count(), lane.which, lane.numbers, lane.awaits.one)
        for index, which, number, awaited in columns:
            while next_due <= index:
                if not posted[post]:
                    posted[post] = 1
                    place_kind(place_of[way_of[post]])
                    place_number(transfers.microbatch[post])
                    live[rank] += 1
                    if live[rank] > most[rank]:
                        most[rank] = live[rank]
                    sender = senders[post]
                    if asleep.get(sender) == post:
                        del asleep[sender]
                        wake(sender)
                post = next(coming, NOWHERE)
                next_due = sys.maxsize if post == NOWHERE else due[post]
            if awaited == NOWHERE:
                pass
            elif sends[which]:
                if not posted[awaited]:
                    self._sleep(rank, index, awaited)
                    yield
                sent[awaited] = 1
                receiver = receivers[awaited]
                if asleep.get(receiver) == awaited:
                    del asleep[receiver]
                    wake(receiver)
            else:
                needs = (awaited,) if awaited != SEVERAL else several[index]
                for needed in needs:
                    if not sent[needed]:
                        self._sleep(rank, index, needed)
                        yield
                live[rank] -= len(needs)
            place_kind(which)
            place_number(number)

    def _sleep(self, rank: int, index: int, number: int) -> None:
        self.position[rank] = index
        self.asleep[rank] = number
        transfers = self.traffic.transfers
        sender = transfers.sender[number]
        self.blockers[rank] = sender if sender != rank else transfers.receiver[number]
        self.fresh.append(rank)

    def _post(self, number: int) -> None:
        """Post for one transfer where its rank stands, and wake who sleeps at its ``SEND``."""
        transfers = self.traffic.transfers
        receiver, sender = transfers.receiver[number], transfers.sender[number]
        self.posted[number] = 1
        post = transfers.ways[transfers.way[number]].post
        self.placed[receiver].add(post, transfers.microbatch[number])
        self.live[receiver] += 1
        self.most[receiver] = max(self.most[receiver], self.live[receiver])
        if self.asleep.get(sender) == number:
            del self.asleep[sender]
            self.awake.append(sender)

    def _post_ahead(self) -> bool:
        """Break every circle of waiting ranks: post one receive where its rank stands.

        All that a rank at a blocked ``SEND`` has sent the other one before is posted, so the order
        between the two stays. Return False if a circle holds none: the bare table has no order.
        """
        fresh, self.fresh = self.fresh, []
        if self._is_ring_again(fresh):
            number = self._cheapest_in_ring()
        else:
            # All circles before were broken, so somebody in a new one fell asleep since.
            number = self._cheapest_of_one(
                self._circles(each for each in fresh if each in self.asleep)
            )
        if number is not None:
            self._post(number)
            return True
        asleep = dict(self.asleep)
        for circle in self._circles(asleep):
            costs = self._costs_of_posting(circle, asleep)
            if not costs:
                return False
            self._post(min(costs, key=costs.__getitem__))
        return True

    def _is_ring_again(self, fresh: list[int]) -> bool:
        """Say whether the one rank that fell asleep closes the ring as it was; note its costs."""
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
        """Return the transfer that costs least to post; None if that has to be looked for.

        Of several the first, from where the rank that sleeps for longest leads into the circle.
        """
        ring = self.ring
        assert ring is not None, "there is one"
        cost = min(ring.least)
        place = ring.first(cost, 0)
        assert place is not None, "somebody has the least"
        start = ring.place.get(next(iter(self.asleep)), NOWHERE)
        if start > place:
            behind = ring.first(cost, start)
            place = place if behind is None else behind
        elif start == NOWHERE and ring.first(cost, place + 1) is not None:
            return None
        return self.asleep[ring.ranks[place]]

    def _cheapest_of_one(self, circles: list[list[int]]) -> int | None:
        """Return the transfer that costs least to post; None if there are several, or circles."""
        self.ring = None
        if len(circles) != 1:
            return None
        found, asleep = circles[0], self.asleep
        costs = self._costs_of_posting(found, asleep)
        if len(costs) == len(found):
            place_of = {rank: place for place, rank in enumerate(found)}
            self.ring = _Ring(found, place_of, [cost for _, cost in costs.values()])
            return self._cheapest_in_ring()
        in_turn = sorted(costs.values())
        if not in_turn or in_turn[:1] == in_turn[1:2]:
            return None
        return min(costs, key=costs.__getitem__)

    def _costs_of_posting(
        self, circle: list[int], asleep: dict[int, int]
    ) -> dict[int, tuple[bool, int]]:
        """Return what the ranks of a circle are blocked from sending, and what it costs to post.

        A rank that is blocked at a send itself comes first, then the least early post.
        """
        receivers, senders = self.traffic.transfers.receiver, self.traffic.transfers.sender
        costs: dict[int, tuple[bool, int]] = {}
        for rank in circle:
            number = asleep[rank]
            if senders[number] == rank:
                receiver = receivers[number]
                at_a_send = senders[asleep[receiver]] == receiver
                costs[number] = not at_a_send, self.due[number] - self.position[receiver]
        return costs

    def _circles(self, starts: Iterable[int]) -> list[list[int]]:
        """Return the circles of ranks, each waiting for the next, that some ranks lead into."""
        blockers = self.blockers
        circles: list[list[int]] = []
        seen: set[int] = set()
        for rank in starts:
            path: dict[int, int] = {}
            while rank not in seen:
                seen.add(rank)
                path[rank] = len(path)
                rank = blockers[rank]
            if rank in path:
                circles.append(list(path)[path[rank] :])
        return circles
