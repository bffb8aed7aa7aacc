"""The seconds of a step, told from one place: `plan`, a search and `train` all ask here.

A table is simulated with its transfers; behind it come the sums of gradients, the norm for
clipping, the optimizer, and what a step takes whatever is in it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import NamedTuple

from gpipe_hpc.models import stage_layers
from gpipe_hpc.planner.costs.counted import ModelCount
from gpipe_hpc.planner.costs.gauges import LayerTimes
from gpipe_hpc.planner.costs.prices import FREE, Prices
from gpipe_hpc.planner.cutting.partition import Partition
from gpipe_hpc.planner.forecast import Recomputed, activation_memory, flop_costs
from gpipe_hpc.planner.search.summing import Ending, Sum, endings, summed_at
from gpipe_hpc.planner.stages import StageCount
from gpipe_hpc.schedule import Cluster, Costs, Op, Placement, Schedule, Timeline, simulate
from gpipe_hpc.schedule.costs import per_stage
from gpipe_hpc.settings import Outer


class Crowd(NamedTuple):
    """So many ranks on a host with so many cores."""

    ranks: int
    cores: int

    @property
    def is_full(self) -> bool:
        """Say whether there are more ranks than cores."""
        return self.ranks > self.cores

    def __str__(self) -> str:
        """Say what that does to a forecast."""
        return (
            f"{self.ranks} ranks share {self.cores} core{'s' * (self.cores > 1)} of their host: "
            f"times are rough, and only the order of layouts counts"
        )


class Held(NamedTuple):
    """What a rank clips and updates: how many tensors, and numbers in them."""

    num_tensors: int = 0
    num_elements: float = 0


@dataclass(frozen=True)
class StepTime:
    """A step of all replicas, in seconds by part; `timeline` is of the slowest, without sums.

    `pipeline_s`: until the last backward has ended; `reduction_s`: what sums take longer. The other
    parts are of the rank that takes longest for all of them. `crowd`: None where each rank has a
    core of its own.
    """

    timeline: Timeline
    pipeline_s: float
    reduction_s: float = 0.0
    norm_s: float = 0.0
    optimizer_s: float = 0.0
    beside_s: float = 0.0
    crowd: Crowd | None = None

    @property
    def total_s(self) -> float:
        """Return the seconds of a step."""
        return self.pipeline_s + self.reduction_s + self.norm_s + self.optimizer_s + self.beside_s

    def text(self) -> str:
        """Return it in one line, with its parts if there are several; then what is rough."""
        parts = {
            "pipeline": self.pipeline_s,
            "reduction": self.reduction_s,
            "norm": self.norm_s,
            "optimizer": self.optimizer_s,
            "beside": self.beside_s,
        }
        told = [f"{name} {seconds:.3g}" for name, seconds in parts.items() if seconds]
        line = f"expected step time {self.total_s:.4g} s"
        if len(told) > 1:
            line += f" ({' + '.join(told)})"
        return line if self.crowd is None else f"{line}\n{self.crowd}"


class Piped:
    """A table that was simulated for each kind of replica, its gradients not summed yet."""

    def __init__(self, table: Schedule, each: Sequence[Costs], prices: Prices = FREE) -> None:
        """Simulate it; `each`: what actions cost in replicas that differ."""
        self.table, self._prices = table, prices
        self._costs = [prices.of_actions(costs) for costs in each]
        self.timelines = [simulate(table, costs) for costs in self._costs]
        ends = [timeline.end_of_compute for timeline in self.timelines]
        self.end_s = max(ends)
        self._slowest = ends.index(self.end_s)

    @property
    def slowest(self) -> Timeline:
        """Return the step of the slowest replica."""
        return self.timelines[self._slowest]

    @property
    def endings(self) -> list[set[Ending]]:
        """Return when each stage has its last gradients."""
        return endings(self.timelines)

    def undelayed_s(self) -> float:
        """Return when the slowest replica ends if transfers take no time."""
        free = self._costs[self._slowest].without_transfers()
        return simulate(self.table, free).end_of_compute

    def step(
        self,
        over_s: float,
        held: Sequence[Held] = (),
        *,
        clips: bool = False,
        crowd: Crowd | None = None,
    ) -> StepTime:
        """Return the whole step, whose gradients are summed at `over_s`.

        `held`: by rank. Ranks that outnumber the cores of their host take at least what all of them
        compute over so many cores.
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
    """Return what actions and transfers cost, by a cut whose layers' times are known."""
    costs = partition.stage_costs(recomputed)
    assert costs is not None, "a step is told of layers whose times are known"
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
    """Add what copies to the host and back take, at such a speed; nothing where that is None.

    Of a stage of which some micro-batches are recomputed and others are not, the mean.
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
    """Return what actions cost on a cluster, once for all replicas that are alike."""
    found = cluster.replicas(table, costs, num_replicas)
    each = {id(own): own for own in found}.values()
    return [replace(own, paces=_both(costs.paces, own.paces)) for own in each]


def _both(first: Mapping[int, float], second: Mapping[int, float]) -> dict[int, float]:
    """Return how slow ranks are of which two tell."""
    return {rank: first.get(rank, 1.0) * second.get(rank, 1.0) for rank in {*first, *second}}


def reduced_s(
    placement: Placement,
    piped: Piped,
    sums: Sequence[Sum],
    outer: Outer,
    counts: Sequence[int],
    times: Sequence[LayerTimes],
) -> float:
    """Return when a step is over whose gradients are summed so, the pipeline's end included.

    Of a flat shard half the sum comes behind the backwards. The other half, which gathers the
    parameters, runs beside the next step's first forwards: those that it delays delay all.
    """
    if outer.uses_local_sgd:
        return piped.end_s + max(each.time.total_s for each in sums) / outer.every
    late = 0.0
    if outer.shard == "flat":
        sums = [each.halved() for each in sums]
        late = _late_s(placement, sums, counts, times)
    over = summed_at(placement, piped.endings, sums, overlaps=outer.overlap)
    return late + max(piped.end_s, over)


def _late_s(
    placement: Placement,
    gathers: Sequence[Sum],
    counts: Sequence[int],
    times: Sequence[LayerTimes],
) -> float:
    """Return by how much gathering parameters delays the first forward of some stage."""
    free_at = [0.0] * placement.num_ranks
    begins, late = 0.0, 0.0
    for stage, span in enumerate(stage_layers(counts)):
        for rank in placement.holders(stage):
            free_at[rank] += gathers[stage].whole_s
            late = max(late, free_at[rank] - begins)
        begins += sum(times[layer].forward for layer in span)
    return late


def held_by_ranks(
    model: ModelCount, counts: Sequence[int], placement: Placement, copies: int = 1
) -> list[Held]:
    """Return what each rank of a replica clips and updates; `copies` divide the numbers."""
    spans = stage_layers(counts)
    found = []
    for rank in range(placement.num_ranks):
        own = model.weights(i for stage in placement.stages_of(rank) for i in spans[stage])
        trained = [weight for weight in own if weight.is_trained]
        found.append(Held(len(trained), sum(each.num_elements for each in trained) / copies))
    return found
