"""Compare a measured timeline with its simulation."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from gpipe_hpc.schedule.table.actions import COMPUTE
from gpipe_hpc.schedule.timeline import Timeline
from gpipe_hpc.visualize.colours import HUES
from gpipe_hpc.visualize.scene import clock_for


class KindTime(NamedTuple):
    """Number and total time of one kind of action, and the idle time before it, over all ranks."""

    actions: int = 0
    busy_s: float = 0.0
    idle_s: float = 0.0


def time_by_kind(timeline: Timeline) -> dict[str, KindTime]:
    """Return count, busy time and preceding idle time of each op, summed over ranks.

    ``end`` is the idle time of ranks after their last action. All times sum to ranks x makespan.
    """
    spent: dict[str, KindTime] = {op.value: KindTime() for op in HUES}
    end_s = timeline.start_s + timeline.makespan
    idle_at_end_s = 0.0
    for row in timeline.events:
        free_at = timeline.start_s
        for event in row:
            if event.action.op in COMPUTE:
                actions, busy_s, idle_s = spent[event.action.op.value]
                waited_s = event.start_s - free_at
                spent[event.action.op.value] = KindTime(
                    actions + 1, busy_s + event.duration_s, idle_s + waited_s
                )
                free_at = event.end_s
        idle_at_end_s += end_s - free_at
    return spent | {"end": KindTime(0, 0.0, idle_at_end_s)}


def compare(measured: Timeline, planned: Timeline, unit: str = "s") -> list[list[str]]:
    """Return a table of strings that compares measured and simulated times for each kind of action.

    Times are means over ranks: busy time, and idle time before an action of the kind. The times sum
    to the makespan, so the last column shows which kind of action causes the difference.
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
    measured: Mapping[str, KindTime], planned: Mapping[str, KindTime]
) -> Iterator[tuple[str, KindTime, KindTime]]:
    """Yield (name, measured, simulated) for each kind of action that ran, and for the total."""
    words = {op.value: f"{op.value} {hue.words}" for op, hue in HUES.items()}
    for kind, one in measured.items():
        if kind == "end" or one.actions or planned[kind].actions:
            yield words.get(kind, "after the last action"), one, planned[kind]
    yield "makespan", _total(list(measured.values())), _total(list(planned.values()))


def _total(parts: Sequence[KindTime]) -> KindTime:
    return KindTime(*(sum(column) for column in zip(*parts, strict=True)))


def _numbers(measured: KindTime, planned: KindTime, factor: float) -> list[str]:
    more = (measured.busy_s + measured.idle_s - planned.busy_s - planned.idle_s) * factor
    times = (measured.busy_s, planned.busy_s, measured.idle_s, planned.idle_s)
    return [*(f"{time * factor:.4g}" for time in times), f"{more:+.4g}"]
