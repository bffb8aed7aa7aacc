"""Which CPUs each rank of one machine takes: pure arithmetic over what the ranks were given."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

from gpipe_hpc.device.cores.machine import Core, Quota, cpus_text


class Asked(NamedTuple):
    """What a rank was given, and what it wants.

    `allowed`: the CPUs that its launcher lets it use. `node`: the NUMA node of its device; None for
    a CPU, or where nothing is known. `num_threads`: as the user set it; None for one a core.
    """

    allowed: frozenset[int]
    node: int | None = None
    quota: Quota | None = None
    num_threads: int | None = None


class Lot(NamedTuple):
    """Ranks, by their number on the machine, that were given CPUs in common, and what each takes.

    `why_not`: why they are left as they were given; empty where each is bound to `cpus` of its own.
    """

    members: tuple[int, ...]
    cpus: tuple[frozenset[int], ...]
    nodes: tuple[tuple[int, ...], ...]
    num_threads: tuple[int, ...]
    why_not: str

    @property
    def is_bound(self) -> bool:
        """Say whether each takes CPUs of its own."""
        return not self.why_not


GIVEN = "as they were given"
"""Why ranks that share no CPU with another are left as they are."""


def share_out(cores: Sequence[Core], ranks: Sequence[Asked], *, binds: bool = True) -> list[Lot]:
    """Return who takes which CPUs of a machine; no two ranks share one where that can be.

    `ranks`: all of the job on this machine, in order. Ranks that were given CPUs of their own keep
    them: a launcher has bound them. Those that were given the same ones get whole cores each, as
    many as can be equal, on the node of its device; ranks without a device are spread over the
    nodes, neighbours next to each other. All are left as they are where there are fewer cores than
    ranks or than threads asked for, and where a quota says how much time they have and not where:
    other containers of the machine would take the same cores. `binds`: false leaves all.
    """
    using = Counter(rank.quota.group for rank in ranks if rank.quota is not None)
    lots = []
    for members in _in_common(ranks):
        own = [ranks[member] for member in members]
        parts = _parts(cores, own) if binds else "train.bind=none"
        dealt: list[list[Core]] | None = None if isinstance(parts, str) else parts
        why_not = parts if isinstance(parts, str) else ""
        cpus = tuple(
            rank.allowed if dealt is None else frozenset().union(*(core.cpus for core in part))
            for rank, part in zip(own, dealt or [[]] * len(own), strict=True)
        )
        held = [_within(cores, each) for each in cpus]
        share = 1 if dealt is not None else len(own)
        threads = tuple(
            max(1, _threads(rank, len(part) // share, using))
            for rank, part in zip(own, held, strict=True)
        )
        nodes = tuple(tuple(sorted({core.node for core in part})) for part in held)
        lots.append(Lot(members, cpus, nodes, threads, why_not))
    return lots


def lots_text(lots: Sequence[Lot], num_nodes: int) -> str:
    """Say which CPUs the ranks of a machine have, in one line; nodes where it has several."""
    alone = [lot for lot in lots if len(lot.members) == 1 and not lot.is_bound]
    texts = []
    if alone:
        number = len(alone)
        one = number == 1
        where = " | ".join(_where(lot, 0, num_nodes) for lot in alone)
        texts.append(
            f"{number} rank{'' if one else 's'} on CPUs {where}, "
            f"{'as it was given' if one else GIVEN}"
        )
    for lot in lots:
        number = len(lot.members)
        where = " | ".join(_where(lot, i, num_nodes) for i in range(number))
        if lot.is_bound:
            texts.append(f"{number} rank{'s' * (number > 1)} bound to CPUs {where}")
        elif number > 1:
            shared = cpus_text(frozenset().union(*lot.cpus))
            texts.append(f"{number} ranks share CPUs {shared}, not bound: {lot.why_not}")
    return "; ".join(texts)


def _where(lot: Lot, number: int, num_nodes: int) -> str:
    text = cpus_text(lot.cpus[number])
    if num_nodes == 1:
        return text
    nodes = lot.nodes[number]
    return f"{text} (NUMA node{'s' * (len(nodes) > 1)} {cpus_text(nodes)})"


def _in_common(ranks: Sequence[Asked]) -> list[tuple[int, ...]]:
    """Return the ranks that were given CPUs in common, also by way of others, in order."""
    found: list[tuple[frozenset[int], tuple[int, ...]]] = []
    for number, rank in enumerate(ranks):
        cpus: frozenset[int] = rank.allowed
        members: tuple[int, ...] = (number,)
        apart = []
        for other, those in found:
            if cpus & other:
                cpus, members = cpus | other, (*those, *members)
            else:
                apart.append((other, those))
        found = [*apart, (cpus, members)]
    return sorted(tuple(sorted(members)) for _, members in found)


def _parts(cores: Sequence[Core], ranks: Sequence[Asked]) -> list[list[Core]] | str:
    """Return the cores that each of some ranks takes, or why they take none for themselves."""
    allowed = ranks[0].allowed
    if len({rank.allowed for rank in ranks}) > 1:
        return "they were given different CPUs that overlap"
    held = _within(cores, allowed)
    quotas = [rank.quota.num_cpus for rank in ranks if rank.quota is not None]
    limited = min(quotas, default=len(allowed)) < len(allowed)
    if len(ranks) == 1:
        near = [core for core in held if core.node == ranks[0].node]
        is_whole = allowed == frozenset().union(*(core.cpus for core in cores))
        if not near or len(near) == len(held) or limited or not is_whole:
            return GIVEN
        parts = [near]
    elif limited:
        return (
            f"a quota of {min(quotas):g} CPUs says how much they may compute, and not where; "
            f"others may be given the same ones"
        )
    elif len(held) < len(ranks):
        return f"more ranks than cores ({len(held)})"
    else:
        parts = _dealt(held, [rank.node for rank in ranks])
    for rank, part in zip(ranks, parts, strict=True):
        num_cpus = sum(len(core.cpus) for core in part)
        if rank.num_threads is not None and rank.num_threads > num_cpus:
            return f"{rank.num_threads} threads were asked for, a rank's share is {num_cpus} CPUs"
    return parts


def _within(cores: Sequence[Core], cpus: frozenset[int]) -> list[Core]:
    """Return the cores of some CPUs, each with those of them alone."""
    return [Core(core.cpus & cpus, core.node) for core in cores if core.cpus & cpus]


def _threads(rank: Asked, num_cores: int, using: Mapping[str, int]) -> int:
    if rank.num_threads is not None:
        return rank.num_threads
    if rank.quota is None:
        return num_cores
    return min(num_cores, int(rank.quota.num_cpus / using[rank.quota.group]))


def _dealt(cores: Sequence[Core], nodes: Sequence[int | None]) -> list[list[Core]]:
    """Deal out cores to ranks, by the nodes of their devices; there are as many cores at least."""
    in_order = sorted(cores, key=lambda core: (core.node, min(core.cpus)))
    on_node = {node: list(own) for node, own in groupby(in_order, key=lambda core: core.node)}
    wanted = Counter(nodes)
    if all(node is not None and len(on_node.get(node, ())) >= n for node, n in wanted.items()):
        homes: Sequence[int | None] = nodes
    elif len(nodes) < len(on_node):
        names, count = list(on_node), len(nodes)
        bounds = [number * len(names) // count for number in range(count + 1)]
        spans = [names[first:last] for first, last in pairwise(bounds)]
        return [[core for node in span for core in on_node[node]] for span in spans]
    else:
        homes = _spread({node: len(own) for node, own in on_node.items()}, len(nodes))
    dealt: list[list[Core]] = [[] for _ in nodes]
    for node, own in on_node.items():
        there = [number for number, home in enumerate(homes) if home == node]
        for place, number in enumerate(there):
            first, last = (at * len(own) // len(there) for at in (place, place + 1))
            dealt[number] = own[first:last]
    return dealt


def _spread(num_cores: Mapping[int, int], num_ranks: int) -> list[int]:
    """Return a node for each rank, in the order of nodes, so that each has as many cores as can be.

    One rank after the other goes to the node that then has the most cores for each of its ranks.
    """
    taken = dict.fromkeys(num_cores, 0)
    for _ in range(num_ranks):
        best = max(num_cores, key=lambda node: num_cores[node] / (taken[node] + 1))
        taken[best] += 1
    return [node for node, number in taken.items() for _ in range(number)]
