"""Our algorithms by name, and how to start one over a group.

``backend`` is what the group brings along: Gloo's, NCCL's.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Final

import torch

from gpipe_hpc.comm.collectives.chain import chain_all_reduce, chain_broadcast
from gpipe_hpc.comm.collectives.direct import (
    rank_order_all_reduce,
    rank_order_reduce_scatter,
)
from gpipe_hpc.comm.collectives.halving import (
    doubling_all_gather,
    halving_reduce_scatter,
    rabenseifner_all_reduce,
    recursive_doubling_all_reduce,
)
from gpipe_hpc.comm.collectives.hierarchy import hierarchical_all_reduce, hierarchical_broadcast
from gpipe_hpc.comm.collectives.plan import Place, Plan
from gpipe_hpc.comm.collectives.ring import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from gpipe_hpc.comm.collectives.shards import checked_counts
from gpipe_hpc.comm.collectives.tree import (
    binomial_broadcast,
    scatter_ring_broadcast,
    tree_all_reduce,
)
from gpipe_hpc.comm.group import Group, Pending
from gpipe_hpc.errors import ConfigError

BACKEND: Final = "backend"
DEFAULT_BLOCK_BYTES: Final = 256 * 1024
"""Bytes of a block of the chains, where no tuner says another."""

# Each takes a place, a number of elements, and the elements of a block, which only chains use.
ALL_REDUCES: Final[Mapping[str, Callable[[Place, int, int], Plan]]] = MappingProxyType(
    {
        "ring": lambda place, count, _: ring_all_reduce(place, count),
        "recursive_doubling": lambda place, count, _: recursive_doubling_all_reduce(place, count),
        "rabenseifner": lambda place, count, _: rabenseifner_all_reduce(place, count),
        "tree": lambda place, count, _: tree_all_reduce(place, count),
        "chain": chain_all_reduce,
        "rank_order": lambda place, count, _: rank_order_all_reduce(place, count),
    }
)
# Each takes a place, the root's position, a number of elements, and the elements of a block.
BROADCASTS: Final[Mapping[str, Callable[[Place, int, int, int], Plan]]] = MappingProxyType(
    {
        "binomial": lambda place, root, count, _: binomial_broadcast(place, root, count),
        "scatter_ring": lambda place, root, count, _: scatter_ring_broadcast(place, root, count),
        "chain": chain_broadcast,
    }
)
# Each takes a place and the number of elements of every rank's shard.
REDUCE_SCATTERS: Final[Mapping[str, Callable[[Place, tuple[int, ...]], Plan]]] = MappingProxyType(
    {"ring": ring_reduce_scatter, "halving": halving_reduce_scatter}
)
ALL_GATHERS: Final[Mapping[str, Callable[[Place, tuple[int, ...]], Plan]]] = MappingProxyType(
    {"ring": ring_all_gather, "doubling": doubling_all_gather}
)
HIERARCHICAL: Final = "hierarchical"
_RANK_ORDER: Final = "rank_order"
ALL_REDUCE_NAMES: Final = (BACKEND, *ALL_REDUCES, HIERARCHICAL)
BROADCAST_NAMES: Final = (BACKEND, *BROADCASTS, HIERARCHICAL)


def start_all_reduce(
    group: Group,
    tensor: torch.Tensor,
    algorithm: str = BACKEND,
    *,
    block_bytes: int = DEFAULT_BLOCK_BYTES,
    hosts: Sequence[Hashable] | None = None,
) -> Pending:
    """Start summing `tensor` in place over the group by an algorithm of `ALL_REDUCE_NAMES`.

    The sum has the same bits on all ranks. ``rank_order`` alone adds each element in the order of
    ranks; the others' order depends on where an element lies. `hosts`: the host of each rank of the
    group, which ``hierarchical`` needs. Raises ConfigError.
    """
    _check(algorithm, ALL_REDUCE_NAMES, "all-reduce")
    block = _block(block_bytes, tensor)
    if algorithm == BACKEND:
        return group.start_all_reduce(tensor)
    if algorithm == _RANK_ORDER:
        return group.start_ordered_all_reduce(tensor)
    if algorithm == HIERARCHICAL:
        known = _checked_hosts(hosts, group, "all-reduce")
        plan = hierarchical_all_reduce(_place(group), tensor.numel(), known)
        return group.start_plan(plan, tensor, f"all-reduce by {algorithm}, {_numbered(known)}")
    plan = _all_reduce_plan(algorithm, _place(group), tensor.numel(), block)
    return group.start_plan(plan, tensor, f"all-reduce by {algorithm}, blocks of {block}")


def start_ordered_all_reduce(group: Group, tensor: torch.Tensor) -> Pending:
    """Start `Group.start_ordered_all_reduce` where any two ranks are connected."""
    plan = _all_reduce_plan(_RANK_ORDER, _place(group), tensor.numel(), 1)
    return group.start_plan(plan, tensor, f"all-reduce by {_RANK_ORDER}")


def start_ordered_reduce_scatter(group: Group, whole: torch.Tensor) -> Pending:
    """Start `Group.start_ordered_reduce_scatter` where any two ranks are connected."""
    plan = rank_order_reduce_scatter(_place(group), checked_counts(whole, None, group.size))
    return group.start_plan(plan, whole, "reduce-scatter in the order of ranks")


def start_broadcast(
    group: Group,
    tensor: torch.Tensor,
    root: int,
    algorithm: str = BACKEND,
    *,
    block_bytes: int = DEFAULT_BLOCK_BYTES,
    hosts: Sequence[Hashable] | None = None,
) -> Pending:
    """Start filling `tensor` with world rank `root`'s by an algorithm of `BROADCAST_NAMES`.

    `hosts`: the host of each rank of the group, which ``hierarchical`` needs. Raises ConfigError.
    """
    _check(algorithm, BROADCAST_NAMES, "broadcast")
    block = _block(block_bytes, tensor)
    if root not in group.ranks:
        raise ConfigError(f"broadcast: expected a root among {group.ranks}, got {root}")
    position = group.ranks.index(root)
    if algorithm == BACKEND:
        return group.start_broadcast(tensor, root)
    if algorithm == HIERARCHICAL:
        known = _checked_hosts(hosts, group, "broadcast")
        plan = hierarchical_broadcast(_place(group), position, tensor.numel(), known)
        algorithm = f"{algorithm}, {_numbered(known)},"
    else:
        plan = _broadcast_plan(algorithm, _place(group), position, tensor.numel(), block)
    what = f"broadcast by {algorithm} from rank {root}, blocks of {block}"
    return group.start_plan(plan, tensor, what)


def _checked_hosts(hosts: Sequence[Hashable] | None, group: Group, what: str) -> Sequence[Hashable]:
    if hosts is None or len(hosts) != group.size:
        raise ConfigError(
            f"{what}: expected the host of each of {group.size} ranks, got "
            f"{'none' if hosts is None else len(hosts)}; pass hosts="
        )
    return hosts


def _numbered(hosts: Sequence[Hashable]) -> str:
    """Return hosts in words that are the same on all ranks where the hosts are."""
    firsts: dict[Hashable, int] = {}
    return f"hosts {[firsts.setdefault(host, at) for at, host in enumerate(hosts)]}"


def start_reduce_scatter(
    group: Group,
    whole: torch.Tensor,
    counts: Sequence[int] | None = None,
    algorithm: str = "ring",
) -> Pending:
    """Start `Group.start_reduce_scatter` by an algorithm of `REDUCE_SCATTERS`."""
    _check(algorithm, tuple(REDUCE_SCATTERS), "reduce-scatter")
    sizes = checked_counts(whole, counts, group.size)
    plan = _reduce_scatter_plan(algorithm, _place(group), sizes)
    return group.start_plan(plan, whole, f"reduce-scatter by {algorithm}, shards {sizes}")


def start_all_gather(
    group: Group,
    whole: torch.Tensor,
    counts: Sequence[int] | None = None,
    algorithm: str = "ring",
) -> Pending:
    """Start `Group.start_all_gather` by an algorithm of `ALL_GATHERS`."""
    _check(algorithm, tuple(ALL_GATHERS), "all-gather")
    sizes = checked_counts(whole, counts, group.size)
    plan = _all_gather_plan(algorithm, _place(group), sizes)
    return group.start_plan(plan, whole, f"all-gather by {algorithm}, shards {sizes}")


def _place(group: Group) -> Place:
    return Place(group.size, group.position)


def _check(algorithm: str, known: Sequence[str], what: str) -> None:
    if algorithm not in known:
        raise ConfigError(
            f"{what}: expected one of {', '.join(known)}, got {algorithm!r}; name one of them"
        )


def _block(block_bytes: int, tensor: torch.Tensor) -> int:
    if block_bytes < 1:
        raise ConfigError(f"collective: expected blocks of 1 byte at least, got {block_bytes}")
    return max(1, block_bytes // tensor.element_size())


@lru_cache(maxsize=64)
def _all_reduce_plan(algorithm: str, place: Place, count: int, block: int) -> Plan:
    return ALL_REDUCES[algorithm](place, count, block)


@lru_cache(maxsize=64)
def _broadcast_plan(algorithm: str, place: Place, root: int, count: int, block: int) -> Plan:
    return BROADCASTS[algorithm](place, root, count, block)


@lru_cache(maxsize=64)
def _reduce_scatter_plan(algorithm: str, place: Place, counts: tuple[int, ...]) -> Plan:
    return REDUCE_SCATTERS[algorithm](place, counts)


@lru_cache(maxsize=64)
def _all_gather_plan(algorithm: str, place: Place, counts: tuple[int, ...]) -> Plan:
    return ALL_GATHERS[algorithm](place, counts)
