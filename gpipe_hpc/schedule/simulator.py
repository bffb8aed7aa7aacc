"""The simulator: when each action of a table would run, given what actions cost."""

from collections import defaultdict

from gpipe_hpc.schedule.actions import COMPUTE, SENDS, Action, Op
from gpipe_hpc.schedule.costs import Costs
from gpipe_hpc.schedule.dependencies import Channel, arrival, channel_of, counterpart
from gpipe_hpc.schedule.precedence import Precedence, build_precedence, execution_order
from gpipe_hpc.schedule.table import Schedule
from gpipe_hpc.schedule.timeline import Event, Timeline


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Time a table, bare or lowered; both give the same times. Refuses a deadlock.

    A rank runs its actions in order, each once what it needs is there. Sends are buffered and take
    no time of the rank: a transfer runs from the end of what made the value, those of a channel one
    after the other. Time is linear in the number of actions.
    """
    graph = build_precedence(schedule)
    clock = _Clock(graph, costs)
    for node in execution_order(graph, graph.waits):
        clock.run(node)
    return clock.timeline()


class _Clock:
    """The times of all nodes; run them in an order that respects their waits."""

    def __init__(self, graph: Precedence, costs: Costs) -> None:
        """Resolve the costs of the ops that the table has."""
        num_stages = graph.schedule.num_stages
        ops = {action.op for action in graph.actions} & COMPUTE
        self.graph = graph
        self.durations = {op: costs.of_compute(op, num_stages) for op in sorted(ops)}
        self.transfers = costs.of_transfer(num_stages)
        self.sends = _sends_by_node(graph)
        self.starts = [0.0] * len(graph.actions)
        self.ends = [0.0] * len(graph.actions)
        self.arrivals = [0.0] * len(graph.actions)
        self.free_at = [0.0] * graph.schedule.num_ranks
        self.channel_free_at: dict[Channel, float] = defaultdict(float)

    def run(self, node: int) -> None:
        """Give one node its times."""
        graph, rank = self.graph, self.graph.ranks[node]
        op, stage, _ = graph.actions[node]
        start = self.free_at[rank]
        for wait in graph.waits[node]:
            if graph.ranks[wait] != rank and self.arrivals[wait] > start:
                start = self.arrivals[wait]
        end = start
        if op in COMPUTE:
            end += self.durations[op][stage]
            self.free_at[rank] = end
        self.starts[node], self.ends[node] = start, end
        send = self.sends.get(node)
        if send is not None:
            self._transfer(node, send)

    def _transfer(self, node: int, send: Action) -> None:
        """Move a value once it is made and its channel is free."""
        channel = channel_of(send, self.graph.schedule.placement)
        begin = max(self.ends[node], self.channel_free_at[channel])
        end = begin + self.transfers[min(channel.source, channel.destination)]
        self.channel_free_at[channel] = self.arrivals[node] = end
        if self.graph.actions[node].op in SENDS:
            self.starts[node], self.ends[node] = begin, end

    def timeline(self) -> Timeline:
        """Return the events; a ``RECV`` ends when its value is there."""
        graph, schedule = self.graph, self.graph.schedule
        for node, action in enumerate(graph.actions):
            if action.op in (Op.RECV_F, Op.RECV_B):
                arrived = self.arrivals[graph.provide(node, counterpart(action))]
                self.ends[node] = max(self.starts[node], arrived)
        nodes = zip(graph.ranks, graph.actions, self.starts, self.ends, strict=True)
        events = [Event(*node) for node in nodes]
        rows = zip(graph.starts, graph.starts[1:], strict=False)
        return Timeline(
            events=tuple(tuple(events[first:end]) for first, end in rows),
            num_stages=schedule.num_stages,
            num_microbatches=schedule.num_microbatches,
            name=schedule.name,
        )


def _sends_by_node(graph: Precedence) -> dict[int, Action]:
    """Return the nodes that start a transfer: ``SEND``s, in a bare table the makers of values."""
    if graph.schedule.is_lowered:
        return {node: action for node, action in enumerate(graph.actions) if action.op in SENDS}
    return {
        wait: counterpart(arrival(graph.actions[node]))
        for node, waits in enumerate(graph.waits)
        for wait in waits
        if graph.ranks[wait] != graph.ranks[node]
    }
