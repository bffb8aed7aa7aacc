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
    Links,
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
    rows, bounds = zip(*placed, strict=True)
    return replace(graph.schedule, ranks=rows, max_receives=bounds, overlaps=())


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

    def are_of(self, ops: Collection[Op]) -> "NDArray[np.bool_]":
        """Say of each action whether it is of some ops."""
        return np.array([op in ops for op, _, _ in self.kinds], bool)[numbers_of(self.which)]


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


def _by_receiver(transfers: _Transfers, lane: _Lane) -> "Iterator[tuple[int, NDArray[np.int32]]]":
    """Yield to whom a rank sends, and what, in the order in which it does."""
    sent = numbers_of(lane.awaits.one)[lane.are_of(SENDS)]
    receivers = numbers_of(transfers.receiver)[sent]
    order = np.argsort(receivers, kind="stable")
    sent, receivers = sent[order], receivers[order]
    cuts = np.flatnonzero(np.diff(receivers)) + 1
    for own, to in zip(np.split(sent, cuts), np.split(receivers, cuts), strict=True):
        if len(own):
            yield int(to[0]), own


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


class _Placed(NamedTuple):
    """A rank's row with its receives, and the most buffers that it has posted at once."""

    row: Row
    most: int


# What a rank that has posted all posts next, and when.
_NO_POST: Final = NOWHERE, sys.maxsize


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
        # What each rank has posted, and ahead of which index of its lane.
        self.posts = [integers() for _ in lanes]
        self.places = [integers() for _ in lanes]
        self.posted, self.sent = bytearray(num_transfers), bytearray(num_transfers)
        # Whether somebody sleeps for a transfer.
        self.wanted = bytearray(num_transfers)
        # Rank -> the transfer it sleeps for: to be posted if it is the sender, else to be sent.
        # Who has slept for longest comes first; `fresh` fell asleep since circles were looked for.
        self.asleep: dict[int, int] = {}
        # Rank -> the rank at the other end of the transfer that it sleeps or last slept for.
        self.blockers = [NOWHERE] * num_ranks
        self.fresh: list[int] = []
        self.ring: _Ring | None = None

    def _coming(self) -> "list[array[int]]":
        """Return for each rank what it receives: as it is due, else as its senders send it."""
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

    def run(self) -> Iterator["_Placed"] | None:
        """Run all lists to their end and yield them with their receives; None: they deadlock."""
        ranks = [self._run(rank, coming) for rank, coming in enumerate(self._coming())]
        awake = self.awake
        awake.extend(range(len(ranks)))
        while True:
            while awake:
                next(ranks[awake.popleft()], None)
            if not self.asleep:
                return map(self._placed, range(len(ranks)))
            if not self._post_ahead():
                return None

    def _run(self, rank: int, coming: "array[int]") -> Iterator[None]:
        """Run one rank; yield whenever it sleeps. `coming` is what it receives, as it is due."""
        # Names of its own for all that it reads: this is most of the work of lowering a table.
        lane, transfers = self.traffic.lanes[rank], self.traffic.transfers
        several = lane.awaits.several
        senders, receivers = transfers.sender, transfers.receiver
        sent, posted, wanted = self.sent, self.posted, self.wanted
        asleep, wake = self.asleep, self.awake.append
        add_post, add_place = self.posts[rank].append, self.places[rank].append
        all_due = column_of(numbers_of(self.due)[numbers_of(coming)])
        posts = zip(coming, all_due, strict=True)
        post, due = next(posts, _NO_POST)
        # What awaits no transfer only stands between the others.
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
                    self._sleep(rank, index, awaited, receivers[awaited])
                    yield
                sent[awaited] = 1
                if wanted[awaited]:
                    wanted[awaited] = 0
                    receiver = receivers[awaited]
                    del asleep[receiver]
                    wake(receiver)
            elif awaited != SEVERAL:
                if not sent[awaited]:
                    self._sleep(rank, index, awaited, senders[awaited])
                    yield
            else:
                for needed in several[index]:
                    if not sent[needed]:
                        self._sleep(rank, index, needed, senders[needed])
                        yield

    def _placed(self, rank: int) -> "_Placed":
        """Return a rank's list with what it has posted, and the most posts at once."""
        lane, (ways, way_of, microbatch, _, _) = self.traffic.lanes[rank], self.traffic.transfers
        posts, places = numbers_of(self.posts[rank]), numbers_of(self.places[rank]).astype(np.intp)
        own = Row.in_order(lane.kinds, lane.which, lane.numbers)
        way, which = np.unique(numbers_of(way_of)[posts], return_inverse=True)
        kinds = [ways[each].post for each in way.tolist()]
        row = own.with_ahead(places, kinds, which.astype(np.int32), numbers_of(microbatch)[posts])
        # How many of those that came are taken ahead of each place.
        awaited = numbers_of(lane.awaits.one)
        num_taken = ((awaited >= 0) & ~lane.are_of(SENDS)).astype(np.int64)
        for index, needs in lane.awaits.several.items():
            num_taken[index] = len(needs)
        taken = np.cumsum(num_taken)[places] - num_taken[places]
        live = np.arange(1, len(posts) + 1) - taken
        return _Placed(row, int(live.max(initial=0)))

    def _sleep(self, rank: int, index: int, number: int, other: int) -> None:
        """Let a rank sleep for a transfer with another one."""
        self.position[rank] = index
        self.asleep[rank] = number
        self.wanted[number] = 1
        self.blockers[rank] = other
        self.fresh.append(rank)

    def _post(self, number: int) -> None:
        """Post for one transfer where its rank stands, and wake who sleeps at its ``SEND``."""
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

    def _post_ahead(self) -> bool:
        """Break every circle of waiting ranks: post one receive where its rank stands.

        All that a rank at a blocked ``SEND`` has sent the other one before is posted, so the order
        between the two stays. Return False if a circle holds none: the bare table has no order.
        """
        fresh, self.fresh = self.fresh, []
        if self._is_ring_again(fresh):
            number, num_circles = self._cheapest_in_ring(), 1
        else:
            # All circles before were broken, so somebody in a new one fell asleep since.
            circles = self._circles(each for each in fresh if each in self.asleep)
            number, num_circles = self._cheapest_of_one(circles), len(circles)
        if number is not None:
            self._post(number)
            return True
        # In the order in which those who sleep for longest lead into them.
        for circle in self._circles(self.asleep, num_circles):
            costs = self._costs_of_posting(circle)
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
        (found,) = circles
        costs = self._costs_of_posting(found)
        if len(costs) == len(found):
            place_of = {rank: place for place, rank in enumerate(found)}
            self.ring = _Ring(found, place_of, [cost for _, cost in costs.values()])
            return self._cheapest_in_ring()
        in_turn = sorted(costs.values())
        if not in_turn or in_turn[:1] == in_turn[1:2]:
            return None
        return min(costs, key=costs.__getitem__)

    def _costs_of_posting(self, circle: list[int]) -> dict[int, tuple[bool, int]]:
        """Return what the ranks of a circle are blocked from sending, and what it costs to post.

        A rank that is blocked at a send itself comes first, then the least early post.
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

    def _circles(self, starts: Iterable[int], most: int | None = None) -> list[list[int]]:
        """Return the circles of ranks, each waiting for the next, that some ranks lead into.

        `most`: how many there are, where that is known: then nobody looks for more.
        """
        blockers = self.blockers
        circles: list[list[int]] = []
        # Rank -> on which way it was come to first.
        ways: dict[int, int] = {}
        for way, rank in enumerate(starts):
            while rank not in ways:
                ways[rank] = way
                rank = blockers[rank]
            if ways[rank] == way:
                circles.append(self._circle_of(rank))
                if len(circles) == most:
                    break
        return circles

    def _circle_of(self, first: int) -> list[int]:
        """Return the circle that a rank is in, from that rank on."""
        blockers = self.blockers
        circle, rank = [first], blockers[first]
        while rank != first:
            circle.append(rank)
            rank = blockers[rank]
        return circle
