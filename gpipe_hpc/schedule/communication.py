"""Pass: place sends and receives.

A ``SEND`` stands right after the action that makes its value. A ``RECV`` posts a buffer one compute
action ahead of its consumer, so that the transfer overlaps that compute. Where ranks would then
block one another, were every ``SEND`` to wait until its ``RECV`` is posted, a post moves up.
"""

from collections import defaultdict, deque
from dataclasses import dataclass, field, replace

from gpipe_hpc.schedule.actions import COMPUTE, SENDS, Action
from gpipe_hpc.schedule.dependencies import CONSUMERS, Channel, arrival, channel_of, counterpart
from gpipe_hpc.schedule.occupancy import peak_receives
from gpipe_hpc.schedule.precedence import build_precedence, execution_order
from gpipe_hpc.schedule.table import Placement, Schedule


def add_communication(schedule: Schedule) -> Schedule:
    """Add ``SEND`` and ``RECV`` wherever a value crosses ranks; refuse a table that deadlocks."""
    graph = build_precedence(schedule)
    execution_order(graph, graph.waits)
    sends: dict[Action, list[Action]] = defaultdict(list)
    for node, waits in enumerate(graph.waits):
        for maker in waits:
            if graph.ranks[maker] != graph.ranks[node]:
                send = counterpart(arrival(graph.actions[node]))
                sends[graph.actions[maker]].append(send)
    rows = [
        [placed for action in row for placed in (action, *sends.get(action, ()))]
        for row in schedule.ranks
    ]
    machine = _Rendezvous(schedule.placement, rows, _due(schedule.placement, rows))
    placed = machine.run()
    bounds = tuple(peak_receives(row).size for row in placed)
    return replace(schedule, ranks=placed, max_receives=bounds)


def _due(placement: Placement, rows: list[list[Action]]) -> dict[Action, int]:
    """Return for each ``RECV`` the index in its rank's row ahead of which it is posted at latest.

    Posts of one channel are due in the order of its sends, whatever the order of their consumers.
    """
    channels: dict[Channel, list[Action]] = defaultdict(list)
    for row in rows:
        for action in row:
            if action.op in SENDS:
                channels[channel_of(action, placement)].append(counterpart(action))
    wanted = {post for posts in channels.values() for post in posts}
    slots: dict[Action, int] = {}
    for row in rows:
        previous = 0
        for index, action in enumerate(row):
            if action.op not in COMPUTE:
                continue
            if action.op in CONSUMERS and arrival(action) in wanted:
                slots[arrival(action)] = previous
            previous = index
    due: dict[Action, int] = {}
    for posts in channels.values():
        latest = len(rows[_owner(posts[0], placement)])
        for post in reversed(posts):
            latest = min(latest, slots[post])
            due[post] = latest
    return {post: due[post] for posts in channels.values() for post in posts}


def _owner(action: Action, placement: Placement) -> int:
    """Return the rank that runs a ``SEND`` or ``RECV``."""
    assert action.microbatch is not None, f"{action} has no micro-batch"
    return placement.rank_of(action.stage, action.microbatch)


@dataclass
class _Rendezvous:
    """Ranks that run their rows with blocking sends, and write down what they did.

    Every wait has one event, a ``RECV`` posted or a ``SEND`` passed, and an event has one waiter.
    """

    placement: Placement
    rows: list[list[Action]]
    due: dict[Action, int]
    happened: set[Action] = field(default_factory=set)
    sleepers: dict[Action, int] = field(default_factory=dict)
    awake: deque[int] = field(default_factory=deque)

    def __post_init__(self) -> None:
        """Start every rank at its first action."""
        self.position = [0] * len(self.rows)
        self.placed: list[list[Action]] = [[] for _ in self.rows]
        self.posts: list[dict[int, list[Action]]] = [defaultdict(list) for _ in self.rows]
        for post, index in self.due.items():
            self.posts[_owner(post, self.placement)][index].append(post)

    def run(self) -> tuple[tuple[Action, ...], ...]:
        """Run all rows to their end and return them with their receives."""
        self.awake.extend(range(len(self.rows)))
        while True:
            while self.awake:
                self._advance(self.awake.popleft())
            if not self.sleepers:
                return tuple(map(tuple, self.placed))
            self._post_ahead()

    def _advance(self, rank: int) -> None:
        """Run one rank until it blocks."""
        row = self.rows[rank]
        while self.position[rank] < len(row):
            index = self.position[rank]
            for post in self.posts[rank].get(index, ()):
                self._post(rank, post)
            action = row[index]
            event = self._awaited(action)
            if event is not None:
                self.sleepers[event] = rank
                return
            self.placed[rank].append(action)
            self.position[rank] += 1
            if action.op in SENDS:
                self._happen(action)

    def _awaited(self, action: Action) -> Action | None:
        """Return the event that an action waits for, if it has not happened."""
        if action.op in SENDS:
            event = counterpart(action)
        elif action.op in CONSUMERS and arrival(action) in self.due:
            event = counterpart(arrival(action))
        else:
            return None
        return None if event in self.happened else event

    def _post(self, rank: int, post: Action) -> None:
        if post not in self.happened:
            self.placed[rank].append(post)
            self._happen(post)

    def _happen(self, event: Action) -> None:
        self.happened.add(event)
        if event in self.sleepers:
            self.awake.append(self.sleepers.pop(event))

    def _post_ahead(self) -> None:
        """Break every circle of waiting ranks: post one receive where its rank stands.

        The bare table has an order, so each circle holds a blocked ``SEND``. All earlier posts of
        its channel are made, so the order of the channel stays.
        """
        awaited = {rank: event for event, rank in self.sleepers.items()}
        for circle in self._circles(awaited):
            events = [awaited[rank] for rank in circle if awaited[rank].op not in SENDS]
            assert events, f"ranks {circle} wait in a circle that no receive can break"
            post = min(events, key=lambda event: self._cost_of_posting(event, awaited))
            self._post(_owner(post, self.placement), post)

    def _cost_of_posting(self, post: Action, awaited: dict[int, Action]) -> tuple[bool, int]:
        """Prefer a rank that is blocked at a send itself, then the least early post."""
        owner = _owner(post, self.placement)
        return awaited[owner].op in SENDS, self.due[post] - self.position[owner]

    def _circles(self, awaited: dict[int, Action]) -> list[list[int]]:
        """Return the circles among ranks of which each waits for one other."""
        circles: list[list[int]] = []
        seen: set[int] = set()
        for rank in awaited:
            path: dict[int, int] = {}
            while rank not in seen:
                seen.add(rank)
                path[rank] = len(path)
                rank = _owner(awaited[rank], self.placement)
            if rank in path:
                circles.append(list(path)[path[rank] :])
        return circles
