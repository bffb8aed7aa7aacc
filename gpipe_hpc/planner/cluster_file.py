"""Read and write the YAML description of a cluster."""

import json
import math
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from gpipe_hpc.errors import ConfigError, ScheduleError, os_remedy
from gpipe_hpc.schedule import Cluster, Link
from gpipe_hpc.yaml_files import read_yaml

_LINK: Final = ("latency_s", "bandwidth_bytes_per_s")
_WAY: Final = ("source", "destination")
_MOST_RANKS: Final = 1_000_000
_REMEDY: Final = "write it with: python -m gpipe_hpc.preflight preflight.out=links.yaml"


def read_cluster(path: str | Path) -> Cluster:
    """Read a cluster description from a YAML file.

        hosts: 1250                   # number of hosts, or a list with the number of ranks of each
        ranks_per_host: 8             # not with a list
        names: [node1, node2]         # host names, optional, only for messages
        links:
          within: {latency_s: 3.0e-6, bandwidth_bytes_per_s: 300.0e9}
          between: {latency_s: 8.0e-6, bandwidth_bytes_per_s: 40.0e9}
          hosts:                      # hosts whose links to other hosts differ from `between`
            17: {latency_s: 8.0e-6, bandwidth_bytes_per_s: 10.0e9}
          ranks:                      # links of single pairs of ranks, one direction each
            - {source: 3, destination: 4, latency_s: 1.0e-3, bandwidth_bytes_per_s: 1.0e9}
        slow_ranks: {4711: 1.5}       # rank: factor by which its compute takes longer

    Ranks and hosts are numbered from 0, ranks host by host; see `Cluster` for the meaning of the
    numbers. Raises ConfigError, which names the file and the key.
    """
    try:
        read = read_yaml(path)
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot read the description of the cluster: {error}; correct the path, or "
            f"{_REMEDY}"
        ) from None
    except ValueError as error:
        raise ConfigError(
            f"{path}: cannot parse the description of the cluster as YAML: {error}; correct the "
            "path or the file"
        ) from None
    file = _ClusterReader(path)
    top = file.keys(read, "", {"hosts", "links"}, {"ranks_per_host", "slow_ranks", "names"})
    hosts = file.hosts(top)
    file.check_names(top.get("names"), len(hosts))
    links = file.keys(top["links"], "links", {"within", "between"}, {"hosts", "ranks"})
    ways = links.get("ranks") or []
    if not isinstance(ways, list):
        file.refuse("links.ranks", "a list", ways)
    try:
        return Cluster(
            hosts=hosts,
            within=file.link(links["within"], "links.within"),
            between=file.link(links["between"], "links.between"),
            host_links={
                file.number(host, "links.hosts", least=0): file.link(link, f"links.hosts.{host}")
                for host, link in file.named(links.get("hosts"), "links.hosts").items()
            },
            rank_links=dict(file.way(way, f"links.ranks[{at}]") for at, way in enumerate(ways)),
            paces={
                file.number(rank, "slow_ranks", least=0): file.amount(pace, f"slow_ranks.{rank}")
                for rank, pace in file.named(top.get("slow_ranks"), "slow_ranks").items()
            },
        )
    except ScheduleError as error:
        raise ConfigError(f"{path}: {error}; correct it, or {_REMEDY}") from None


def write_cluster(
    path: str | Path, cluster: Cluster, names: Sequence[str] = (), about: str = ""
) -> None:
    """Write a cluster in the format of `read_cluster`, replacing an existing file.

    `names` are host names, `about` is written above as comment lines. Raises ConfigError if the
    file cannot be written.
    """
    lines = [f"# {line}".rstrip() for line in about.splitlines()]
    lines.append(f"hosts: {list(cluster.hosts)}  # number of ranks on each host")
    if names:
        lines.append(f"names: {json.dumps(list(names))}")
    lines += [
        "links:",
        f"  within: {_link_text(cluster.within)}",
        f"  between: {_link_text(cluster.between)}",
    ]
    if cluster.host_links:
        lines.append("  hosts:")
        lines += [f"    {host}: {_link_text(link)}" for host, link in cluster.host_links.items()]
    if cluster.rank_links:
        lines.append("  ranks:")
        for (source, destination), link in cluster.rank_links.items():
            ends = f"source: {source}, destination: {destination}"
            lines.append(f"    - {{{ends}, {_link_text(link)[1:]}")
    if cluster.paces:
        lines.append(f"slow_ranks: {dict(cluster.paces)}")
    path = Path(path)
    aside = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text("\n".join(lines) + "\n", "utf-8")
        os.replace(aside, path)
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot write the description of the cluster: {error}; "
            f"{os_remedy(error) or 'check its folder'}, or choose another path"
        ) from None


def _link_text(link: Link) -> str:
    numbers = zip(_LINK, (link.latency, link.bandwidth), strict=True)
    return f"{{{', '.join(f'{name}: {_number_text(number)}' for name, number in numbers)}}}"


def _number_text(number: float) -> str:
    # YAML 1.1 reads 1e-06 (no decimal point) and inf as strings.
    return ".inf" if number == math.inf else f"{number:.4e}"


class _ClusterReader:
    """Validating reader of parts of a cluster file; its errors name the key."""

    def __init__(self, path: str | Path) -> None:
        self.path = path

    def refuse(self, key: str, expected: str, got: object) -> NoReturn:
        """Raise ConfigError that names the key, the expected value and the value found."""
        raise ConfigError(
            f"{self.path}: {key or 'top level'}, expected {expected}, got {got!r:.200}; "
            f"correct it, or {_REMEDY}"
        )

    def named(self, value: object, key: str) -> Mapping[Any, Any]:
        """Return an optional mapping; empty if the file does not contain it."""
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            self.refuse(key, "a mapping", value)
        return value

    def keys(
        self, value: object, key: str, needed: Collection[str], optional: Collection[str] = ()
    ) -> Mapping[str, Any]:
        """Return a mapping after checking that it has all needed keys and no unknown ones."""
        found = self.named(value, key)
        if not set(needed) <= set(found) <= {*needed, *optional}:
            also = f", optionally {', '.join(sorted(optional))}" if optional else ""
            self.refuse(
                key, f"the keys {', '.join(sorted(needed))}{also}", ", ".join(map(str, found))
            )
        return found

    def number(self, value: object, key: str, least: int) -> int:
        """Return an integer of at least `least`."""
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            self.refuse(key, f"an integer of at least {least}", value)
        return value

    def amount(self, value: object, key: str) -> float:
        """Return a number of any kind as a float."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.refuse(key, "a number", value)
        return float(value)

    def link(self, value: object, key: str) -> Link:
        """Parse a link, given as latency in seconds and bandwidth in bytes/s."""
        found = self.keys(value, key, _LINK)
        latency, bandwidth = (self.amount(found[name], f"{key}.{name}") for name in _LINK)
        return Link(latency, bandwidth)

    def way(self, value: object, key: str) -> tuple[tuple[int, int], Link]:
        """Parse a link from one rank to another; return both ranks and the link."""
        found = self.keys(value, key, (*_LINK, *_WAY))
        source, destination = (self.number(found[name], f"{key}.{name}", least=0) for name in _WAY)
        return (source, destination), self.link({name: found[name] for name in _LINK}, key)

    def check_names(self, names: object, num_hosts: int) -> None:
        """Check that host names, if given, are a list with one name per host."""
        if names is None:
            return
        if not isinstance(names, list) or len(names) != num_hosts:
            self.refuse("names", f"a list of {num_hosts} name(s), one for each host", names)

    def hosts(self, top: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the number of ranks of each host."""
        hosts = top["hosts"]
        if isinstance(hosts, list):
            if "ranks_per_host" in top:
                self.refuse("ranks_per_host", "no value if hosts is a list", top["ranks_per_host"])
            counts = [self.number(ranks, "hosts", least=1) for ranks in hosts]
            self.check_size(sum(counts))
            return tuple(counts)
        number = self.number(hosts, "hosts", least=1)
        each = self.number(top.get("ranks_per_host"), "ranks_per_host", least=1)
        self.check_size(number * each)
        return (each,) * number

    def check_size(self, num_ranks: int) -> None:
        """Check that the number of ranks is within the limit of the planner."""
        if num_ranks > _MOST_RANKS:
            self.refuse("hosts", f"at most {_MOST_RANKS:,} ranks in total", num_ranks)
