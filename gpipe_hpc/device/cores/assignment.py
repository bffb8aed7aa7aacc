"""Assignment of CPUs to the ranks of one machine: pure arithmetic, without system calls."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

from gpipe_hpc.device.cores.machine import Core, Quota, cpus_text


class CpuRequest(NamedTuple):
    """The CPUs that a rank may use, and its requests.

    Args:
        allowed: CPUs that the launcher allows the rank to use.
        node: NUMA node of the rank's device; None for a CPU rank or if unknown.
        quota: CPU time limit of the rank's control group.
        num_threads: number of threads set by the user; None for one per core.
    """

    allowed: frozenset[int]
    node: int | None = None
    quota: Quota | None = None
    num_threads: int | None = None


class CpuAssignment(NamedTuple):
    """A group of ranks of one machine whose allowed CPUs overlap, and the CPUs assigned to each.

    Args:
        members: indices of the ranks on the machine.
        cpus: CPUs of each member.
        nodes: NUMA nodes of each member's CPUs.
        num_threads: number of threads of each member.
        why_not: why the members are not bound to separate CPUs; empty if they are.
    """

    members: tuple[int, ...]
    cpus: tuple[frozenset[int], ...]
    nodes: tuple[tuple[int, ...], ...]
    num_threads: tuple[int, ...]
    why_not: str

    @property
    def is_bound(self) -> bool:
        """Return whether each member is bound to its own CPUs."""
        return not self.why_not


GIVEN = "affinity unchanged"
"""Reason why ranks whose CPUs overlap with no other rank's are not bound again."""


def assign_cpus(
    cores: Sequence[Core], ranks: Sequence[CpuRequest], *, binds: bool = True
) -> list[CpuAssignment]:
    """Assign the CPUs of a machine to ranks, without overlap if possible.

    Ranks that the launcher has already bound to separate CPUs keep them. Ranks with the same
    allowed CPUs get equal numbers of whole cores, on the NUMA node of their device; ranks without a
    device are spread over the nodes, consecutive ranks next to each other. Nothing is bound if
    there are fewer cores than ranks or than requested threads, or if a CPU quota limits the time
    but not the set of CPUs: other containers on the machine might choose the same cores.

    Args:
        cores: all cores of the machine.
        ranks: all ranks of the job on this machine, in order.
        binds: false to leave all ranks unbound and only compute numbers of threads.
    """
    using = Counter(rank.quota.group for rank in ranks if rank.quota is not None)
    lots = []
    for members in _overlapping_groups(ranks):
        own = [ranks[member] for member in members]
        parts = _parts(cores, own) if binds else "train.bind=none"
        dealt: list[list[Core]] | None = None if isinstance(parts, str) else parts
        why_not = parts if isinstance(parts, str) else ""
        cpus = tuple(
            rank.allowed if dealt is None else frozenset().union(*(core.cpus for core in part))
            for rank, part in zip(own, dealt or [[]] * len(own), strict=True)
        )
        held = [_restricted_to(cores, each) for each in cpus]
        share = 1 if dealt is not None else len(own)
        threads = tuple(
            max(1, _threads(rank, len(part) // share, using))
            for rank, part in zip(own, held, strict=True)
        )
        nodes = tuple(tuple(sorted({core.node for core in part})) for part in held)
        lots.append(CpuAssignment(members, cpus, nodes, threads, why_not))
    return lots


def assignments_text(lots: Sequence[CpuAssignment], num_nodes: int) -> str:
    """Return one line listing the CPUs of each rank, and the NUMA nodes if there are several."""
    alone = [lot for lot in lots if len(lot.members) == 1 and not lot.is_bound]
    texts = []
    if alone:
        number = len(alone)
        where = " | ".join(_where(lot, 0, num_nodes) for lot in alone)
        texts.append(f"{number} rank{'s' * (number > 1)} on CPUs {where}, {GIVEN}")
    for lot in lots:
        number = len(lot.members)
        where = " | ".join(_where(lot, i, num_nodes) for i in range(number))
        if lot.is_bound:
            texts.append(f"{number} rank{'s' * (number > 1)} bound to CPUs {where}")
        elif number > 1:
            shared = cpus_text(frozenset().union(*lot.cpus))
            texts.append(f"{number} ranks share CPUs {shared}, not bound: {lot.why_not}")
    return "; ".join(texts)


def _where(lot: CpuAssignment, number: int, num_nodes: int) -> str:
    text = cpus_text(lot.cpus[number])
    if num_nodes == 1:
        return text
    nodes = lot.nodes[number]
    return f"{text} (NUMA node{'s' * (len(nodes) > 1)} {cpus_text(nodes)})"


def _overlapping_groups(ranks: Sequence[CpuRequest]) -> list[tuple[int, ...]]:
    """Return groups of ranks whose allowed CPUs overlap directly or transitively, in order."""
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


def _parts(cores: Sequence[Core], ranks: Sequence[CpuRequest]) -> list[list[Core]] | str:
    """Return the cores of each rank in a group, or the reason why the group is not bound."""
    allowed = ranks[0].allowed
    if len({rank.allowed for rank in ranks}) > 1:
        return "their allowed CPUs differ but overlap"
    held = _restricted_to(cores, allowed)
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
            f"a quota of {min(quotas):g} CPUs limits their CPU time but not which CPUs they use; "
            f"other containers may be using the same ones"
        )
    elif len(held) < len(ranks):
        return f"more ranks than cores ({len(held)})"
    else:
        parts = _distribute(held, [rank.node for rank in ranks])
    for rank, part in zip(ranks, parts, strict=True):
        num_cpus = sum(len(core.cpus) for core in part)
        if rank.num_threads is not None and rank.num_threads > num_cpus:
            return f"{rank.num_threads} threads requested, but a rank's share is {num_cpus} CPUs"
    return parts


def _restricted_to(cores: Sequence[Core], cpus: frozenset[int]) -> list[Core]:
    """Return the cores that contain some of `cpus`, restricted to these CPUs."""
    return [Core(core.cpus & cpus, core.node) for core in cores if core.cpus & cpus]


def _threads(rank: CpuRequest, num_cores: int, using: Mapping[str, int]) -> int:
    if rank.num_threads is not None:
        return rank.num_threads
    if rank.quota is None:
        return num_cores
    return min(num_cores, int(rank.quota.num_cpus / using[rank.quota.group]))


def _distribute(cores: Sequence[Core], nodes: Sequence[int | None]) -> list[list[Core]]:
    """Distribute cores over ranks by the NUMA node of each rank's device.

    There must be at least as many cores as ranks.
    """
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
        homes = _balance_over_nodes({node: len(own) for node, own in on_node.items()}, len(nodes))
    dealt: list[list[Core]] = [[] for _ in nodes]
    for node, own in on_node.items():
        there = [number for number, home in enumerate(homes) if home == node]
        for place, number in enumerate(there):
            first, last = (at * len(own) // len(there) for at in (place, place + 1))
            dealt[number] = own[first:last]
    return dealt


def _balance_over_nodes(num_cores: Mapping[int, int], num_ranks: int) -> list[int]:
    """Return a NUMA node for each rank, sorted by node, balancing the number of cores per rank.

    Each rank in turn goes to the node with the most cores per rank.
    """
    taken = dict.fromkeys(num_cores, 0)
    for _ in range(num_ranks):
        best = max(num_cores, key=lambda node: num_cores[node] / (taken[node] + 1))
        taken[best] += 1
    return [node for node, number in taken.items() for _ in range(number)]
