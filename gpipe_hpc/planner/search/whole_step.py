"""Step time of a complete layout on a machine."""

from gpipe_hpc.data_parallel import GradientSize
from gpipe_hpc.models import sizes_of_layers
from gpipe_hpc.planner.advice import KnownCosts
from gpipe_hpc.planner.layout import Layout
from gpipe_hpc.planner.search.machine import Machine
from gpipe_hpc.planner.search.reductions import StageReduction, copies_of, reductions_time
from gpipe_hpc.planner.shares import microbatch_shares
from gpipe_hpc.planner.stages import count_stages
from gpipe_hpc.planner.step_time import (
    SimulatedTable,
    StepTime,
    action_costs,
    of_replicas,
    reduced_s,
    updated_by_ranks,
    with_copies,
)
from gpipe_hpc.settings import Outer


def step_of(
    layout: Layout, cost_model: KnownCosts, machine: Machine, outer: Outer, num_samples: int
) -> StepTime:
    """Return the step time for `num_samples`, for the replica with the most micro-batches."""
    table, counts = layout.schedule, layout.partition.counts
    stages = count_stages(cost_model.count, counts)
    portions = layout.portions
    shares = microbatch_shares(num_samples, portions.total, portions.of(portions.fullest))
    partition = layout.partition._replace(times=cost_model.times)
    costs = action_costs(partition, stages, layout.recomputed, shares)
    costs = with_copies(costs, table, stages, layout.recomputed, machine.host_bytes_per_s)
    each = of_replicas(machine.cluster, table, costs, layout.replicas)
    piped = SimulatedTable(table, each, machine.prices)
    over_s = piped.end_s
    if any(layout.tables.buckets):
        sums = _sums(layout, cost_model, machine, outer)
        over_s = reduced_s(table.placement, piped, sums, outer, counts, cost_model.times)
    copies = 1 if outer.shard == "none" else layout.replicas
    held = updated_by_ranks(cost_model.count, counts, table.placement, copies)
    return piped.step(over_s, held, clips=machine.clips, crowd=machine.crowd)


def _sums(
    layout: Layout, cost_model: KnownCosts, machine: Machine, outer: Outer
) -> list[StageReduction]:
    """Return the all-reduce of each stage's gradients; an empty one without replicas."""
    sizes = {
        name: GradientSize(*size).num_bytes
        for each in sizes_of_layers(cost_model.layers)
        for name, size in each.items()
    }
    placement, num_ranks = layout.schedule.placement, layout.schedule.num_ranks
    found = []
    for stage, buckets in enumerate(layout.tables.buckets):
        own = tuple(sum(sizes[name] for name in bucket) for bucket in buckets)
        ranks = copies_of(placement, stage, layout.replicas, num_ranks)
        by_host = outer.hierarchy == "host"
        found.append(
            StageReduction(
                reductions_time(machine.summing, ranks, sum(own), len(own), by_host=by_host), own
            )
        )
    return found
