"""Step time of a layout, shared by `plan`, the search and `train`.

A schedule table is simulated with its transfers. The gradient all-reduces, the norm for clipping,
the optimizer step, and a constant overhead are added.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import NamedTuple

from gpipe_hpc.models import stage_layers
from gpipe_hpc.planner.costs.cost_models import LayerTimes
from gpipe_hpc.planner.costs.counted import ModelCount
from gpipe_hpc.planner.costs.prices import FREE, Prices
from gpipe_hpc.planner.cutting.partition import Partition
from gpipe_hpc.planner.forecast import Recomputed, activation_memory, flop_costs
from gpipe_hpc.planner.search.reductions import LastBackward, StageReduction, endings, reduced_at
from gpipe_hpc.planner.stages import StageCount
from gpipe_hpc.schedule import Cluster, Costs, Op, Placement, Schedule, Timeline, simulate
from gpipe_hpc.schedule.costs import per_stage
from gpipe_hpc.settings import Outer


class Oversubscription(NamedTuple):
    """Number of ranks on a host, and number of the host's CPU cores."""

    ranks: int
    cores: int

    @property
    def is_full(self) -> bool:
        """Return whether the host has more ranks than cores."""
        return self.ranks > self.cores

    def __str__(self) -> str:
        """Describe how shared cores affect forecasts."""
        return (
            f"{self.ranks} ranks share {self.cores} core{'s' * (self.cores > 1)} of their host: "
            f"times are rough, and only the order of layouts is meaningful"
        )


class UpdatedParameters(NamedTuple):
    """Number of parameter tensors and elements that a rank clips and updates."""

    num_tensors: int = 0
    num_elements: float = 0


@dataclass(frozen=True)
class StepTime:
    """Time of a step of all replicas, in seconds by part.

    Attributes:
      timeline: simulated timeline of the slowest replica, without all-reduces.
      pipeline_s: time until the last backward has ended.
      reduction_s: time by which all-reduces end later than that.
      norm_s, optimizer_s: clipping and optimizer on the rank for which they take longest.
      overhead_s: constant overhead of a step.
      crowd: ranks and cores of a host; None if each rank has its own core.
    """

    timeline: Timeline
    pipeline_s: float
    reduction_s: float = 0.0
    norm_s: float = 0.0
    optimizer_s: float = 0.0
    overhead_s: float = 0.0
    crowd: Oversubscription | None = None

    @property
    def total_s(self) -> float:
        """Return the total seconds of a step."""
        return self.pipeline_s + self.reduction_s + self.norm_s + self.optimizer_s + self.overhead_s

    def text(self) -> str:
        """Format the step time and its parts as one line, followed by warnings."""
        parts = {
            "pipeline": self.pipeline_s,
            "reduction": self.reduction_s,
            "norm": self.norm_s,
            "optimizer": self.optimizer_s,
            "overhead": self.overhead_s,
        }
        shown = [f"{name} {seconds:.3g}" for name, seconds in parts.items() if seconds]
        line = f"expected step time {self.total_s:.4g} s"
        if len(shown) > 1:
            line += f" ({' + '.join(shown)})"
        return line if self.crowd is None else f"{line}\n{self.crowd}"


class SimulatedTable:
    """A schedule table simulated for each kind of replica, before gradients are all-reduced."""

    def __init__(self, table: Schedule, each: Sequence[Costs], prices: Prices = FREE) -> None:
        """Simulate the table; `each` has the costs of actions for each kind of replica."""
        self.table, self._prices = table, prices
        self._costs = [prices.of_actions(costs) for costs in each]
        self.timelines = [simulate(table, costs) for costs in self._costs]
        ends = [timeline.end_of_compute for timeline in self.timelines]
        self.end_s = max(ends)
        self._slowest = ends.index(self.end_s)

    @property
    def slowest(self) -> Timeline:
        """Return the timeline of the slowest replica."""
        return self.timelines[self._slowest]

    @property
    def endings(self) -> list[set[LastBackward]]:
        """Return the last backwards of each stage, with their start and end."""
        return endings(self.timelines)

    def undelayed_s(self) -> float:
        """Return when the slowest replica would end with free transfers, in seconds."""
        free = self._costs[self._slowest].without_transfers()
        return simulate(self.table, free).end_of_compute

    def step(
        self,
        over_s: float,
        held: Sequence[UpdatedParameters] = (),
        *,
        clips: bool = False,
        crowd: Oversubscription | None = None,
    ) -> StepTime:
        """Return the complete step whose gradients are reduced at `over_s`.

        `held` has one entry per rank. If ranks outnumber the cores of their host, the time is at
        least their total compute divided by the cores.
        """
        timeline, prices = self.slowest, self._prices
        behind = [
            (prices.norm.seconds(*each) if clips else 0.0, prices.update.seconds(*each))
            for each in held
        ]
        norm_s, optimizer_s = max(behind, key=sum, default=(0.0, 0.0))
        pipeline_s, times = self.end_s, 1.0
        if crowd is not None and crowd.is_full:
            times = crowd.ranks / crowd.cores
            mean_s = sum(timeline.busy) / len(timeline.busy)
            pipeline_s = max(pipeline_s, mean_s * times)
        else:
            crowd = None
        return StepTime(
            timeline,
            pipeline_s,
            max(0.0, over_s - self.end_s),
            norm_s * times,
            optimizer_s * times,
            prices.step_s * times,
            crowd,
        )


def action_costs(
    partition: Partition,
    stages: Sequence[StageCount],
    recomputed: Recomputed | None = None,
    shares: Sequence[float] = (),
) -> Costs:
    """Return the costs of actions and transfers for a partition with known layer times."""
    costs = partition.stage_costs(recomputed)
    assert costs is not None, "the times are known"
    sent = flop_costs(stages)
    return replace(
        costs, boundary_bytes=sent.boundary_bytes, skip_bytes=sent.skip_bytes, shares=shares
    )


def with_copies(
    costs: Costs,
    table: Schedule,
    stages: Sequence[StageCount],
    recomputed: Recomputed | None,
    bytes_per_s: float | None,
) -> Costs:
    """Add the time of offload copies at a bandwidth; the costs are unchanged if that is None.

    If only some micro-batches of a stage are recomputed, their mean size counts.
    """
    if bytes_per_s is None:
        return costs
    memory = activation_memory(stages, recomputed)
    full, kept = (per_stage("", each, len(stages)) for each in (memory.forward, memory.boundary))
    actions = {action for row in table.ranks for action in row}
    copied: list[list[float]] = [[] for _ in stages]
    for action in actions:
        if action.op is Op.OFFLOAD:
            again = action._replace(op=Op.R) in actions
            copied[action.stage].append((kept if again else full)[action.stage])
    seconds = [fmean(each) / bytes_per_s if each else 0.0 for each in copied]
    return replace(costs, offload=seconds, fetch=seconds)


def of_replicas(cluster: Cluster, table: Schedule, costs: Costs, num_replicas: int) -> list[Costs]:
    """Return the costs of actions on a cluster for each distinct kind of replica."""
    found = cluster.replicas(table, costs, num_replicas)
    each = {id(own): own for own in found}.values()
    return [replace(own, paces=_both(costs.paces, own.paces)) for own in each]


def _both(first: Mapping[int, float], second: Mapping[int, float]) -> dict[int, float]:
    """Multiply two mappings of rank slowdowns; a missing rank has factor 1."""
    return {rank: first.get(rank, 1.0) * second.get(rank, 1.0) for rank in {*first, *second}}


def reduced_s(
    placement: Placement,
    piped: SimulatedTable,
    sums: Sequence[StageReduction],
    outer: Outer,
    counts: Sequence[int],
    times: Sequence[LayerTimes],
) -> float:
    """Return when a step ends, in seconds, given the times of its gradient all-reduces.

    With flat sharding, half of each all-reduce follows the backwards. The other half gathers
    parameters during the next step's first forwards; the longest delay of a forward is added.
    """
    if outer.uses_local_sgd:
        return piped.end_s + max(each.time.total_s for each in sums) / outer.every
    late = 0.0
    if outer.shard == "flat":
        sums = [each.halved() for each in sums]
        late = _late_s(placement, sums, counts, times)
    over = reduced_at(placement, piped.endings, sums, overlaps=outer.overlap)
    return late + max(piped.end_s, over)


def _late_s(
    placement: Placement,
    gathers: Sequence[StageReduction],
    counts: Sequence[int],
    times: Sequence[LayerTimes],
) -> float:
    """Return the longest time by which gathering parameters delays a stage's first forward."""
    free_at = [0.0] * placement.num_ranks
    begins, late = 0.0, 0.0
    for stage, span in enumerate(stage_layers(counts)):
        for rank in placement.holders(stage):
            free_at[rank] += gathers[stage].whole_s
            late = max(late, free_at[rank] - begins)
        begins += sum(times[layer].forward for layer in span)
    return late


def updated_by_ranks(
    model: ModelCount, counts: Sequence[int], placement: Placement, copies: int = 1
) -> list[UpdatedParameters]:
    """Return the parameter tensors and elements that each rank of a replica clips and updates.

    `copies`: number of ranks that share the elements of each tensor.
    """
    spans = stage_layers(counts)
    found = []
    for rank in range(placement.num_ranks):
        own = model.weights(i for stage in placement.stages_of(rank) for i in spans[stage])
        trained = [weight for weight in own if weight.is_trained]
        found.append(
            UpdatedParameters(len(trained), sum(each.num_elements for each in trained) / copies)
        )
    return found
