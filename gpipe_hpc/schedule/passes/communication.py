"""Pass: place sends and receives.

A ``SEND`` stands right after the action that makes its value, those over skips last. A ``RECV``
posts a buffer one compute action ahead of its consumer, so that the transfer overlaps that compute.
Where ranks would then block one another, were every ``SEND`` to wait until its ``RECV`` is posted,
a post moves up. Of all that goes from one rank to another, over whichever channels, the posts stand
in the order of the sends: one queue between the two then serves all channels.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from gpipe_hpc.schedule.table.actions import COMPUTE, Action, Op
from gpipe_hpc.schedule.table.dependencies import arrival, counterpart
from gpipe_hpc.schedule.table.lifetimes import peak_receives
from gpipe_hpc.schedule.table.precedence import build_precedence, execution_order
from gpipe_hpc.schedule.table.schedule import Schedule


def add_communication(schedule: Schedule) -> Schedule:
    """Add ``SEND`` and ``RECV`` wherever a value crosses ranks; refuse a table that deadlocks."""
    traffic = _traffic(schedule)
    placed = _Rendezvous(traffic, _due(traffic)).run()
    bounds = tuple(peak_receives(row).size for row in placed)
    return replace(schedule, ranks=placed, max_receives=bounds, overlaps=())


class _Transfer(NamedTuple):
    """One value that crosses ranks; transfers are numbered, and known by their number."""

    send: Action
    post: Action
    sender: int
    receiver: int


class _Entry(NamedTuple):
    """One entry of a rank's list without receives: a compute action, or a ``SEND``.

    `awaits` are the transfers that a compute action needs, or the one that a ``SEND`` starts.
    """

    action: Action
    sends: bool
    awaits: Sequence[int]


class _Traffic(NamedTuple):
    """All transfers of a table, and each rank's list with its sends."""

    transfers: list[_Transfer]
    rows: list[list[_Entry]]


def _traffic(schedule: Schedule) -> _Traffic:
    """Find what crosses ranks, and put each ``SEND`` behind what makes its value."""
    graph = build_precedence(schedule)
    execution_order(graph, graph.waits)
    transfers: list[_Transfer] = []
    awaits: list[tuple[int, ...]] = [()] * len(graph.actions)
    made: dict[int, list[int]] = defaultdict(list)
    ranks = graph.ranks
    # The output of a forward that is one block with a backward leaves at that one's end.
    forward_of = {backward: forward for forward, backward in schedule.overlaps}
    for node, waits in enumerate(graph.waits):
        for maker in waits:
            if ranks[maker] != ranks[node]:
                user, source = graph.actions[node], graph.actions[maker]
                if forward_of and user.op is Op.F:
                    source = forward_of.get(source, source)
                post = arrival(user, source.stage)
                awaits[node] = (*awaits[node], len(transfers))
                made[maker].append(len(transfers))
                transfers.append(_Transfer(counterpart(post), post, ranks[maker], ranks[node]))
    rows: list[list[_Entry]] = [[] for _ in schedule.ranks]
    for node, action in enumerate(graph.actions):
        row = rows[ranks[node]]
        row.append(_Entry(action, False, awaits[node]))
        own = made.get(node, ())
        if len(own) > 1:
            own = sorted(own, key=lambda number: _distance(transfers[number].send))
        row.extend(_Entry(transfers[number].send, True, (number,)) for number in own)
    return _Traffic(transfers, rows)


def _distance(send: Action) -> int:
    """Return how far a skip leads, 0 for none: what the nearest stage gets, it needs first."""
    return 0 if send.peer is None else abs(send.peer - send.stage)


def _due(traffic: _Traffic) -> dict[int, int]:
    """Return for each transfer the index in its receiver's row ahead of which to post at latest.

    Posts of what one rank sends another are due in the order of the sends, whatever the order of
    their consumers.
    """
    pairs: dict[tuple[int, int], list[int]] = defaultdict(list)
    slots = [0] * len(traffic.transfers)
    for rank, row in enumerate(traffic.rows):
        previous = 0
        for index, (action, sends, numbers) in enumerate(row):
            if sends:
                pairs[rank, traffic.transfers[numbers[0]].receiver].extend(numbers)
                continue
            for number in numbers:
                slots[number] = previous
            if action.op in COMPUTE:
                previous = index
    due: dict[int, int] = {}
    for numbers in pairs.values():
        latest = len(traffic.rows[traffic.transfers[numbers[0]].receiver])
        late_first: list[tuple[int, int]] = []
        for number in reversed(numbers):
            latest = min(latest, slots[number])
            late_first.append((number, latest))
        due.update(reversed(late_first))
    return due


@dataclass
class _Rendezvous:
    """Ranks that run their rows with blocking sends, and write down what they did.

    A rank sleeps until a transfer it needs is sent, or until one it sends is posted; nobody else
    waits for that.
    """

    traffic: _Traffic
    due: dict[int, int]
    awake: deque[int] = field(default_factory=deque)

    def __post_init__(self) -> None:
        """Start every rank at its first action."""
        num_ranks, num_transfers = len(self.traffic.rows), len(self.traffic.transfers)
        self.position = [0] * num_ranks
        self.placed: list[list[Action]] = [[] for _ in range(num_ranks)]
        self.posted, self.sent = bytearray(num_transfers), bytearray(num_transfers)
        # Rank -> the transfer it sleeps for: to be posted if it is the sender, else to be sent.
        self.asleep: dict[int, int] = {}
        self.posts: list[dict[int, list[int]]] = [defaultdict(list) for _ in range(num_ranks)]
        for number, index in self.due.items():
            self.posts[self.traffic.transfers[number].receiver][index].append(number)

    def run(self) -> tuple[tuple[Action, ...], ...]:
        """Run all rows to their end and return them with their receives."""
        self.awake.extend(range(len(self.traffic.rows)))
        while True:
            while self.awake:
                self._advance(self.awake.popleft())
            if not self.asleep:
                return tuple(map(tuple, self.placed))
            self._post_ahead()

    def _advance(self, rank: int) -> None:
        """Run one rank until it blocks."""
        row, posts, placed = self.traffic.rows[rank], self.posts[rank], self.placed[rank]
        for index in range(self.position[rank], len(row)):
            for number in posts.pop(index, ()):
                self._post(number)
            action, sends, numbers = row[index]
            reached = self.posted if sends else self.sent
            for number in numbers:
                if not reached[number]:
                    self.position[rank] = index
                    self.asleep[rank] = number
                    return
            placed.append(action)
            if sends:
                number = numbers[0]
                self.sent[number] = 1
                self._wake(self.traffic.transfers[number].receiver, number)
        self.position[rank] = len(row)

    def _post(self, number: int) -> None:
        if not self.posted[number]:
            self.posted[number] = 1
            transfer = self.traffic.transfers[number]
            self.placed[transfer.receiver].append(transfer.post)
            self._wake(transfer.sender, number)

    def _wake(self, rank: int, number: int) -> None:
        if self.asleep.get(rank) == number:
            del self.asleep[rank]
            self.awake.append(rank)

    def _post_ahead(self) -> None:
        """Break every circle of waiting ranks: post one receive where its rank stands.

        The bare table has an order, so each circle holds a blocked ``SEND``. All that its rank has
        sent the other one before is posted, so the order between the two stays.
        """
        asleep = dict(self.asleep)
        for circle in self._circles(asleep):
            blocked = [asleep[rank] for rank in circle if self._at_a_send(rank, asleep)]
            assert blocked, f"ranks {circle} wait in a circle that no receive can break"
            self._post(min(blocked, key=lambda number: self._cost_of_posting(number, asleep)))

    def _at_a_send(self, rank: int, asleep: dict[int, int]) -> bool:
        return self.traffic.transfers[asleep[rank]].sender == rank

    def _cost_of_posting(self, number: int, asleep: dict[int, int]) -> tuple[bool, int]:
        """Prefer a rank that is blocked at a send itself, then the least early post."""
        receiver = self.traffic.transfers[number].receiver
        return not self._at_a_send(receiver, asleep), self.due[number] - self.position[receiver]

    def _circles(self, asleep: dict[int, int]) -> list[list[int]]:
        """Return the circles among ranks of which each waits for one other."""
        circles: list[list[int]] = []
        seen: set[int] = set()
        for rank in asleep:
            path: dict[int, int] = {}
            while rank not in seen:
                seen.add(rank)
                path[rank] = len(path)
                transfer = self.traffic.transfers[asleep[rank]]
                rank = transfer.receiver if transfer.sender == rank else transfer.sender
            if rank in path:
                circles.append(list(path)[path[rank] :])
        return circles
