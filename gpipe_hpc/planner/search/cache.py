"""Cache of values that layouts of a search share: layer costs, partitions, placements, buckets."""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from typing import Any, Final

from gpipe_hpc.data_parallel import Buckets, GradientSize, fill_buckets
from gpipe_hpc.models import Layer, find_ties, sizes_of_layers
from gpipe_hpc.planner.advice import KnownCosts
from gpipe_hpc.planner.costs.cost_models import CostModel
from gpipe_hpc.planner.costs.counted import ModelCount
from gpipe_hpc.planner.costs.layer_trial import LayerWeight
from gpipe_hpc.planner.cutting.partition import (
    ALIKE,
    BY_TIME,
    SIMULATED,
    Partition,
    Slowdowns,
    choose_partition,
)
from gpipe_hpc.planner.cutting.pins import EndRanges, Pins
from gpipe_hpc.planner.search.candidates import Candidate
from gpipe_hpc.planner.search.machine import Machine
from gpipe_hpc.planner.stages import StageCount, count_stages
from gpipe_hpc.schedule import Cluster, Placement, build

_FEW: Final = 4  # micro-batches of a table built only for its placement


class SearchCache:
    """Cache of layer costs, partitions, placements and buckets for the layouts of a search.

    Args:
      cost_model_of: returns counts or measured times for a micro-batch of a number of samples.
      alone: returns the counts if micro-batches do not share casts, as with offload; None if they
        are equal.
    """

    def __init__(
        self,
        machine: Machine,
        layers: Sequence[Layer],
        cost_model_of: Callable[[int], CostModel],
        batch_size: int,
        policy: Any = BY_TIME,
        pins: Pins = (),
        alone: Callable[[int], ModelCount] | None = None,
    ) -> None:
        """Store machine and model; `policy` and `pins` of the partition are as in a `Request`."""
        self.machine, self.layers, self.batch_size = machine, layers, batch_size
        self._gauge_of, self._alone, self._policy, self._pins = cost_model_of, alone, policy, pins
        self._leaves_cuts_open = False
        self._gauges: dict[tuple[int, bool], KnownCosts] = {}
        self._cuts: dict[tuple[int, bool, int, Slowdowns, int | None], Partition] = {}
        self._stages: dict[tuple[int, bool, tuple[int, ...]], tuple[StageCount, ...]] = {}
        self._placements: dict[tuple[object, ...], Placement] = {}
        self._weights: dict[tuple[bool, tuple[int, ...]], tuple[LayerWeight, ...]] = {}
        self._buckets: dict[tuple[range, float], Buckets] = {}
        self._bucket_sizes: dict[tuple[range, float], tuple[int, ...]] = {}

    def on(self, cluster: Cluster) -> "SearchCache":
        """Return a cache for another cluster with ranks of the same speed; entries are shared."""
        other = copy(self)
        other.machine = replace(self.machine, cluster=cluster)
        return other

    @property
    def simulates_cuts(self) -> bool:
        """Return whether partitions are improved by simulation if ranks hold several stages."""
        return bool(self._policy == SIMULATED)

    @property
    def cuts_by_time(self) -> bool:
        """Return whether the partition policy uses layer times (``time`` or ``simulated``)."""
        return self.simulates_cuts or bool(self._policy == BY_TIME)

    def with_open_cuts(self) -> "SearchCache":
        """Return a cache whose partitions are improved by simulation, taking about 0.5 s each."""
        other = copy(self)
        other._leaves_cuts_open = self.cuts_by_time
        return other

    def cost_model(self, samples: int, *, offloads: bool = False) -> KnownCosts:
        """Return the layer times on the machine for a micro-batch of `samples` samples."""
        key = samples, offloads and self._alone is not None
        if key not in self._gauges:
            if key[1]:
                assert self._alone is not None, "the key contains True only with a separate count"
                self._gauges[key] = replace(self.cost_model(samples), count=self._alone(samples))
            else:
                self._gauges[key] = self.machine.priced(self._gauge_of(samples))
        return self._gauges[key]

    def check_pins(self, num_stages: int) -> None:
        """Raise PartitionError unless some partition into `num_stages` stages satisfies all pins.

        Nothing is checked if there are more stages than layers.
        """
        if num_stages <= len(self.layers):
            EndRanges.where(self._pins, len(self.layers), num_stages)

    def partition(
        self,
        samples: int,
        num_stages: int,
        paces: Slowdowns = ALIKE,
        shared_by: int | None = None,
        *,
        offloads: bool = False,
    ) -> Partition:
        """Return the partition into `num_stages` stages, for slowdowns `paces` of ranks.

        `shared_by`: number of ranks that share the stages if some stages have one rank less. Raises
        PartitionError if there is no partition.
        """
        key = samples, offloads, num_stages, paces, shared_by
        if key not in self._cuts:
            cost_model = self.cost_model(samples, offloads=offloads)
            found = choose_partition(
                self._policy, num_stages, cost_model, shared_by, paces, self._pins
            )
            self._cuts[key] = found._replace(times=cost_model.times)
        return self._cuts[key]._replace(is_open=self._leaves_cuts_open)

    def stages(
        self, samples: int, counts: tuple[int, ...], *, offloads: bool = False
    ) -> tuple[StageCount, ...]:
        """Return cost, memory and exchanged values of the stages of a partition."""
        key = samples, offloads, counts
        if key not in self._stages:
            cost_model = self.cost_model(samples, offloads=offloads)
            self._stages[key] = count_stages(cost_model.count, counts)
        return self._stages[key]

    def placement(self, candidate: Candidate) -> Placement:
        """Return the placement of a layout, from a table with few micro-batches."""
        key = candidate.schedule, candidate.options, candidate.stages
        if key not in self._placements:
            table = build(
                candidate.schedule,
                ranks=candidate.stages,
                # Each partial replica needs at least one micro-batch.
                microbatches=min(candidate.microbatches, max(_FEW, candidate.rows)),
                **dict(candidate.options),
            )
            self._placements[key] = table.placement
        return self._placements[key]

    def weights(self, layers: tuple[int, ...], offloads: bool = False) -> tuple[LayerWeight, ...]:
        """Return the parameters of some layers; parameters tied among them count once."""
        key = offloads, layers
        if key not in self._weights:
            samples = next(iter(self._gauges))[0]  # any number of samples has the same weights
            count = self.cost_model(samples, offloads=offloads).count
            self._weights[key] = tuple(count.weights(layers))
        return self._weights[key]

    def buckets(self, span: range, bucket_bytes: float) -> Buckets:
        """Return the gradient buckets of a stage, in the order in which they become ready."""
        key = span, bucket_bytes
        if key not in self._buckets:
            own = {n: sized for layer in span for n, sized in self._sizes[layer].items()}
            self._buckets[key] = fill_buckets(own, bucket_bytes)
        return self._buckets[key]

    def bucket_sizes(self, span: range, bucket_bytes: float) -> tuple[int, ...]:
        """Return the bytes of each bucket of a stage."""
        key = span, bucket_bytes
        if key not in self._bucket_sizes:
            own = {n: sized.num_bytes for layer in span for n, sized in self._sizes[layer].items()}
            filled = self.buckets(span, bucket_bytes)
            self._bucket_sizes[key] = tuple(sum(own[n] for n in each) for each in filled)
        return self._bucket_sizes[key]

    @cached_property
    def _sizes(self) -> list[dict[str, GradientSize]]:
        tied = {tie.name for tie in find_ties(self.layers)}
        return [
            {name: GradientSize(*size) for name, size in each.items() if name not in tied}
            for each in sizes_of_layers(self.layers)
        ]
