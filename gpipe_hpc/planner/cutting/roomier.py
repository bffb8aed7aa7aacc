"""A cut by time with which each rank keeps within its memory, where the fastest cut does not."""

from collections.abc import Sequence
from functools import cache, partial

import numpy as np

from gpipe_hpc.errors import GpipeError
from gpipe_hpc.planner.buckets import sharing_of
from gpipe_hpc.planner.budget.fitting import Moment, moments_of
from gpipe_hpc.planner.budget.one_stage import stage_choices
from gpipe_hpc.planner.costs.counted import ModelCount
from gpipe_hpc.planner.costs.gauges import Gauge
from gpipe_hpc.planner.cutting.partition import Partition
from gpipe_hpc.planner.cutting.uneven import Room, cut_where
from gpipe_hpc.planner.forecast import held_bytes, lasting_bytes
from gpipe_hpc.planner.memory.by_rank import excess_bytes, memory_limits
from gpipe_hpc.planner.request import Request
from gpipe_hpc.planner.stages import count_span
from gpipe_hpc.planner.tables import dressed
from gpipe_hpc.schedule import Schedule


def lacks_memory(request: Request, partition: Partition, table: Schedule, gauge: Gauge) -> bool:
    """Say whether some rank needs more than it may fill, in a table without R chosen by a budget.

    No, where layers cannot be counted.
    """
    limits = memory_limits(request)
    whole = dressed(table, request.recompute, request.offload)
    try:
        sharing = sharing_of(request, partition.counts, whole.placement, gauge.layers)
        held = held_bytes(
            gauge.count, partition.counts, whole, request.kept_states, sharing=sharing
        )
    except GpipeError:
        return False
    return excess_bytes(held, limits) > 0


def roomier_cut(
    request: Request, partition: Partition, table: Schedule, gauge: Gauge
) -> Partition | None:
    """Return the fastest cut with which all ranks stay within their memory; None: there is none.

    Exact for what a `table` of this order holds, by dynamic programming: of all cuts that fit, one
    whose slowest stage is as fast as can be. With recompute ``budget`` each rank recomputes what
    leaves it most room. None also where this is not looked for: a cut by hand,
    several stages a rank or ranks a stage, offload, states divided over replicas, layers that
    cannot be counted.
    """
    limits = memory_limits(request)
    placement = table.placement
    is_plain = placement.num_stages == placement.num_ranks and len(placement.routes) == 1
    if limits is None or not is_plain or not isinstance(request.partition, str | Partition):
        return None
    if request.offload or request.combining.shard != "none":
        return None
    try:
        model = gauge.count
    except GpipeError:
        return None
    chooses = request.recompute == "budget"
    recompute = "except_last" if chooses else request.recompute
    rows = dressed(table, recompute, offload=False).ranks
    (route,) = placement.routes
    moments = [moments_of(rows[rank]) for rank in route]
    span = cache(partial(_Span, model, request))

    def fits(stage: int, start: int, stop: int) -> bool:
        own, each = span(start, stop), moments[stage]
        if own.updating_bytes > limits[route[stage]]:
            return False
        room = limits[route[stage]] - own.workspace_bytes
        if own.bytes(each) <= room or not chooses:
            return own.bytes(each) <= room
        return own.at_least_bytes(each) <= room and own.least_bytes(each) <= room

    def is_spent(stage: int, start: int, stop: int) -> bool:
        # With more layers all of this grows. The workspace may shrink: with it what leaves.
        own, each = span(start, stop), moments[stage]
        if own.updating_bytes > limits[route[stage]]:
            return True
        return (own.at_least_bytes(each) if chooses else own.bytes(each)) > limits[route[stage]]

    paces = partition.paces or (1.0,) * placement.num_stages
    counts = cut_where(partition.costs, paces, Room(fits, is_spent), partition.pins)
    return None if counts is None else partition._replace(counts=tuple(counts))


class _Span:
    """Some layers as a stage: what they hold all the time, to run, and of a micro-batch."""

    def __init__(self, model: ModelCount, request: Request, start: int, stop: int) -> None:
        layers, states = range(start, stop), request.kept_states
        self._lasting = lasting_bytes(model, layers, states)
        self.updating_bytes = self._lasting + states.update_of(model.weights(layers))
        self._stage = count_span(model, start, stop)
        self._whole = self._stage.activation_bytes
        self._all_again = self._stage.lives(self._stage.layers)
        self.workspace_bytes = self._stage.workspace_bytes

    def bytes(self, moments: Sequence[Moment], less: int = 0) -> int:
        """Return what a rank of these moments holds for them; all that can be is recomputed.

        `less`: by how much less is counted of each micro-batch that is to be, or was.
        """
        kept, full = self._all_again
        return self._lasting + max(
            self._whole * whole + (kept - less) * num_kept + (full - less) * num_full
            for whole, num_kept, num_full in map(_numbers, moments)
        )

    def at_least_bytes(self, moments: Sequence[Moment]) -> int:
        """Return what it holds at least, whatever is recomputed.

        To recompute less than all saves nothing but what a run starts from and nobody else keeps.
        """
        storages = self._stage.storages
        return self.bytes(moments, storages.nbytes(storages.layers[0].given - storages.held))

    def least_bytes(self, moments: Sequence[Moment]) -> int:
        """Return what it holds where those layers are recomputed for which that is least."""
        numbers = [*map(_numbers, moments)]
        weights = {(kept, full) for _, kept, full in numbers if kept or full} or {(1, 0)}
        # For nothing: of choices that cost the same those that keep least are left.
        choices = stage_choices(self._stage.storages, [0] * len(self._stage.layers), weights)
        held = [
            self._whole * whole + choices.kept_bytes * kept + choices.full_bytes * full
            for whole, kept, full in numbers
        ]
        return self._lasting + int(np.max(held, axis=0).min())


def _numbers(moment: Moment) -> tuple[int, int, int]:
    """Return how many micro-batches of a rank's only stage are whole, to be recomputed, and are."""
    return sum(moment.whole.values()), sum(moment.kept.values()), sum(moment.full.values())
