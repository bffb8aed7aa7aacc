"""All collectives by name, MPI's included, as functions that start them on a group."""

from functools import partial

from gpipe_hpc.comm.collectives.halving import (
    butterfly_all_reduce,
    halving_reduce_scatter,
    rabenseifner_all_reduce,
)
from gpipe_hpc.comm.collectives.plan import PlanPosition
from gpipe_hpc.comm.collectives.planned import (
    start_hierarchical_all_reduce,
    start_ordered_all_reduce,
    start_reduce_scatter,
    start_ring_all_reduce,
)
from gpipe_hpc.comm.collectives.shards import checked_counts
from gpipe_hpc.comm.collectives.tree import binomial_broadcast, scatter_ring_broadcast


def hosts_of(size):
    """Return the host index of each rank, with three ranks per host."""
    return [position // 3 for position in range(size)]


def by_plan(planner, group, tensor, *args):
    """Start the communication plan that a planner returns for this rank."""
    steps = planner(PlanPosition(group.size, group.position), *args)
    return group.start_plan(steps, tensor, planner.__name__)


def by_length(planner, group, tensor):
    return by_plan(planner, group, tensor, tensor.numel())


def by_shards(planner, group, whole, counts):
    return by_plan(planner, group, whole, checked_counts(whole, counts, group.size))


ALL_REDUCES = {
    "backend": lambda group, tensor: group.start_all_reduce(tensor),
    "ring": start_ring_all_reduce,
    "rank_order": start_ordered_all_reduce,
    "hierarchical": lambda group, tensor: start_hierarchical_all_reduce(
        group, tensor, hosts_of(group.size)
    ),
    "butterfly": partial(by_length, butterfly_all_reduce),
    "rabenseifner": partial(by_length, rabenseifner_all_reduce),
}
BROADCASTS = {
    "backend": lambda group, tensor, root: group.start_broadcast(tensor, root),
    "binomial": lambda group, tensor, root: by_plan(
        binomial_broadcast, group, tensor, root, tensor.numel()
    ),
    "scatter_ring": lambda group, tensor, root: by_plan(
        scatter_ring_broadcast, group, tensor, root, tensor.numel()
    ),
}
REDUCE_SCATTERS = {
    "ring": start_reduce_scatter,
    "halving": partial(by_shards, halving_reduce_scatter),
}
