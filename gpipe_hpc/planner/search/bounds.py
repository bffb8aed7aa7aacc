"""Closed-form lower bounds of a layout's step time and memory, before any table is built."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from gpipe_hpc.models import stage_layers
from gpipe_hpc.planner.costs.layer_trial import LayerWeight
from gpipe_hpc.planner.cutting.partition import Partition
from gpipe_hpc.planner.cutting.simulated import has_shared_ranks
from gpipe_hpc.planner.cutting.unequal_ranks import copies_for
from gpipe_hpc.planner.memory.optimizer import OptimizerMemory
from gpipe_hpc.planner.request import Request
from gpipe_hpc.planner.search.cache import SearchCache
from gpipe_hpc.planner.search.candidates import SPLITTING, Candidate
from gpipe_hpc.planner.search.reductions import copies_of, reductions_time
from gpipe_hpc.planner.shares import microbatch_shares
from gpipe_hpc.planner.stages import StageCount
from gpipe_hpc.schedule import Placement


class Bound(NamedTuple):
    """Lower bounds of a layout's step time and largest memory of a rank, and a likely step time."""

    seconds: float
    probably_s: float
    nbytes: float


class CombiningOptions(NamedTuple):
    """Whether gradients may be reduced inside hosts first, and optimizer state may be sharded."""

    by_host: bool
    divided: bool


def bound(candidate: Candidate, cache: SearchCache, base: Request, ways: CombiningOptions) -> Bound:
    """Return lower bounds of a layout's time and memory, valid for any order of its actions.

    The time is for the fastest partition and equal ranks, each as fast as the fastest; the run uses
    another partition if some rank lacks memory. If runs simulate partitions for ranks that hold
    several stages, the time is for any partition. Raises the errors of partitioning.
    """
    states = base.kept_states
    samples = candidate.samples(cache.batch_size)
    partition = cache.partition(
        samples, candidate.num_stages, shared_by=candidate.shared_by, offloads=candidate.offload
    )
    placement = cache.placement(candidate)
    stages = cache.stages(samples, partition.counts, offloads=candidate.offload)
    times = _StageTimes.of(partition)
    if candidate.rows > 1:
        seconds = _least_in_rows_s(candidate, cache, _copies(candidate, partition, cache), times)
    else:
        sums = _sums(candidate, cache, stages, ways)
        seconds = _least_s(candidate, cache, placement, times, sums)
    pace = min([1.0, *cache.machine.cluster.paces.values()]) * _least_pace(base)
    on_this_cut = least = pace * seconds
    if cache.simulates_cuts and has_shared_ranks(placement):
        least = pace * _least_of_any_cut_s(candidate, cache, placement, times)
    return Bound(
        least,
        on_this_cut + _guess_s(candidate, times),
        _least_bytes(candidate, cache, states, ways),
    )


def _least_pace(base: Request) -> float:
    """Return the slowdown of the fastest rank relative to rank 0."""
    if base.paces is None or isinstance(base.paces, str):
        return 1.0
    paces = [float(pace) for pace in base.paces]
    return min(paces) / paces[0]


class _StageTimes(NamedTuple):
    """Seconds of each pass of each stage for a micro-batch of full size."""

    forward: list[float]
    backward: list[float]
    of_input: list[float]
    of_weight: list[float]
    least_forward: list[float]

    @classmethod
    def of(cls, partition: Partition) -> "_StageTimes":
        """Return the times of the stages of a partition with known layer times."""
        spans = [partition.times[s.start : s.stop] for s in stage_layers(partition.counts)]
        forward, backward, of_input, of_weight = (
            [sum(layer[part] for layer in span) for span in spans] for part in range(4)
        )
        least = [sum(min(each.forward, each.bare_forward) for each in span) for span in spans]
        return cls(forward, backward, of_input, of_weight, least)


def _least_s(
    candidate: Candidate,
    cache: SearchCache,
    placement: Placement,
    times: _StageTimes,
    sums: Sequence[float],
) -> float:
    """Return a lower bound of the step time from data dependencies and the work of each rank.

    A rank's first forward waits for the forwards of all earlier stages. After its last backward the
    backwards of the earlier stages follow, though a delayed W may be last. The all-reduce of a
    stage's gradients starts no earlier than its last backward.
    """
    if len(placement.routes) > 1:
        return _least_of_any_cut_s(candidate, cache, placement, times)
    amount, smallest = _amounts(candidate, cache)
    forward, backward, of_input, of_weight, least_forward = times
    splits = candidate.schedule in SPLITTING
    ahead = [0.0, *accumulate(least_forward)]
    behind = [0.0, *accumulate(of_input if splits else backward)]
    most = 0.0
    for rank in range(placement.num_ranks):
        own = placement.stages_of(rank)
        first = own[0]
        head, tail = smallest * ahead[first], smallest * behind[first]
        work = amount * sum(forward[s] + backward[s] for s in own)
        waiting = amount * sum(of_weight[s] for s in own) if splits else 0.0
        summed = [first] if splits else own  # they all end before the first one's backward
        known = amount * sum(forward[s] + backward[s] for s in summed)
        most = max(
            most,
            head + work - waiting + tail,
            head + work,
            head + known - backward[first] + sums[first],
        )
    return most


def _least_of_any_cut_s(
    candidate: Candidate, cache: SearchCache, placement: Placement, times: _StageTimes
) -> float:
    """Return a lower bound of the step time that is valid for any partition.

    The larger of the total work divided by the ranks, and one micro-batch's path through all
    stages.
    """
    amount, smallest = _amounts(candidate, cache)
    work = amount * (sum(times.forward) + sum(times.backward)) / placement.num_ranks
    return max(work, smallest * (sum(times.least_forward) + sum(times.of_input)))


def _amounts(candidate: Candidate, cache: SearchCache) -> tuple[float, float]:
    """Return a replica's work and its smallest micro-batch, in units of the largest micro-batch."""
    shares = microbatch_shares(
        cache.batch_size,
        candidate.replicas * candidate.microbatches,
        range(candidate.microbatches),
    )
    amount = sum(shares) if shares else float(candidate.microbatches)
    return amount, min(shares, default=1.0)


def _copies(candidate: Candidate, partition: Partition, cache: SearchCache) -> list[int]:
    """Return the number of ranks of each stage in a pipeline of partial replicas."""
    if candidate.shared_by is not None:
        return copies_for(partition.counts, partition.costs, candidate.shared_by)
    placement = cache.placement(candidate)
    return [len(placement.holders(stage)) for stage in range(placement.num_stages)]


def _least_in_rows_s(
    candidate: Candidate, cache: SearchCache, copies: Sequence[int], times: _StageTimes
) -> float:
    """Return a lower bound of the step time with partial replicas, without all-reduces.

    The busiest rank of a stage has at least the mean share of its micro-batches. As in `_least_s`,
    its first forward waits for earlier stages, and their backwards wait for its last one.
    """
    amount, smallest = _amounts(candidate, cache)
    forward, backward, of_input, of_weight, least_forward = times
    splits = candidate.written.schedule in SPLITTING
    ahead = [0.0, *accumulate(least_forward)]
    behind = [0.0, *accumulate(of_input if splits else backward)]
    most = 0.0
    for stage, number in enumerate(copies):
        own = max(amount / number, -(-candidate.microbatches // number) * smallest)
        head, tail = smallest * ahead[stage], smallest * behind[stage]
        work = own * (forward[stage] + backward[stage])
        waiting = own * of_weight[stage] if splits else 0.0
        most = max(most, head + work - waiting + tail, head + work)
    return most


def _sums(
    candidate: Candidate, cache: SearchCache, stages: Sequence[StageCount], ways: CombiningOptions
) -> list[float]:
    """Return the shortest time of the all-reduce of each stage's gradients after its backward."""
    placement, cluster = cache.placement(candidate), cache.machine.summing
    found = []
    for number, stage in enumerate(stages):
        ranks = copies_of(placement, number, candidate.replicas, candidate.stages)
        nbytes = sum(cache.bucket_sizes(stage.layers, float("inf")))
        times = [
            reductions_time(cluster, ranks, nbytes, 1, by_host=by_host).total_s
            for by_host in (False, True)[: 1 + ways.by_host]
        ]
        found.append(min(times) * (0.5 if ways.divided else 1.0))
    return found


def _guess_s(candidate: Candidate, times: _StageTimes) -> float:
    """Return the likely excess over the bound for schedules with delayed weight gradients."""
    if candidate.schedule not in SPLITTING or candidate.stages == 1:
        return 0.0
    each = [sum(part) / candidate.stages for part in times]
    forward, _, of_input, of_weight, _ = each
    idle = {
        "zb_h1": max(0.0, of_input - of_weight),
        "v_half": 1.5 * forward,
        "dualpipe": 0.5 * (forward + of_input),
        "dualpipe_v": of_input,
    }
    return (candidate.stages - 1) * idle.get(candidate.schedule, 0.0)


def _least_bytes(
    candidate: Candidate, cache: SearchCache, states: OptimizerMemory, ways: CombiningOptions
) -> float:
    """Return a lower bound, for any partition, of the bytes of the rank that needs most."""
    placement = cache.placement(candidate)
    holders = [len(placement.holders(stage)) for stage in range(placement.num_stages)]
    copies = candidate.replicas * max(holders) if ways.divided else 1
    states = states._replace(replicas=candidate.replicas)
    states = states.among(candidate.replicas * min(holders))
    whole, largest = least_bytes(cache, states, copies, offloads=candidate.offload)
    return max(whole * min(holders) / candidate.stages, largest)


def least_bytes(
    cache: SearchCache, states: OptimizerMemory, copies: int, *, offloads: bool = False
) -> tuple[float, float]:
    """Return the permanent bytes of the whole model and of its largest layer.

    They include weights, gradients and optimizer state, which is sharded over `copies` replicas.
    """
    everything = tuple(range(len(cache.layers)))
    each = (_lasting(cache.weights((i,), offloads), states, copies) for i in everything)
    return _lasting(cache.weights(everything, offloads), states, copies), max(each)


def _lasting(weights: Sequence[LayerWeight], states: OptimizerMemory, copies: int) -> float:
    trained = sum(weight.nbytes for weight in weights if weight.is_trained)
    whole = sum(weight.nbytes + weight.cast_bytes for weight in weights) + trained
    kept = states.copies_of(weights)
    return whole + kept + (states.of_weights(weights) - kept) / copies
