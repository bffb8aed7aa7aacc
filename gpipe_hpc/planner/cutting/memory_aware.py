"""Find the fastest partition that keeps each rank within its memory limit."""

from collections.abc import Sequence
from functools import cache, partial

import numpy as np

from gpipe_hpc.errors import GpipeError
from gpipe_hpc.planner.buckets import sharing_of
from gpipe_hpc.planner.budget.fitting import LiveMicrobatches, moments_of
from gpipe_hpc.planner.budget.one_stage import stage_choices
from gpipe_hpc.planner.costs.cost_models import CostModel
from gpipe_hpc.planner.costs.counted import ModelCount
from gpipe_hpc.planner.cutting.partition import Partition
from gpipe_hpc.planner.cutting.unequal_ranks import StageConstraint, cut_with_constraint
from gpipe_hpc.planner.forecast import lasting_bytes, peak_bytes_of_ranks
from gpipe_hpc.planner.memory.by_rank import excess_bytes, memory_limits
from gpipe_hpc.planner.request import Request
from gpipe_hpc.planner.stages import count_span
from gpipe_hpc.planner.tables import with_recompute_and_offload
from gpipe_hpc.schedule import Schedule


def lacks_memory(
    request: Request, partition: Partition, table: Schedule, cost_model: CostModel
) -> bool:
    """Return whether some rank exceeds its memory limit with the requested recomputation.

    With recompute=budget the table is checked without recomputation. False if layers cannot be
    counted.
    """
    limits = memory_limits(request)
    whole = with_recompute_and_offload(table, request.recompute, request.offload)
    try:
        sharing = sharing_of(request, partition.counts, whole.placement, cost_model.layers)
        held = peak_bytes_of_ranks(
            cost_model.count, partition.counts, whole, request.kept_states, sharing=sharing
        )
    except GpipeError:
        return False
    return excess_bytes(held, limits) > 0


def fitting_cut(
    request: Request, partition: Partition, table: Schedule, cost_model: CostModel
) -> Partition | None:
    """Return the fastest partition within the memory of all ranks, or None if there is none.

    Exact for the memory of a `table` of this order, by dynamic programming: of all partitions that
    fit, one with the fastest slowest stage. With recompute=budget each rank recomputes the layers
    that minimize its memory. Also None if the search does not apply: a partition given by the user,
    several stages per rank or ranks per stage, offload, sharded optimizer state, or layers that
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
        model = cost_model.count
    except GpipeError:
        return None
    chooses = request.recompute == "budget"
    recompute = "except_last" if chooses else request.recompute
    rows = with_recompute_and_offload(table, recompute, offload=False).ranks
    (route,) = placement.routes
    moments = [moments_of(rows[rank]) for rank in route]
    span = cache(partial(_StretchMemory, model, request))

    def fits(stage: int, start: int, stop: int) -> bool:
        own, each = span(start, stop), moments[stage]
        if own.updating_bytes > limits[route[stage]]:
            return False
        room = limits[route[stage]] - own.workspace_bytes
        if own.bytes(each) <= room or not chooses:
            return own.bytes(each) <= room
        return own.at_least_bytes(each) <= room and own.least_bytes(each) <= room

    def is_spent(stage: int, start: int, stop: int) -> bool:
        # All of these grow with more layers; the workspace may shrink, so it is left out.
        own, each = span(start, stop), moments[stage]
        if own.updating_bytes > limits[route[stage]]:
            return True
        return (own.at_least_bytes(each) if chooses else own.bytes(each)) > limits[route[stage]]

    paces = partition.paces or (1.0,) * placement.num_stages
    counts = cut_with_constraint(
        partition.costs, paces, StageConstraint(fits, is_spent), partition.pins
    )
    return None if counts is None else partition._replace(counts=tuple(counts))


class _StretchMemory:
    """Memory of consecutive layers as one stage: permanent, workspace and per micro-batch."""

    def __init__(self, model: ModelCount, request: Request, start: int, stop: int) -> None:
        layers, states = range(start, stop), request.kept_states
        self._lasting = lasting_bytes(model, layers, states)
        self.updating_bytes = self._lasting + states.update_of(model.weights(layers))
        self._stage = count_span(model, start, stop)
        self._whole = self._stage.activation_bytes
        self._all_again = self._stage.lives(self._stage.layers)
        self.workspace_bytes = self._stage.workspace_bytes

    def bytes(self, moments: Sequence[LiveMicrobatches], less: int = 0) -> int:
        """Return the peak bytes over these moments if all layers are recomputed where possible.

        `less` is subtracted from each micro-batch that is to be recomputed, or was recomputed.
        """
        kept, full = self._all_again
        return self._lasting + max(
            self._whole * whole + (kept - less) * num_kept + (full - less) * num_full
            for whole, num_kept, num_full in map(_numbers, moments)
        )

    def at_least_bytes(self, moments: Sequence[LiveMicrobatches]) -> int:
        """Return a lower bound of the peak bytes over all choices of recomputed layers.

        Recomputing fewer layers can only save the inputs of the recomputed layers that are not kept
        otherwise.
        """
        storages = self._stage.storages
        return self.bytes(moments, storages.nbytes(storages.layers[0].given - storages.held))

    def least_bytes(self, moments: Sequence[LiveMicrobatches]) -> int:
        """Return the peak bytes for the choice of recomputed layers that minimizes them."""
        numbers = [*map(_numbers, moments)]
        weights = {(kept, full) for _, kept, full in numbers if kept or full} or {(1, 0)}
        # With zero costs, only the choices with the least memory remain.
        choices = stage_choices(self._stage.storages, [0] * len(self._stage.layers), weights)
        held = [
            self._whole * whole + choices.kept_bytes * kept + choices.full_bytes * full
            for whole, kept, full in numbers
        ]
        return self._lasting + int(np.max(held, axis=0).min())


def _numbers(moment: LiveMicrobatches) -> tuple[int, int, int]:
    """Return the numbers of live micro-batches at a moment.

    These are: never recomputed, to be recomputed, recomputed.
    """
    return sum(moment.whole.values()), sum(moment.kept.values()), sum(moment.full.values())
