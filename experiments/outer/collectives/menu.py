"""The algorithms by name, and how to start one over a group.

``backend`` is the collective of the group's backend: Gloo, NCCL or MPI.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Final, NamedTuple

import torch
import torch.distributed as dist

from experiments.outer.collectives.halving import (
    doubling_all_gather,
    recursive_doubling_all_reduce,
    scatter_doubling_broadcast,
)
from experiments.outer.collectives.trees import (
    binomial_reduce,
    chain_binomial_reduce,
    chain_tree,
    double_binary_trees,
    hierarchical_broadcast,
    knomial_broadcast,
    pipelined_all_reduce,
    pipelined_broadcast,
    pipelined_reduce,
    tree_all_reduce,
    two_level_tree,
)
from gpipe_hpc.comm.collectives.direct import rank_order_all_reduce
from gpipe_hpc.comm.collectives.group import CollectiveHandle, Group
from gpipe_hpc.comm.collectives.halving import halving_reduce_scatter, rabenseifner_all_reduce
from gpipe_hpc.comm.collectives.hierarchy import hierarchical_all_reduce
from gpipe_hpc.comm.collectives.plan import Plan, PlanPosition, even_counts
from gpipe_hpc.comm.collectives.ring import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from gpipe_hpc.comm.collectives.shards import checked_counts, shards
from gpipe_hpc.comm.collectives.tree import binomial_broadcast, scatter_ring_broadcast
from gpipe_hpc.errors import ConfigError

BACKEND: Final = "backend"
DEFAULT_BLOCK_BYTES: Final = 256 * 1024
RADIX: Final = 4
"""Radix of k-nomial trees, MVAPICH's default."""


class Case(NamedTuple):
    """Parameters of a collective.

    Args:
        length: elements of the vector
        block: elements per block of pipelined algorithms
        root: position of the root in the group
        hosts: host of each position, for algorithms with two levels
        counts: elements of each rank's shard; empty for shards as even as possible
    """

    length: int
    block: int = 1 << 16
    root: int = 0
    hosts: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()


Planner = Callable[[PlanPosition, Case], Plan]

PLANNERS: Final[Mapping[str, Mapping[str, Planner]]] = MappingProxyType(
    {
        "all_reduce": MappingProxyType(
            {
                "ring": lambda at, of: ring_all_reduce(at, of.length),
                "recursive_doubling": lambda at, of: recursive_doubling_all_reduce(at, of.length),
                "rabenseifner": lambda at, of: rabenseifner_all_reduce(at, of.length),
                "tree": lambda at, of: tree_all_reduce(at, of.length),
                "chain": lambda at, of: pipelined_all_reduce(
                    at, [chain_tree(at.size, at.size - 1)], of.length, of.block
                ),
                "double_binary_tree": lambda at, of: pipelined_all_reduce(
                    at, double_binary_trees(at.size), of.length, of.block
                ),
                "hierarchical": lambda at, of: hierarchical_all_reduce(at, of.length, of.hosts),
                "rank_order": lambda at, of: rank_order_all_reduce(at, of.length),
            }
        ),
        "broadcast": MappingProxyType(
            {
                "binomial": lambda at, of: binomial_broadcast(at, of.root, of.length),
                "knomial": lambda at, of: knomial_broadcast(at, of.root, of.length, RADIX),
                "scatter_ring": lambda at, of: scatter_ring_broadcast(at, of.root, of.length),
                "scatter_doubling": lambda at, of: scatter_doubling_broadcast(
                    at, of.root, of.length
                ),
                "chain": lambda at, of: pipelined_broadcast(
                    at, chain_tree(at.size, of.root), of.length, of.block
                ),
                "hierarchical": lambda at, of: hierarchical_broadcast(
                    at, of.root, of.length, of.hosts
                ),
                "two_level": lambda at, of: pipelined_broadcast(
                    at, two_level_tree(of.hosts, of.root), of.length, of.block
                ),
                "nccl_hierarchical": lambda at, of: pipelined_broadcast(
                    at, two_level_tree(of.hosts, of.root, RADIX), of.length, of.block
                ),
            }
        ),
        "reduce": MappingProxyType(
            {
                "binomial": lambda at, of: binomial_reduce(at, of.root, of.length),
                "chain": lambda at, of: pipelined_reduce(
                    at, chain_tree(at.size, of.root), of.length, of.block
                ),
                "chain_binomial": lambda at, of: chain_binomial_reduce(
                    at, of.root, of.length, of.block, of.hosts
                ),
                "chain_chain": lambda at, of: pipelined_reduce(
                    at, two_level_tree(of.hosts, of.root), of.length, of.block
                ),
            }
        ),
        "reduce_scatter": MappingProxyType(
            {
                "ring": lambda at, of: ring_reduce_scatter(at, _counts(at, of)),
                "halving": lambda at, of: halving_reduce_scatter(at, _counts(at, of)),
            }
        ),
        "all_gather": MappingProxyType(
            {
                "ring": lambda at, of: ring_all_gather(at, _counts(at, of)),
                "doubling": lambda at, of: doubling_all_gather(at, _counts(at, of)),
            }
        ),
    }
)
"""By collective and algorithm."""


def plan(collective: str, algorithm: str, place: PlanPosition, case: Case) -> Plan:
    """Return the messages that a rank sends and receives, step by step."""
    return PLANNERS[collective][algorithm](place, case)


@lru_cache(maxsize=64)
def _kept_plan(collective: str, algorithm: str, place: PlanPosition, case: Case) -> Plan:
    return plan(collective, algorithm, place, case)


def hosts_of(size: int, group: int) -> tuple[int, ...]:
    """Return the host of each position with `group` ranks per host; the last may have fewer."""
    return tuple(position // group for position in range(size))


def start(
    group: Group,
    collective: str,
    algorithm: str,
    tensor: torch.Tensor,
    *,
    root: int = 0,
    block_bytes: int = DEFAULT_BLOCK_BYTES,
    hosts: Sequence[int] | None = None,
    counts: Sequence[int] | None = None,
) -> CollectiveHandle:
    """Start a collective of `PLANNERS` over a tensor, in place; see `Case`.

    `block_bytes` applies to pipelined algorithms. If `hosts` is None, all ranks are on one host.
    Raises ConfigError.
    """
    known = PLANNERS[collective]
    if algorithm not in known:
        raise ConfigError(
            f"{collective}: expected one of {', '.join(known)}, got {algorithm!r}; name one of them"
        )
    if block_bytes < 1:
        raise ConfigError(f"{collective}: expected blocks of 1 byte at least, got {block_bytes}")
    if not 0 <= root < group.size:
        raise ConfigError(f"{collective}: expected a root below {group.size}, got {root}")
    if hosts is not None and len(hosts) != group.size:
        raise ConfigError(
            f"{collective}: expected the host of each of {group.size} ranks, got {len(hosts)}"
        )
    case = Case(
        length=tensor.numel(),
        block=max(1, block_bytes // tensor.element_size()),
        root=root,
        hosts=(0,) * group.size if hosts is None else tuple(hosts),
        counts=() if counts is None else checked_counts(tensor, counts, group.size),
    )
    steps = _kept_plan(collective, algorithm, PlanPosition(group.size, group.position), case)
    return group.start_plan(steps, tensor, f"{collective} by {algorithm}, {case}")


def run_backend(group: Group, collective: str, tensor: torch.Tensor, root: int = 0) -> None:
    """Run a collective of the backend; the result is in `tensor`.

    Shards are even, because backends support no others.
    """
    ranks = group.torch_group
    own = shards(tensor, None, group.size)[group.position].clone()
    if collective == "all_reduce":
        dist.all_reduce(tensor, group=ranks)
    elif collective == "broadcast":
        dist.broadcast(tensor, group.ranks[root], group=ranks)
    elif collective == "reduce":
        dist.reduce(tensor, group.ranks[root], group=ranks)
    elif collective == "reduce_scatter":
        dist.reduce_scatter_tensor(own, tensor, group=ranks)
    else:
        dist.all_gather_into_tensor(tensor, own, group=ranks)


def _counts(place: PlanPosition, case: Case) -> tuple[int, ...]:
    return case.counts or even_counts(case.length, place.size)
