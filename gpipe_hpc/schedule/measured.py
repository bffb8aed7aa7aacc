"""Reconstruction of the table of a measured timeline, and of the costs of its model's stages."""

from collections import defaultdict
from dataclasses import replace
from statistics import fmean

from gpipe_hpc.schedule.costs import Costs
from gpipe_hpc.schedule.passes.recompute import add_recompute
from gpipe_hpc.schedule.table.actions import COMPUTE, Op
from gpipe_hpc.schedule.table.schedule import Placement, Schedule
from gpipe_hpc.schedule.timeline import Timeline


def schedule_of(timeline: Timeline) -> Schedule:
    """Return the compute-only table of which a timeline shows the execution.

    Empty micro-batches, and stages that did not run a micro-batch, are assigned to the first route.
    """
    ways: dict[int, dict[int, int]] = defaultdict(dict)
    for rank, row in enumerate(timeline.events):
        for event in row:
            op, stage, microbatch, _ = event.action
            if op in COMPUTE and microbatch is not None:
                ways[microbatch][stage] = rank
    first = ways[min(ways)] if ways else {}
    usual = {stage: first.get(stage, 0) for stage in range(timeline.num_stages)}
    numbers: dict[tuple[int, ...], int] = {}
    route_of: list[int] = []
    for microbatch in range(timeline.num_microbatches):
        way = usual | ways.get(microbatch, {})
        route = tuple(way[stage] for stage in range(timeline.num_stages))
        route_of.append(numbers.setdefault(route, len(numbers)))
    rows = tuple(
        tuple(event.action for event in row if event.action.op in COMPUTE)
        for row in timeline.events
    )
    return Schedule(
        timeline.name, Placement(tuple(numbers), tuple(route_of)), rows, skips=timeline.skips
    )


def mean_forwards(timeline: Timeline) -> tuple[list[float | None], list[float | None]]:
    """Return the mean forward time of each stage, with autograd graph and without.

    Forwards without graph belong to recomputed micro-batches. An entry is None if the stage ran no
    such forward.
    """
    again = {
        event.action[1:] for row in timeline.events for event in row if event.action.op is Op.R
    }
    kept: list[list[float]] = [[] for _ in range(timeline.num_stages)]
    bare: list[list[float]] = [[] for _ in range(timeline.num_stages)]
    for row in timeline.events:
        for event in row:
            if event.action.op is Op.F:
                own = bare if event.action[1:] in again else kept
                own[event.action.stage].append(event.duration_s)
    kept_means, bare_means = ([fmean(e) if e else None for e in each] for each in (kept, bare))
    return kept_means, bare_means


def mean_costs(timeline: Timeline) -> Costs:
    """Return the mean time of each op on each stage over micro-batches; transfers are free.

    If a stage ran only forwards with a graph, or only without, both kinds get the same cost.
    """
    durations: dict[tuple[Op, int], list[float]] = defaultdict(list)
    for row in timeline.events:
        for event in row:
            if event.action.op in COMPUTE:
                durations[event.action.op, event.action.stage].append(event.duration_s)
    kept, bare = mean_forwards(timeline)

    def of(op: Op) -> list[float]:
        """Return the mean time of an op on each stage; 0 if a stage never ran it."""
        times = (durations.get((op, stage)) for stage in range(timeline.num_stages))
        return [fmean(time) if time else 0.0 for time in times]

    return Costs(
        forward=[_first(*each) for each in zip(kept, bare, strict=True)],
        bare_forward=[_first(*each) for each in zip(bare, kept, strict=True)],
        backward=of(Op.B),
        input_gradient=of(Op.I),
        weight_gradient=of(Op.W),
        recompute=of(Op.R),
    )


def _first(*means: float | None) -> float:
    """Return the first mean that is not None, or 0."""
    return next((mean for mean in means if mean is not None), 0.0)


def costs_for_others(timeline: Timeline) -> Costs:
    """Return costs of all ops on the stages of a measured run, to simulate other schedules.

    Missing ops are derived: ``I`` and ``W`` are half of ``B`` each, ``B`` is the sum of both, and
    ``R`` costs a forward. Micro-batches that never ran are empty.
    """
    measured = mean_costs(timeline)
    forward, whole, inputs, weights, again = (
        measured.of_compute(op, timeline.num_stages) for op in (Op.F, Op.B, Op.I, Op.W, Op.R)
    )
    ran = {event.action.microbatch for row in timeline.events for event in row}
    present = [float(number in ran) for number in range(timeline.num_microbatches)]
    return replace(
        measured,
        backward=[b or i + w for b, i, w in zip(whole, inputs, weights, strict=True)],
        input_gradient=[i or b / 2 for b, i in zip(whole, inputs, strict=True)],
        weight_gradient=[w or b / 2 for b, w in zip(whole, weights, strict=True)],
        recompute=[r or f for f, r in zip(forward, again, strict=True)],
        shares=present,
    )


def recompute_of(timeline: Timeline) -> str:
    """Return the recomputation mode of a timeline: ``always``, ``except_last`` or ``never``."""
    ops = [event.action.op for row in timeline.events for event in row]
    if Op.R not in ops:
        return "never"
    bare = schedule_of(timeline)
    rows = tuple(tuple(action for action in row if action.op is not Op.R) for row in bare.ranks)
    everything = add_recompute(replace(bare, ranks=rows), "always")
    return "always" if everything.ranks == bare.ranks else "except_last"
