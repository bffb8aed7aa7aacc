"""From timed ways between ranks to what links them, kind by kind, and which links are slow."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median
from typing import Final, NamedTuple

from gpipe_hpc.preflight.timing import CHANNELS, SUMS, Way
from gpipe_hpc.schedule import Cluster, Link

WITHIN: Final = "within a host"
BETWEEN: Final = "between hosts"
_ORDER: Final = tuple((where, what) for what in (CHANNELS, SUMS) for where in (WITHIN, BETWEEN))
_SLOWER: Final = 3.0  # times the median of its kind: no two ways are the same, on a busy host least
_LEAST_S: Final = 100e-6
"""By so much more than the median a latency counts: less is the work of the operating system."""

Key = tuple[str, str]
"""Where ways lead, and what they carry."""


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

    def is_far(self, way: Way) -> bool:
        """Say whether a way is far slower or far faster."""
        is_early = way.latency_s < min(self.latency_s / _SLOWER, self.latency_s - _LEAST_S)
        return self.is_slow(way) or is_early or way.bytes_per_s > self.bytes_per_s * _SLOWER


@dataclass(frozen=True)
class Links:
    """Ways that were timed, among ranks on these hosts; `hosts`: that of each rank, by any name."""

    hosts: Sequence[str]
    ways: Sequence[Way]

    def kind_of(self, way: Way) -> Key:
        """Return whether a way leads from host to host, and what it carries."""
        is_within = self.hosts[way.source] == self.hosts[way.destination]
        return (WITHIN if is_within else BETWEEN), way.carries

    def kinds(self) -> dict[Key, Kind]:
        """Return the kinds of which there are ways."""
        of_kind: dict[Key, list[Way]] = {}
        for way in self.ways:
            of_kind.setdefault(self.kind_of(way), []).append(way)
        return {
            key: Kind(
                f"{key[1]} {key[0]}",
                len(of_kind[key]),
                median(way.latency_s for way in of_kind[key]),
                median(way.bytes_per_s for way in of_kind[key]),
            )
            for key in sorted(of_kind, key=_ORDER.index)
        }

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

    def cluster(self, paces: Mapping[int, float]) -> Cluster | None:
        """Return the cluster that a planner takes; None where no way was timed.

        `paces`: of slow ranks, see `Cluster`. Links within and between hosts have the medians of
        boundaries, or of sums where none goes there; a way that is far from that has what was
        timed, and so have those between ranks of a host that is several.
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
