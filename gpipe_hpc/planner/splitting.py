"""Estimate the gain of split backwards for partial replicas whose schedule does not split them."""

from dataclasses import replace
from typing import Final

from gpipe_hpc.errors import GpipeError
from gpipe_hpc.planner.buckets import sharing_of
from gpipe_hpc.planner.costs.cost_models import CostModel
from gpipe_hpc.planner.forecast import peak_bytes_of_ranks
from gpipe_hpc.planner.layout import Layout, lay_out_compute
from gpipe_hpc.planner.memory.by_rank import excess_bytes, memory_limits
from gpipe_hpc.planner.ordering import OrderedCut
from gpipe_hpc.planner.request import Request
from gpipe_hpc.schedule import simulate

_SPLITTING: Final = "zb_h1"
_LEAST_GAIN: Final = 0.03  # of the simulated step
_MOST_ACTIONS: Final = 50_000  # larger tables are not simulated, because all ranks wait meanwhile


def gain_of_splitting(request: Request, layout: Layout, cost_model: CostModel) -> str:
    """Describe how much shorter a step would be with zb_h1; empty if the gain is small.

    Applies to partial replicas, whose ranks do not divide into whole pipelines. Both tables are
    simulated with the layout's partition and free communication. Empty also if layers are compiled
    (and cannot be split), if some rank would exceed its memory, and for large tables.
    """
    unsplit = request.schedule == "rerouted" and request.options.get("order") in (
        "gpipe",
        "one_f_one_b",
    )
    if not unsplit or request.compile or layout.schedule.num_actions > _MOST_ACTIONS:
        return ""
    asked = replace(
        request,
        partition=layout.partition,
        schedule_options={**request.options, "order": _SPLITTING},
    )
    try:
        found = lay_out_compute(asked, cost_model)
        if not _fits(asked, found, cost_model):
            return ""
    except GpipeError:  # no recomputation fits, or layers cannot be counted
        return ""
    again = found.budget.recomputed if found.budget else None
    before = simulate(layout.schedule, layout.partition.likely_costs(layout.recomputed)).makespan
    after = simulate(found.table, found.partition.likely_costs(again)).makespan
    gain = 1 - after / before if before else 0.0
    if gain < _LEAST_GAIN:
        return ""
    return (
        f"with pipeline.schedule={_SPLITTING} a step would be {100 * gain:.0f} % shorter "
        f"(simulated, with free communication)"
    )


def _fits(request: Request, found: OrderedCut, cost_model: CostModel) -> bool:
    limits = memory_limits(request)
    if limits is None:
        return True
    again = found.budget.recomputed if found.budget else None
    counts, table = found.partition.counts, found.table
    sharing = sharing_of(request, counts, table.placement, cost_model.layers)
    held = peak_bytes_of_ranks(cost_model.count, counts, table, request.kept_states, again, sharing)
    return not excess_bytes(held, limits)
