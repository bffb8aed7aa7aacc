"""A cluster: hosts, the ranks of each, what links them, and which ranks are slow."""

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
    """What summing a buffer over ranks takes: `latency_s` however small it is, then `bytes_s`."""

    latency_s: float
    bytes_s: float

    @property
    def total_s(self) -> float:
        """Return the sum of both."""
        return self.latency_s + self.bytes_s


@dataclass(frozen=True)
class Cluster:
    """Ranks on hosts, numbered host by host; latencies in seconds, bandwidths in bytes a second.

    `hosts` has the number of ranks of each host. Two ranks of a host are linked by `within`, of two
    hosts by `between`; what `host_links` has for a host takes the place of that, and of two hosts
    the worse link counts. `rank_links` names single ways, (source, destination), that differ from
    all this. A bandwidth is what one rank has while all ranks of its host use theirs. `paces` names
    slow ranks: their compute takes so many times as long.
    """

    hosts: tuple[int, ...]
    within: Link
    between: Link
    host_links: Mapping[int, Link] = field(default_factory=dict)
    rank_links: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    paces: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse a host without ranks, and links or paces for hosts and ranks that do not exist."""
        if not self.hosts or min(self.hosts) < 1:
            raise ScheduleError(
                f"cluster: expected a host at least, and a rank on each, got {self.hosts}"
            )
        self._check("host_links", "host", self.host_links, len(self.hosts))
        ends = chain.from_iterable(self.rank_links)
        self._check("rank_links", "rank", ends, self.num_ranks)
        self._check("paces", "rank", self.paces, self.num_ranks)
        for rank, pace in self.paces.items():
            if not 0 < pace < math.inf:
                raise ScheduleError(
                    f"cluster: pace of rank {rank}, expected a factor above 0, got {pace}"
                )

    @staticmethod
    def _check(field: str, what: str, named: Iterable[int], n: int) -> None:
        """Refuse a number that is not one of n."""
        for number in named:
            if not 0 <= number < n:
                raise ScheduleError(
                    f"cluster: {field} names a {what} that there is not, expected 0 to {n - 1}, "
                    f"got {number}"
                )

    @cached_property
    def num_ranks(self) -> int:
        """Return the number of ranks."""
        return sum(self.hosts)

    @cached_property
    def _first_ranks(self) -> list[int]:
        return [0, *accumulate(self.hosts)]

    def host_of(self, rank: int) -> int:
        """Return the host of a rank."""
        assert 0 <= rank < self.num_ranks, f"no rank {rank} of {self.num_ranks}"
        return bisect_right(self._first_ranks, rank) - 1

    def link(self, source: int, destination: int) -> Link:
        """Return the way from one rank to another."""
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
        """Return what it takes to sum `nbytes` on some ranks, in equal buckets one after the other.

        The quicker of a ring, 2 (n - 1) messages of an n-th of a bucket, and a tree in both
        directions, 2 log2 n of them, of pieces so small that only the first is waited for. Both go
        at the pace of the worst link between neighbours in the order of the ranks, the last one
        followed by the first. The latency is that of each bucket.
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
        """Return what each replica of a table costs on this cluster, for `simulate_job`.

        Times of `costs` are in seconds; world rank = replica x ranks of the table + rank. Each
        replica has the links and paces of its ranks, all have the reductions: `gradient_bytes` of
        each stage, over all that hold it. Replicas on ranks that are linked alike have the same
        object. Refuses more ranks than the cluster has.
        """
        ranks, placement = schedule.num_ranks, schedule.placement
        if not 0 < num_replicas * ranks <= self.num_ranks:
            raise ScheduleError(
                f"cluster: {num_replicas} replicas of {ranks} ranks, expected 1 to "
                f"{self.num_ranks} ranks, got {num_replicas * ranks}; describe more hosts, or use "
                "fewer replicas or stages"
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
    """Return the pairs of ranks between which a table sends, in both directions."""
    found: set[tuple[int, int]] = set()
    for route in schedule.placement.routes:
        neighbours = [(stage, stage + 1) for stage in range(len(route) - 1)]
        for source, destination in (*neighbours, *schedule.skips):
            pair = route[source], route[destination]
            if pair[0] != pair[1]:
                found |= {pair, pair[::-1]}
    return found


def _num_buckets(schedule: Schedule) -> list[int]:
    """Return the number of reductions of each stage; 0 where it has none."""
    members: list[set[Action]] = [set() for _ in range(schedule.num_stages)]
    for row in schedule.ranks:
        for action in row:
            if action.op in REDUCTIONS:
                members[action.stage].add(action)
    return [len(each) for each in members]
