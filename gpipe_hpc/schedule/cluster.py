"""Model of a cluster for simulation: hosts, their ranks, the links between them, and slow ranks."""

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

from gpipe_hpc.errors import ScheduleError
from gpipe_hpc.schedule.costs import Cost, Costs, Link, per_stage
from gpipe_hpc.schedule.table.actions import REDUCTIONS, Action
from gpipe_hpc.schedule.table.schedule import Schedule


class ReductionTime(NamedTuple):
    """Time to reduce a buffer, in seconds: `latency_s`, independent of its size, plus `bytes_s`."""

    latency_s: float
    bytes_s: float

    @property
    def total_s(self) -> float:
        """Return latency plus transfer time."""
        return self.latency_s + self.bytes_s


@dataclass(frozen=True)
class Cluster:
    """Model of a cluster: hosts, their ranks, numbered host by host, and the links between them.

    Times are in seconds, bandwidths in bytes per second. A bandwidth is that of one rank while all
    ranks of its host communicate.

    Args:
        hosts: number of ranks of each host.
        within: link between two ranks of one host.
        between: link between two ranks of different hosts.
        host_links: links of single hosts that replace `between`; between two such hosts the slower
            link is used.
        rank_links: links of single rank pairs, by (source rank, destination rank).
        paces: relative compute time of slow ranks, by rank; 1 if absent.
    """

    hosts: tuple[int, ...]
    within: Link
    between: Link
    host_links: Mapping[int, Link] = field(default_factory=dict)
    rank_links: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    paces: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check that hosts have ranks, and that links and paces name existing hosts and ranks."""
        if not self.hosts or min(self.hosts) < 1:
            raise ScheduleError(
                f"cluster: needs at least one host and one rank on each, got {self.hosts}"
            )
        self._check("host_links", "host", self.host_links, len(self.hosts))
        ends = chain.from_iterable(self.rank_links)
        self._check("rank_links", "rank", ends, self.num_ranks)
        self._check("paces", "rank", self.paces, self.num_ranks)
        for rank, pace in self.paces.items():
            if not 0 < pace < math.inf:
                raise ScheduleError(
                    f"cluster: the pace of rank {rank} must be a factor above 0, got {pace}"
                )

    @staticmethod
    def _check(field: str, what: str, named: Iterable[int], n: int) -> None:
        """Raise if one of `named` is not an index from 0 to n - 1."""
        for number in named:
            if not 0 <= number < n:
                raise ScheduleError(
                    f"cluster: {field} names {what} {number}, but there are only 0 to {n - 1}"
                )

    @cached_property
    def num_ranks(self) -> int:
        """Return the number of ranks."""
        return sum(self.hosts)

    @cached_property
    def _first_ranks(self) -> list[int]:
        return [0, *accumulate(self.hosts)]

    def host_of(self, rank: int) -> int:
        """Return the index of the host that a rank is on."""
        assert 0 <= rank < self.num_ranks, f"no rank {rank} of {self.num_ranks}"
        return bisect_right(self._first_ranks, rank) - 1

    def link(self, source: int, destination: int) -> Link:
        """Return the link from one rank to another."""
        named = self.rank_links.get((source, destination))
        if named is not None:
            return named
        hosts = self.host_of(source), self.host_of(destination)
        if hosts[0] == hosts[1]:
            return self.within
        ends = [self.host_links.get(host, self.between) for host in hosts]
        return Link(max(e.latency for e in ends), min(e.bandwidth for e in ends))

    def reduction_time(
        self, ranks: Sequence[int], nbytes: float, num_buckets: int = 1
    ) -> ReductionTime:
        """Return the time to all-reduce `nbytes` over some ranks, in equal sequential buckets.

        Uses the faster of a ring, with 2 (n - 1) messages of a bucket's n-th part, and a pipelined
        double tree, with 2 log2 n messages. Both run at the speed of the slowest link between
        consecutive ranks, including last to first. `latency_s` is per bucket.
        """
        if len(ranks) < 2 or not nbytes:
            return ReductionTime(0.0, 0.0)
        links = [self.link(*pair) for pair in pairwise([*ranks, ranks[0]])]
        latency = max(link.latency for link in links)
        once_s = 2 * nbytes / min(link.bandwidth for link in links)
        n = len(ranks)
        ring = ReductionTime(2 * (n - 1) * latency, once_s * (n - 1) / n)
        tree = ReductionTime(2 * math.ceil(math.log2(n)) * latency, once_s)
        return min(ring, tree, key=lambda way: way.latency_s * num_buckets + way.bytes_s)

    def replicas(
        self, schedule: Schedule, costs: Costs, num_replicas: int, gradient_bytes: Cost = 0.0
    ) -> list[Costs]:
        """Return the costs of each replica of a table on this cluster, for `simulate_job`.

        The world rank is replica * schedule.num_ranks + rank. Each replica has the links and
        relative compute times of its own ranks; all share the reduction times of `gradient_bytes`
        (bytes per stage) over all ranks that hold the stage. Times of `costs` are in seconds.
        Replicas with equal links share one object.

        Raises:
            ScheduleError: the cluster has too few ranks.
        """
        ranks, placement = schedule.num_ranks, schedule.placement
        if not 0 < num_replicas * ranks <= self.num_ranks:
            raise ScheduleError(
                f"cluster: {num_replicas} replicas of {ranks} ranks need {num_replicas * ranks} "
                f"ranks, but the cluster has {self.num_ranks}; describe more hosts, or use fewer "
                "replicas or stages"
            )
        buckets = _num_buckets(schedule)
        sizes = per_stage("gradient_bytes", gradient_bytes, schedule.num_stages)
        sums = [
            self.reduction_time(
                [
                    r * ranks + each
                    for r in range(num_replicas)
                    for each in placement.holders(stage)
                ],
                nbytes,
                max(1, buckets[stage]),
            )
            for stage, nbytes in enumerate(sizes)
        ]
        costs = replace(
            costs,
            reduction=[each.bytes_s for each in sums],
            reduction_latency=[each.latency_s for each in sums],
            link=self.within,
        )
        ways = sorted(_ways(schedule))
        found: dict[object, Costs] = {}
        each_costs: list[Costs] = []
        for first in range(0, num_replicas * ranks, ranks):
            links = {(a, b): self.link(first + a, first + b) for a, b in ways}
            paces = {r: self.paces[first + r] for r in range(ranks) if first + r in self.paces}
            key = tuple(links.values()), tuple(paces.items())
            if key not in found:
                found[key] = replace(costs, links=links, paces=paces)
            each_costs.append(found[key])
        return each_costs


def _ways(schedule: Schedule) -> set[tuple[int, int]]:
    """Return the pairs of ranks that exchange messages in a table, in both orders."""
    found: set[tuple[int, int]] = set()
    for route in schedule.placement.routes:
        neighbours = [(stage, stage + 1) for stage in range(len(route) - 1)]
        for source, destination in (*neighbours, *schedule.skips):
            pair = route[source], route[destination]
            if pair[0] != pair[1]:
                found |= {pair, pair[::-1]}
    return found


def _num_buckets(schedule: Schedule) -> list[int]:
    """Return the number of gradient reductions (buckets) of each stage."""
    members: list[set[Action]] = [set() for _ in range(schedule.num_stages)]
    for row in schedule.ranks:
        for action in row:
            if action.op in REDUCTIONS:
                members[action.stage].add(action)
    return [len(each) for each in members]
