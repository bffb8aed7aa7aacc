"""Lay out and simulate one candidate of a search: step time, memory and traffic."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from gpipe_hpc.errors import PartitionError, ScheduleError
from gpipe_hpc.planner.cutting.distance import Distance, distance
from gpipe_hpc.planner.cutting.partition import Partition
from gpipe_hpc.planner.forecast import activation_memory, rank_states
from gpipe_hpc.planner.layout import lay_out_compute
from gpipe_hpc.planner.memory.by_rank import excess_bytes, memory_limits
from gpipe_hpc.planner.memory.sharing import OptimizerSharing
from gpipe_hpc.planner.ordering import paces_of, shared_by
from gpipe_hpc.planner.request import Request
from gpipe_hpc.planner.search.cache import SearchCache
from gpipe_hpc.planner.search.candidates import LEAST, Candidate
from gpipe_hpc.planner.search.links import LinkLoad, add_sums, boundary_loads, heaviest
from gpipe_hpc.planner.search.reductions import StageReduction, copies_of, reductions_time
from gpipe_hpc.planner.shares import microbatch_shares
from gpipe_hpc.planner.step_time import (
    SimulatedTable,
    StepTime,
    action_costs,
    of_replicas,
    reduced_s,
    updated_by_ranks,
    with_copies,
)
from gpipe_hpc.schedule import (
    BubbleCauses,
    Costs,
    Placement,
    Schedule,
    Timeline,
    peak_memory,
)
from gpipe_hpc.schedule.table.lifetimes import ENDS_BACKWARD

_BUCKETS: Final = (25e6, 100e6)
"""Bucket sizes that are tried if none is set."""


class Combining(NamedTuple):
    """Settings for combining the gradients of replicas, chosen by a search (fields of `Outer`)."""

    shard: str
    hierarchy: str | int
    bucket_bytes: float

    @property
    def is_by_host(self) -> bool:
        """Return whether gradients are reduced inside each host first."""
        return self.hierarchy == "host"


class CombiningChoices(NamedTuple):
    """Values to try for each setting of `Combining`."""

    shards: tuple[str, ...]
    hierarchies: tuple[str | int, ...]
    buckets: tuple[float, ...]

    @classmethod
    def of(cls, base: Request, fixed: frozenset[str], num_hosts: int) -> "CombiningChoices":
        """Return the values to try, given the user's settings and the names that are fixed."""
        outer = base.combining
        is_usual = (
            outer.order == "backend" and outer.compress == "none" and not outer.uses_local_sgd
        )
        divides = "shard" not in fixed and is_usual and outer.hierarchy == "none"
        by_host = "hierarchy" not in fixed and is_usual and num_hosts > 1
        buckets = {outer.bucket_bytes} | (set() if "bucket_bytes" in fixed else set(_BUCKETS))
        return cls(
            ("none", "flat") if divides else (outer.shard,),
            ("none", "host") if by_host and outer.shard != "flat" else (outer.hierarchy,),
            tuple(sorted(buckets)),
        )

    def all(self) -> Iterator[Combining]:
        """Yield all valid combinations; a flat shard excludes hierarchical reduction."""
        for shard in self.shards:
            for hierarchy in self.hierarchies:
                if shard == "flat" and hierarchy != "none":
                    continue
                for nbytes in self.buckets:
                    yield Combining(shard, hierarchy, nbytes)


@dataclass(frozen=True)
class CandidateEvaluation:
    """A simulated layout; times in seconds, sizes in bytes.

    Attributes:
      compute_s: mean compute time of ranks in a step.
      causes: causes of idle time as shares of the step, which add up to the bubble.
      nbytes, rank: peak memory of the rank of a replica that needs most, and that rank.
      load: traffic of the slowest link.
      partition, placement: the assignment of layers to stages, and of stages to ranks.
      combining: settings for combining gradients; None without replicas.
      overhead_s: time after pipeline and all-reduces: clipping, optimizer and overhead.
    """

    candidate: Candidate
    request: Request
    step_s: float
    compute_s: float
    causes: BubbleCauses
    nbytes: int
    rank: int
    load: LinkLoad
    partition: Partition
    placement: Placement
    combining: Combining | None = None
    overhead_s: float = 0.0

    @property
    def cut_distance(self) -> Distance | None:
        """Return the distance of the partition from the best on these ranks; None for one rank."""
        if self.placement.num_ranks == 1:
            return None
        costs = [each.forward + each.backward for each in self.partition.times]
        return distance(self.partition, self.placement, costs)

    @property
    def bubble(self) -> float:
        """Return the share of the step time in which ranks are idle."""
        return sum(self.causes)

    @property
    def recomputes(self) -> bool:
        """Return whether some layers may be recomputed."""
        return self.candidate.recompute != "never"

    def overrides(self, base: Request) -> list[str]:
        """Return the layout's settings as written on the command line.

        Settings of `outer` are included only if they differ from `base`.
        """
        words = self.candidate.overrides()
        for name, value in () if self.combining is None else self.combining._asdict().items():
            if value != getattr(base.combining, name):
                words.append(f"outer.{name}={_written(value)}")
        return words


def _written(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value / 1e6:g}MB"


class MemoryExcess(NamedTuple):
    """A layout that does not fit: the rank that exceeds its limit most, and its memory.

    Attributes:
      lasting_bytes: part of `nbytes` that is weights, gradients, optimizer state and workspace.
      lacks: bytes by which each rank of a replica exceeds its limit, 0 if it fits.
    """

    candidate: Candidate
    rank: int
    nbytes: int
    lasting_bytes: int
    excess_bytes: float
    lacks: tuple[float, ...] = ()


def try_out(
    candidate: Candidate, cache: SearchCache, base: Request, choices: CombiningChoices
) -> CandidateEvaluation | MemoryExcess:
    """Lay out a candidate and, if it fits in memory, simulate it.

    With `LEAST`, as few layers as needed are recomputed. If nothing fits, the result is full or no
    recomputation, whichever exceeds the memory less. Raises the errors of laying out:
    PartitionError if no recomputation fits, ScheduleError for an impossible schedule.
    """
    laid = lay_out_in_memory(candidate, cache, base, choices)
    return laid if isinstance(laid, MemoryExcess) else laid.timed()


def lay_out_in_memory(
    candidate: Candidate, cache: SearchCache, base: Request, choices: CombiningChoices
) -> "CandidateTable | MemoryExcess":
    """Lay out a candidate as `try_out` does, without simulating it."""
    if candidate.recompute != LEAST:
        return _laid_out(candidate, cache, base, choices)
    plain = _laid_out(replace(candidate, recompute="never"), cache, base, choices)
    if isinstance(plain, CandidateTable):
        return plain
    if plain.lasting_bytes < plain.nbytes - plain.excess_bytes:
        with suppress(PartitionError):  # no recomputation fits
            return _laid_out(replace(candidate, recompute="budget"), cache, base, choices)
    thrifty = _laid_out(replace(candidate, recompute="except_last"), cache, base, choices)
    if isinstance(thrifty, CandidateTable) or thrifty.excess_bytes < plain.excess_bytes:
        return thrifty
    return plain


def _laid_out(
    candidate: Candidate, cache: SearchCache, base: Request, choices: CombiningChoices
) -> "CandidateTable | MemoryExcess":
    asked, ways = candidate.of(base), list(choices.all())
    if candidate.recompute == "budget":
        # Recomputation fills the free memory, which is largest with a sharded optimizer state.
        ways = [way for way in ways if way.shard == ways[-1].shard]
    laid = CandidateTable(candidate, cache, _combined(asked, ways[0]))
    limits = memory_limits(asked)
    if laid.is_alone:
        ways = ways[:1]
    held = {way.shard: way for way in ways}
    shards = {shard: laid.held(way) for shard, way in held.items()}
    fitting = [way for way in ways if not excess_bytes(shards[way.shard], limits)]
    if fitting or limits is None:
        return laid.with_ways(fitting or ways, shards)
    least = min(shards.values(), key=lambda each: excess_bytes(each, limits))
    rank = max(range(len(least)), key=lambda at: least[at] - limits[at])
    lasting = least[rank] - round(laid.peaks[rank])
    lacks = tuple(max(0.0, have - most) for have, most in zip(least, limits, strict=True))
    return MemoryExcess(candidate, rank, least[rank], lasting, lacks[rank], lacks)


def _combined(asked: Request, way: Combining) -> Request:
    return replace(asked, outer=replace(asked.combining, **way._asdict()))


class CandidateTable:
    """The schedule table of a candidate without communication, and the data needed to time it."""

    def __init__(self, candidate: Candidate, cache: SearchCache, asked: Request) -> None:
        """Lay out the candidate with the settings `asked`."""
        self.candidate, self.cache, self.asked = candidate, cache, asked
        samples = candidate.samples(cache.batch_size)
        cost_model = cache.cost_model(samples, offloads=candidate.offload)
        partition = cache.partition(
            samples,
            candidate.num_stages,
            paces_of(asked),
            shared_by(asked),
            offloads=candidate.offload,
        )
        found = lay_out_compute(replace(asked, partition=partition), cost_model)
        self.model, self.partition = cost_model.count, found.partition
        self.table: Schedule = found.table
        self.recomputed = found.budget.recomputed if found.budget else None
        self.stages = cache.stages(samples, found.partition.counts, offloads=candidate.offload)
        self.shares = microbatch_shares(
            cache.batch_size,
            candidate.replicas * candidate.microbatches,
            range(candidate.microbatches),
        )
        memory = replace(activation_memory(self.stages, self.recomputed), shares=self.shares)
        self.peaks = peak_memory(self.table, memory)
        self._ways: Sequence[Combining] = ()
        self._held: Mapping[str, Sequence[int]] = {}

    @property
    def is_alone(self) -> bool:
        """Return whether no stage has a replica."""
        return self.candidate.replicas == 1 and len(self.table.placement.routes) == 1

    def held(self, way: Combining) -> list[int]:
        """Return the peak bytes of each rank for one way to combine gradients."""
        placement, kept = self.table.placement, self.asked.kept_states
        sharing = None if self.is_alone else self._sharing(way)
        return [
            rank_states(self.model, self.stages, placement, rank, kept, sharing).with_activations(
                round(peak)
            )
            for rank, peak in enumerate(self.peaks)
        ]

    def _sharing(self, way: Combining) -> OptimizerSharing | None:
        copies = [
            self.candidate.replicas * len(self.table.placement.holders(stage))
            for stage in range(len(self.stages))
        ]
        buckets = tuple(
            self.cache.buckets(stage.layers, way.bucket_bytes) if number > 1 else ()
            for stage, number in zip(self.stages, copies, strict=True)
        )
        return OptimizerSharing.of(way.shard, self.candidate.replicas, buckets)

    def with_ways(
        self, ways: Sequence[Combining], held: Mapping[str, Sequence[int]]
    ) -> "CandidateTable":
        """Set the ways to combine gradients that fit in memory; return this object.

        `held` has the bytes of each rank by value of `shard`.
        """
        self._ways, self._held = ways, held
        return self

    def timed(self) -> CandidateEvaluation:
        """Simulate the layout and choose the fastest way to combine gradients."""
        ways, held = self._ways, self._held
        piped = SimulatedTable(self.table, self._costs(), self.cache.machine.prices)
        self._refuse_idle_copies(piped.slowest)
        steps = {way: self._step(piped, way) for way in ways}
        best = min(ways, key=lambda way: (steps[way].total_s, max(held[way.shard])))
        step_s, timeline = steps[best].total_s, piped.slowest
        own = held[best.shard]
        return CandidateEvaluation(
            candidate=self.candidate,
            request=self.asked if self.is_alone else _combined(self.asked, best),
            step_s=step_s,
            compute_s=sum(timeline.busy) / self.candidate.stages,
            causes=_causes(timeline, piped.undelayed_s(), step_s, steps[best].reduction_s),
            nbytes=max(own),
            rank=own.index(max(own)),
            load=self._load(best),
            partition=self.partition,
            placement=self.table.placement,
            combining=None if self.is_alone else best,
            overhead_s=step_s - steps[best].reduction_s - timeline.end_of_compute,
        )

    def _step(self, piped: SimulatedTable, way: Combining) -> StepTime:
        """Return the step time for one way to combine gradients."""
        machine, placement, counts = self.cache.machine, self.table.placement, self._counts
        over_s = piped.end_s
        if not self.is_alone:
            sums = [self._sum(way, stage) for stage in range(len(self.stages))]
            outer = replace(self.asked.combining, **way._asdict())
            over_s = reduced_s(placement, piped, sums, outer, counts, self.partition.times)
        copies = 1 if way.shard == "none" else self.candidate.replicas
        held = updated_by_ranks(self.model, counts, placement, copies)
        return piped.step(over_s, held, clips=machine.clips, crowd=machine.crowd)

    @property
    def _counts(self) -> tuple[int, ...]:
        return self.partition.counts

    def _refuse_idle_copies(self, timeline: Timeline) -> None:
        """Raise ScheduleError if a rank holds a stage but runs none of its micro-batches."""
        placement = self.table.placement
        for rank, row in enumerate(timeline.events):
            at_work = {event.action.stage for event in row if event.action.op in ENDS_BACKWARD}
            idle = set(placement.stages_of(rank)) - at_work
            if idle:
                raise ScheduleError(
                    f"schedule {self.table.name!r}: rank {rank} has no work for its replica of "
                    f"stage {min(idle)} with {self.candidate.microbatches} micro-batch(es); use "
                    f"more of them"
                )

    def _costs(self) -> list[Costs]:
        """Return the costs of actions for each distinct kind of replica."""
        machine = self.cache.machine
        costs = action_costs(self.partition, self.stages, self.recomputed, self.shares)
        costs = with_copies(
            costs, self.table, self.stages, self.recomputed, machine.host_bytes_per_s
        )
        return of_replicas(machine.cluster, self.table, costs, self.candidate.replicas)

    def _sum(self, way: Combining, stage: int) -> StageReduction:
        buckets = self.cache.bucket_sizes(self.stages[stage].layers, way.bucket_bytes)
        ranks = copies_of(
            self.table.placement, stage, self.candidate.replicas, self.candidate.stages
        )
        cluster = self.cache.machine.summing
        time = reductions_time(cluster, ranks, sum(buckets), len(buckets), by_host=way.is_by_host)
        return StageReduction(time, buckets)

    def _load(self, way: Combining) -> LinkLoad:
        """Return the bytes that a step sends over the most loaded of the slowest links."""
        cluster, placement = self.cache.machine.cluster, self.table.placement
        first = boundary_loads(self.stages, placement, self.shares)
        found = {
            (replica * self.candidate.stages + a, replica * self.candidate.stages + b): nbytes
            for replica in range(self.candidate.replicas)
            for (a, b), nbytes in first.items()
        }
        if not self.is_alone:
            for stage in range(len(self.stages)):
                ranks = copies_of(placement, stage, self.candidate.replicas, self.candidate.stages)
                nbytes = sum(self._sum(way, stage).buckets)
                add_sums(found, cluster, ranks, nbytes, by_host=way.is_by_host)
        return heaviest(cluster, found)


def _causes(
    timeline: Timeline, undelayed_s: float, step_s: float, reduction_s: float
) -> BubbleCauses:
    """Return the causes of idle time as shares of a step; see `BubbleCauses`."""
    if not step_s:
        return BubbleCauses(0.0, 0.0, 0.0, 0.0)
    busy = timeline.busy
    mean = sum(busy) / len(busy)
    end = timeline.end_of_compute
    return BubbleCauses(
        fill_and_drain=(undelayed_s - max(busy)) / step_s,
        imbalance=(max(busy) - mean) / step_s,
        transfers=(end - undelayed_s) / step_s,
        reduction_tail=reduction_s / step_s,
    )
