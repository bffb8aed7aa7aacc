"""Classify measured links between ranks by kind, and find the slow ones."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median
from typing import Final, NamedTuple

from gpipe_hpc.preflight.timing import CHANNELS, SUMS, TimedLink
from gpipe_hpc.schedule import Cluster, Link

WITHIN: Final = "within a host"
BETWEEN: Final = "between hosts"
_ORDER: Final = tuple((where, what) for what in (CHANNELS, SUMS) for where in (WITHIN, BETWEEN))
_SLOWER: Final = 3.0  # multiple of the median of its kind; busy hosts make timings vary
_LEAST_S: Final = 100e-6
"""Smaller excesses of latency over the median are attributed to the operating system."""

Key = tuple[str, str]
"""Whether links are within or between hosts, and the kind of traffic they carry."""


class LinkKind(NamedTuple):
    """Summary of all measured links of one kind: their number, median latency and bandwidth."""

    name: str
    num_ways: int
    latency_s: float
    bytes_per_s: float

    @property
    def link(self) -> Link:
        """Return a link with the median latency and bandwidth."""
        return Link(self.latency_s, self.bytes_per_s)

    def is_slow(self, way: TimedLink) -> bool:
        """Return whether a measured link is much slower than the median of its kind."""
        is_late = way.latency_s > max(_SLOWER * self.latency_s, self.latency_s + _LEAST_S)
        return is_late or way.bytes_per_s < self.bytes_per_s / _SLOWER

    def is_far(self, way: TimedLink) -> bool:
        """Return whether a measured link is much slower or faster than the median of its kind."""
        is_early = way.latency_s < min(self.latency_s / _SLOWER, self.latency_s - _LEAST_S)
        return self.is_slow(way) or is_early or way.bytes_per_s > self.bytes_per_s * _SLOWER


@dataclass(frozen=True)
class TimedLinks:
    """Measured links between ranks; `hosts` has the host name of each rank."""

    hosts: Sequence[str]
    ways: Sequence[TimedLink]

    def kind_of(self, way: TimedLink) -> Key:
        """Return the kind of a link: within or between hosts, and the traffic that it carries."""
        is_within = self.hosts[way.source] == self.hosts[way.destination]
        return (WITHIN if is_within else BETWEEN), way.carries

    def kinds(self) -> dict[Key, LinkKind]:
        """Return a summary of the measured links of each kind."""
        of_kind: dict[Key, list[TimedLink]] = {}
        for way in self.ways:
            of_kind.setdefault(self.kind_of(way), []).append(way)
        return {
            key: LinkKind(
                f"{key[1]} {key[0]}",
                len(of_kind[key]),
                median(way.latency_s for way in of_kind[key]),
                median(way.bytes_per_s for way in of_kind[key]),
            )
            for key in sorted(of_kind, key=_ORDER.index)
        }

    def slow(self) -> list[TimedLink]:
        """Return the links that are much slower than the median of their kind."""
        kinds = self.kinds()
        return [way for way in self.ways if kinds[self.kind_of(way)].is_slow(way)]

    def blocks(self) -> list[list[int]]:
        """Return groups of consecutive ranks on the same host, as `Cluster` numbers its hosts.

        A host whose ranks are not consecutive appears as several blocks.
        """
        ranks = range(len(self.hosts))
        return [list(block) for _, block in groupby(ranks, key=lambda rank: self.hosts[rank])]

    def cluster(self, paces: Mapping[int, float]) -> Cluster | None:
        """Return a cluster description for the planner, or None if no link was measured.

        Links within and between hosts get the median of stage-boundary transfers, or of all-reduces
        if no transfers were measured. Links far from the median are listed individually, as are
        those between the blocks of a host that appears as several. `paces`: slowdowns of slow
        ranks, see `Cluster`.
        """
        kinds = self.kinds()
        if not kinds:
            return None
        found = [kinds[key] for key in _ORDER if key in kinds]
        within = next((kind for kind in found if WITHIN in kind.name), found[0])
        between = next((kind for kind in found if BETWEEN in kind.name), found[0])
        blocks = self.blocks()
        block_of = {rank: i for i, block in enumerate(blocks) for rank in block}
        named: dict[tuple[int, int], Link] = {}
        for way in self.ways:
            ends = way.source, way.destination
            is_within = self.kind_of(way)[0] == WITHIN
            is_split = is_within and block_of[way.source] != block_of[way.destination]
            if is_split or (within if is_within else between).is_far(way):
                named.setdefault(ends, Link(way.latency_s, way.bytes_per_s))
        return Cluster(
            hosts=tuple(map(len, blocks)),
            within=within.link,
            between=between.link,
            rank_links=dict(sorted(named.items())),
            paces=paces,
        )
