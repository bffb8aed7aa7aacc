"""From timed ways between ranks to what links them, kind by kind, and which links are slow."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median
from typing import Final, NamedTuple

from gpipe_hpc.comm.preflight.timing import Way
from gpipe_hpc.schedule import Cluster, Link

WITHIN: Final = "within a host"
BETWEEN: Final = "between hosts"
_SLOWER: Final = 3.0  # times the median of its kind: no two ways are the same, on a busy host least
_LEAST_S: Final = 100e-6
"""By so much more than the median a latency counts: less is the work of the operating system."""


class Kind(NamedTuple):
    """The ways of one kind: how many, and the median of each of their numbers."""

    name: str
    num_ways: int
    latency_s: float
    bytes_per_s: float

    @property
    def link(self) -> Link:
        """Return what links two ranks of this kind."""
        return Link(self.latency_s, self.bytes_per_s)

    def is_slow(self, way: Way) -> bool:
        """Say whether one of the ways is far slower than most."""
        is_late = way.latency_s > max(_SLOWER * self.latency_s, self.latency_s + _LEAST_S)
        return is_late or way.bytes_per_s < self.bytes_per_s / _SLOWER


@dataclass(frozen=True)
class Links:
    """Ways that were timed, among ranks on these hosts; `hosts`: that of each rank, by any name."""

    hosts: Sequence[str]
    ways: Sequence[Way]

    def kind_of(self, way: Way) -> str:
        """Return whether a way leads from host to host."""
        return WITHIN if self.hosts[way.source] == self.hosts[way.destination] else BETWEEN

    def kinds(self) -> dict[str, Kind]:
        """Return the kinds of which there are ways."""
        found = {}
        for name in (WITHIN, BETWEEN):
            ways = [way for way in self.ways if self.kind_of(way) == name]
            if ways:
                latency_s = median(way.latency_s for way in ways)
                bytes_per_s = median(way.bytes_per_s for way in ways)
                found[name] = Kind(name, len(ways), latency_s, bytes_per_s)
        return found

    def slow(self) -> list[Way]:
        """Return the ways that are far slower than most of their kind."""
        kinds = self.kinds()
        return [way for way in self.ways if kinds[self.kind_of(way)].is_slow(way)]

    def blocks(self) -> list[list[int]]:
        """Return the ranks host by host; a host whose ranks do not follow one another is several.

        `Cluster` numbers ranks so.
        """
        ranks = range(len(self.hosts))
        return [list(block) for _, block in groupby(ranks, key=lambda rank: self.hosts[rank])]

    def cluster(self) -> Cluster | None:
        """Return the cluster that a planner takes; None where no way was timed.

        Each kind has its median; ways that are slow have what was timed, and so have those between
        ranks of a host that is several. A kind without any way has the other one's numbers.
        """
        kinds = self.kinds()
        if not kinds:
            return None
        within, between = (kinds.get(name) for name in (WITHIN, BETWEEN))
        some = within or between
        assert some is not None, "there is one"
        blocks = self.blocks()
        block_of = {rank: i for i, block in enumerate(blocks) for rank in block}
        named = {*self.slow()}
        for way in self.ways:
            is_split = block_of[way.source] != block_of[way.destination]
            if is_split and self.kind_of(way) == WITHIN:
                named.add(way)
        return Cluster(
            hosts=tuple(map(len, blocks)),
            within=(within or some).link,
            between=(between or some).link,
            rank_links={
                (way.source, way.destination): Link(way.latency_s, way.bytes_per_s)
                for way in sorted(named)
            },
        )
