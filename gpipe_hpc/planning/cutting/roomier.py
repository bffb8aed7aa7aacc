"""A cut by time with which each rank keeps within its memory, where the fastest cut does not."""

from collections.abc import Sequence
from functools import cache, partial

from gpipe_hpc.errors import GpipeError
from gpipe_hpc.planning.budget.fitting import Moment, moments_of
from gpipe_hpc.planning.costs.counted import ModelCount
from gpipe_hpc.planning.costs.gauges import Gauge
from gpipe_hpc.planning.cutting.partition import Partition
from gpipe_hpc.planning.cutting.uneven import cut_where
from gpipe_hpc.planning.forecast import held_bytes, lasting_bytes
from gpipe_hpc.planning.memory.by_rank import excess_bytes, memory_limits
from gpipe_hpc.planning.request import Request
from gpipe_hpc.planning.stages import StageCount, count_span
from gpipe_hpc.planning.tables import dressed
from gpipe_hpc.schedule import Schedule


def lacks_memory(request: Request, partition: Partition, table: Schedule, gauge: Gauge) -> bool:
    """Say whether some rank needs more than it may fill, in a table without R chosen by a budget.

    No, where layers cannot be counted.
    """
    limits = memory_limits(request)
    whole = dressed(table, request.recompute, request.offload)
    try:
        held = held_bytes(gauge.count, partition.counts, whole, request.kept_states)
    except GpipeError:
        return False
    return excess_bytes(held, limits) > 0


def roomier_cut(
    request: Request, partition: Partition, table: Schedule, gauge: Gauge
) -> Partition | None:
    """Return the fastest cut with which all ranks stay within their memory; None: there is none.

    Exact for what a `table` of this order holds, by dynamic programming: of all cuts that fit, one
    whose slowest stage is as fast as can be. With recompute ``budget`` each rank recomputes all,
    which is the least that it can do with. None also where this is not looked for: a cut by hand,
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
    recompute = "except_last" if request.recompute == "budget" else request.recompute
    rows = dressed(table, recompute, offload=False).ranks
    (route,) = placement.routes
    moments = [moments_of(rows[rank]) for rank in route]
    span = cache(partial(_span, model, request))

    def fits(stage: int, start: int, stop: int) -> bool:
        return span(start, stop).needs(moments[stage], stage) <= limits[route[stage]]

    paces = partition.paces or (1.0,) * placement.num_stages
    counts = cut_where(partition.costs, paces, fits)
    return None if counts is None else partition._replace(counts=tuple(counts))


class _Span:
    """Some layers as a stage: what they hold all the time, to run, and of a micro-batch."""

    def __init__(self, lasting: int, stage: StageCount) -> None:
        lives = stage.lives(stage.layers)
        self._lasting = lasting + stage.workspace_bytes
        self._whole = stage.activation_bytes
        self._kept, self._full = lives.kept, lives.full

    def needs(self, moments: Sequence[Moment], stage: int) -> int:
        """Return the bytes that a rank needs for them at its fullest."""
        return self._lasting + max(
            self._whole * each.whole[stage]
            + self._kept * each.kept[stage]
            + self._full * each.full[stage]
            for each in moments
        )


def _span(model: ModelCount, request: Request, start: int, stop: int) -> _Span:
    lasting = lasting_bytes(model, range(start, stop), request.kept_states)
    return _Span(lasting, count_span(model, start, stop))
