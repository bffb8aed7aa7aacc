"""What all layouts of a search share: counts of each size of micro-batch, cuts, placements."""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from typing import Any, Final

from gpipe_hpc.data_parallel import Buckets, GradientSize, fill_buckets
from gpipe_hpc.models import Layer, find_ties, sizes_of_layers
from gpipe_hpc.planner.advice import Known
from gpipe_hpc.planner.costs.counted import ModelCount
from gpipe_hpc.planner.costs.gauges import Gauge
from gpipe_hpc.planner.costs.trial import Weight
from gpipe_hpc.planner.cutting.partition import (
    ALIKE,
    BY_TIME,
    SIMULATED,
    Paces,
    Partition,
    choose_partition,
)
from gpipe_hpc.planner.cutting.pins import Ends, Pins
from gpipe_hpc.planner.search.candidates import Candidate
from gpipe_hpc.planner.search.machine import Machine
from gpipe_hpc.planner.stages import StageCount, count_stages
from gpipe_hpc.schedule import Cluster, Placement, build

_FEW: Final = 4  # micro-batches of a table that only shows its placement


class Ground:
    """Finds out each thing once, when it is first asked for.

    `gauge_of`: the counts, or measured times, of a micro-batch of so many samples. `alone`: the
    counts where it shares no casts of weights with others, as with offload; None: the same.
    """

    def __init__(
        self,
        machine: Machine,
        layers: Sequence[Layer],
        gauge_of: Callable[[int], Gauge],
        batch_size: int,
        policy: Any = BY_TIME,
        pins: Pins = (),
        alone: Callable[[int], ModelCount] | None = None,
    ) -> None:
        """Keep what is known; `policy`, `pins`: how the model is cut, as in a `Request`."""
        self.machine, self.layers, self.batch_size = machine, layers, batch_size
        self._gauge_of, self._alone, self._policy, self._pins = gauge_of, alone, policy, pins
        self._leaves_cuts_open = False
        self._gauges: dict[tuple[int, bool], Known] = {}
        self._cuts: dict[tuple[int, bool, int, Paces, int | None], Partition] = {}
        self._stages: dict[tuple[int, bool, tuple[int, ...]], tuple[StageCount, ...]] = {}
        self._placements: dict[tuple[object, ...], Placement] = {}
        self._weights: dict[tuple[bool, tuple[int, ...]], tuple[Weight, ...]] = {}
        self._buckets: dict[tuple[range, float], Buckets] = {}
        self._bucket_sizes: dict[tuple[range, float], tuple[int, ...]] = {}

    def on(self, cluster: Cluster) -> "Ground":
        """Return the same for other ranks of the same speed; what is known stays known to both."""
        other = copy(self)
        other.machine = replace(self.machine, cluster=cluster)
        return other

    @property
    def simulates_cuts(self) -> bool:
        """Say whether a run takes a faster cut where ranks hold several stages and one is found."""
        return bool(self._policy == SIMULATED)

    @property
    def cuts_by_time(self) -> bool:
        """Say whether cuts are by time, simulated or not."""
        return self.simulates_cuts or bool(self._policy == BY_TIME)

    def with_open_cuts(self) -> "Ground":
        """Return the same whose layouts take such cuts, which takes about half a second each."""
        other = copy(self)
        other._leaves_cuts_open = self.cuts_by_time
        return other

    def gauge(self, samples: int, *, offloads: bool = False) -> Known:
        """Return what layers take on the machine for a micro-batch of so many samples."""
        key = samples, offloads and self._alone is not None
        if key not in self._gauges:
            if key[1]:
                assert self._alone is not None, "else it is the same"
                self._gauges[key] = replace(self.gauge(samples), count=self._alone(samples))
            else:
                self._gauges[key] = self.machine.priced(self._gauge_of(samples))
        return self._gauges[key]

    def check_pins(self, num_stages: int) -> None:
        """Raise PartitionError unless some cut into so many stages has all pinned layers on theirs.

        With more stages than layers there is no cut to ask of.
        """
        if num_stages <= len(self.layers):
            Ends.where(self._pins, len(self.layers), num_stages)

    def partition(
        self,
        samples: int,
        num_stages: int,
        paces: Paces = ALIKE,
        shared_by: int | None = None,
        *,
        offloads: bool = False,
    ) -> Partition:
        """Return the cut into so many stages, on ranks of such paces.

        `shared_by`: how many ranks hold the stages, where some are on one less than others. Raises
        PartitionError where there is none.
        """
        key = samples, offloads, num_stages, paces, shared_by
        if key not in self._cuts:
            gauge = self.gauge(samples, offloads=offloads)
            found = choose_partition(self._policy, num_stages, gauge, shared_by, paces, self._pins)
            self._cuts[key] = found._replace(times=gauge.times)
        return self._cuts[key]._replace(is_open=self._leaves_cuts_open)

    def stages(
        self, samples: int, counts: tuple[int, ...], *, offloads: bool = False
    ) -> tuple[StageCount, ...]:
        """Return what the stages of a cut cost, keep and exchange."""
        key = samples, offloads, counts
        if key not in self._stages:
            gauge = self.gauge(samples, offloads=offloads)
            self._stages[key] = count_stages(gauge.count, counts)
        return self._stages[key]

    def placement(self, candidate: Candidate) -> Placement:
        """Return where the stages of a layout are; its micro-batches are not those of a run."""
        key = candidate.schedule, candidate.options, candidate.stages
        if key not in self._placements:
            table = build(
                candidate.schedule,
                ranks=candidate.stages,
                # Each of the rows that ranks do not fill has one.
                microbatches=min(candidate.microbatches, max(_FEW, candidate.rows)),
                **dict(candidate.options),
            )
            self._placements[key] = table.placement
        return self._placements[key]

    def weights(self, layers: tuple[int, ...], offloads: bool = False) -> tuple[Weight, ...]:
        """Return the parameters of some layers, those tied among them once."""
        key = offloads, layers
        if key not in self._weights:
            samples = next(iter(self._gauges))[0]  # any will do
            count = self.gauge(samples, offloads=offloads).count
            self._weights[key] = tuple(count.weights(layers))
        return self._weights[key]

    def buckets(self, span: range, bucket_bytes: float) -> Buckets:
        """Return the buckets of a stage's gradients, those that leave first ahead."""
        key = span, bucket_bytes
        if key not in self._buckets:
            own = {n: sized for layer in span for n, sized in self._sizes[layer].items()}
            self._buckets[key] = fill_buckets(own, bucket_bytes)
        return self._buckets[key]

    def bucket_sizes(self, span: range, bucket_bytes: float) -> tuple[int, ...]:
        """Return the bytes of each of these buckets."""
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
