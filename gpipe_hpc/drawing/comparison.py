"""A measured timeline beside its simulation."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from gpipe_hpc.drawing.colours import HUES
from gpipe_hpc.drawing.scene import clock_for
from gpipe_hpc.schedule.costs import Costs
from gpipe_hpc.schedule.table.actions import COMPUTE, Op
from gpipe_hpc.schedule.table.schedule import Placement, Schedule
from gpipe_hpc.schedule.timeline import Timeline


def schedule_of(timeline: Timeline) -> Schedule:
    """Return the bare table that a timeline ran.

    Micro-batches that never ran, being empty, and stages that did not run one of the others count
    as placed on the first way.
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


def mean_costs(timeline: Timeline) -> Costs:
    """Return what each op took on each stage, on average over micro-batches; transfers are free."""
    durations: dict[tuple[Op, int], list[float]] = defaultdict(list)
    for row in timeline.events:
        for event in row:
            if event.action.op in COMPUTE:
                durations[event.action.op, event.action.stage].append(event.duration_s)

    def of(op: Op) -> list[float]:
        """Return the means of an op by stage; 0 where a stage never ran it."""
        times = (durations.get((op, stage)) for stage in range(timeline.num_stages))
        return [fmean(time) if time else 0.0 for time in times]

    return Costs(
        forward=of(Op.F),
        backward=of(Op.B),
        input_gradient=of(Op.I),
        weight_gradient=of(Op.W),
        recompute=of(Op.R),
    )


class Spent(NamedTuple):
    """Where the time of all ranks went, for one kind of action."""

    actions: int = 0
    busy_s: float = 0.0
    idle_s: float = 0.0


def time_by_kind(timeline: Timeline) -> dict[str, Spent]:
    """Return by op the number of actions, the time they took, and that of ranks idle before them.

    ``end`` is the time ranks idle after their last action. All times sum to ranks x makespan.
    """
    spent: dict[str, Spent] = {op.value: Spent() for op in HUES}
    end_s = timeline.start_s + timeline.makespan
    idle_at_end_s = 0.0
    for row in timeline.events:
        free_at = timeline.start_s
        for event in row:
            if event.action.op in COMPUTE:
                actions, busy_s, idle_s = spent[event.action.op.value]
                waited_s = event.start_s - free_at
                spent[event.action.op.value] = Spent(
                    actions + 1, busy_s + event.duration_s, idle_s + waited_s
                )
                free_at = event.end_s
        idle_at_end_s += end_s - free_at
    return spent | {"end": Spent(0, 0.0, idle_at_end_s)}


def compare(measured: Timeline, planned: Timeline, unit: str = "s") -> list[list[str]]:
    """Return a table of text, a row for each kind of action: time of a rank, measured and planned.

    Times are means over ranks: computing, and idle before an action of the kind. They sum to the
    makespan, so the last column says which kind of action the difference between the two is at.
    """
    clock = clock_for(measured.makespan, unit)
    unit_of = f" ({clock.unit})" if clock.unit else ""
    head = ["mean of ranks" + unit_of, "actions", "busy: measured", "simulated"]
    head += ["idle before: measured", "simulated", "difference"]
    factor = clock.factor / max(1, measured.num_ranks)
    lines = [
        [name, f"{one.actions or ''}", *_numbers(one, other, factor)]
        for name, one, other in _pairs(time_by_kind(measured), time_by_kind(planned))
    ]
    return [head, *lines]


def _pairs(
    measured: Mapping[str, Spent], planned: Mapping[str, Spent]
) -> Iterator[tuple[str, Spent, Spent]]:
    """Yield name and both sides of each kind that ran, and of all together."""
    words = {op.value: f"{op.value} {hue.words}" for op, hue in HUES.items()}
    for kind, one in measured.items():
        if kind == "end" or one.actions or planned[kind].actions:
            yield words.get(kind, "after the last action"), one, planned[kind]
    yield "makespan", _total(list(measured.values())), _total(list(planned.values()))


def _total(parts: Sequence[Spent]) -> Spent:
    return Spent(*(sum(column) for column in zip(*parts, strict=True)))


def _numbers(measured: Spent, planned: Spent, factor: float) -> list[str]:
    more = (measured.busy_s + measured.idle_s - planned.busy_s - planned.idle_s) * factor
    times = (measured.busy_s, planned.busy_s, measured.idle_s, planned.idle_s)
    return [*(f"{time * factor:.4g}" for time in times), f"{more:+.4g}"]
