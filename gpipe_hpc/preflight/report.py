"""Format the findings of a preflight as tables and sentences."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final

from gpipe_hpc.planner.costs.prices import Prices
from gpipe_hpc.planner.links import BETWEEN, WITHIN, TimedLinks
from gpipe_hpc.planner.report.columns import aligned
from gpipe_hpc.preflight.facts import Facts
from gpipe_hpc.preflight.measuring import TimedAllReduce
from gpipe_hpc.schedule import Link
from gpipe_hpc.units import bytes_text, ranges_text

_MOST_NAMED: Final = 16
_REMEDIES: Final = {
    WITHIN: "check what else runs on the host, and on which cores",
    BETWEEN: "check cables, ports and other traffic, or do not use the host",
}


@dataclass
class PreflightReport:
    """Report of a preflight, printed by rank 0.

    Attributes:
      lacking: requirements of the run that are not met, one sentence each.
      doubts: warnings, one sentence each.
    """

    heading: str
    facts: Sequence[Facts]
    links: TimedLinks
    sums: Sequence[TimedAllReduce]
    folder: str
    cores: list[str] = field(default_factory=list)
    took_s: float = 0.0
    written: str = ""
    prices: Prices | None = None
    lacking: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)

    @property
    def is_fit(self) -> bool:
        """Return whether all requirements are met."""
        return not self.lacking

    def __str__(self) -> str:
        """Return the tables, followed by problems and a verdict."""
        parts = [self.heading, hosts_text(self.facts), links_text(self.links, self.sums)]
        parts += [] if self.prices is None else [prices_text(self.prices)]
        lines = [
            *self.cores,
            f"run folder {self.folder}: every rank can write and sees the other ranks' files",
        ]
        lines += [self.written] if self.written else []
        lines += [f"not fit: {each}" for each in self.lacking]
        lines += [f"warning: {each}" for each in self.doubts]
        verdict = "all fine" if not self.doubts else f"fit, with {len(self.doubts)} warning(s)"
        if not self.is_fit:
            verdict = f"not fit for this run: {len(self.lacking)} problem(s)"
        return "\n\n".join([*filter(None, parts), "\n".join([*lines, self._end(verdict)])])

    def _end(self, verdict: str) -> str:
        return f"{verdict}; checked in {self.took_s:.1f} s"


def host_number(facts: Sequence[Facts]) -> dict[str, int]:
    """Return a number for each host, in the order of the hosts' first ranks."""
    return {machine: i for i, machine in enumerate(dict.fromkeys(f.machine for f in facts))}


def hosts_text(facts: Sequence[Facts]) -> str:
    """Format a table of hosts: one row for consecutive ranks on the same host."""
    numbers = host_number(facts)
    firsts: dict[str, Facts] = {}
    rows = [["host", "ranks", "device", "free", "planned", "free memory", "/dev/shm", "files", ""]]
    for machine, group in groupby(facts, key=lambda each: each.machine):
        own = list(group)
        first = firsts.setdefault(machine, own[0])
        rows.append(
            [
                first.host,
                ranges_text(each.rank for each in own),
                ", ".join(dict.fromkeys(each.device for each in own)),
                _least(each.device_free_bytes for each in own),
                _most(each.planned_bytes for each in own),
                _least(each.host_free_bytes for each in own),
                _least(each.shm_free_bytes for each in own),
                f"{min(each.files.allowed for each in own):,}",
                _clock_text(facts[0], own[0]) if numbers[machine] else "",
            ]
        )
    rows[0][-1] = "clock" if len(numbers) > 1 else ""
    keep = [i for i in range(len(rows[0])) if any(row[i] for row in rows[1:])]
    return aligned([[row[i] for i in keep] for row in rows], left=range(3))


def _least(amounts: Iterable[int | None]) -> str:
    known = [each for each in amounts if each is not None]
    return bytes_text(min(known)) if known else ""


def _most(amounts: Iterable[int | None]) -> str:
    known = [each for each in amounts if each is not None]
    return bytes_text(max(known)) if known else ""


def _clock_text(first: Facts, other: Facts) -> str:
    """Format the clock offset from rank 0 with its uncertainty, from the ranks' barrier times."""
    least = other.entry.wall_s - first.exit.wall_s
    most = other.exit.wall_s - first.entry.wall_s
    return f"{(least + most) / 2:+.3f} s ±{(most - least) / 2:.3f}"


def links_text(links: TimedLinks, sums: Sequence[TimedAllReduce]) -> str:
    """Format a table with a row for each kind of link, and a line for each group's all-reduce."""
    kinds = links.kinds()
    if not kinds:
        return ""
    rows = [["links", "ways", "latency (median)", "worst", "bandwidth (median)", "worst"]]
    for key, kind in kinds.items():
        ways = [way for way in links.ways if links.kind_of(way) == key]
        rows.append(
            [
                kind.name,
                str(kind.num_ways),
                time_text(kind.latency_s),
                time_text(max(way.latency_s for way in ways)),
                f"{bytes_text(kind.bytes_per_s)}/s",
                f"{bytes_text(min(way.bytes_per_s for way in ways))}/s",
            ]
        )
    lines = [aligned(rows, left=[0])]
    for each in sums[:_MOST_NAMED]:
        lines.append(
            f"ranks {ranges_text(each.ranks)} all-reduce {bytes_text(each.num_bytes)} in "
            f"{time_text(each.took_s)}"
        )
    if len(sums) > _MOST_NAMED:
        lines.append(f"... and {len(sums) - _MOST_NAMED} more groups of ranks")
    return "\n".join(lines)


def prices_text(prices: Prices) -> str:
    """Format a table of the overheads of a step apart from its layers."""
    rows = [
        ["overhead besides layers", "time"],
        ["each action", time_text(prices.action_s)],
        ["each step", time_text(prices.step_s)],
        ["optimizer, per million parameters", time_text(prices.update.seconds(1, 1e6))],
        ["optimizer, per tensor", time_text(prices.update.tensor_s)],
        ["gradient norm, per million parameters", time_text(prices.norm.seconds(1, 1e6))],
    ]
    if prices.summing != Link():
        link = prices.summing
        rows.append(
            [
                "each message of an all-reduce",
                f"{time_text(link.latency)} and {bytes_text(link.bandwidth)}/s",
            ]
        )
    return aligned(rows, left=[0])


def slow_texts(links: TimedLinks, facts: Sequence[Facts]) -> list[str]:
    """Return a sentence for each link that is much slower than the median of its kind."""
    kinds, slow = links.kinds(), links.slow()
    texts = []
    for way in slow[:_MOST_NAMED]:
        kind = kinds[links.kind_of(way)]
        source, destination = (
            f"rank {rank} on {facts[rank].host}" for rank in (way.source, way.destination)
        )
        texts.append(
            f"slow link: {source} to {destination} has {time_text(way.latency_s)} and "
            f"{bytes_text(way.bytes_per_s)}/s, the median of {kind.name} is "
            f"{time_text(kind.latency_s)} and {bytes_text(kind.bytes_per_s)}/s; "
            f"{_REMEDIES[links.kind_of(way)[0]]}"
        )
    if len(slow) > _MOST_NAMED:
        texts.append(f"slow link: {len(slow) - _MOST_NAMED} more links")
    return texts


def time_text(seconds: float) -> str:
    """Format seconds in a suitable unit."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"
