"""Layers and ranks that take longer than their likes, and what a step would take without that."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import median, median_low
from typing import Any, Final, NamedTuple

from gpipe_hpc.report.record import Record
from gpipe_hpc.schedule import Costs, Op, Timeline, mean_costs, schedule_of, simulate

_SLOW: Final = 1.3  # times as long as its likes, to be called slow
_MOST_SLOW: Final = 0.75  # of a rank's layers, for the rank to be what is slow


class Timed(NamedTuple):
    """A layer on a rank: what its forward took, and what it takes its likes; None without any."""

    rank: int
    layer: int
    took_s: float
    usual_s: float | None

    @property
    def is_slow(self) -> bool:
        """Say whether it takes clearly longer than its likes."""
        return self.usual_s is not None and self.took_s > _SLOW * self.usual_s


@dataclass(frozen=True)
class Slow:
    """What is slow: a rank (`layer` is None), or a layer wherever it runs.

    `factor`: how many times as long as its likes it takes. `forward_s`: of a micro-batch, what its
    forwards take more.
    """

    ranks: tuple[int, ...]
    layer: int | None
    factor: float
    forward_s: float


def timed_layers(record: Record) -> list[Timed]:
    """Return what each layer took on each rank, beside the low median of its likes.

    Alike are layers of as many parameters and FLOPs, and the same layer of other replicas. A layer
    of its kind alone has no likes.
    """
    kinds = {i: _kind(told) for i, told in enumerate(record.summary.get("layers") or ())}
    rows = [
        (each["rank"], each_layer["layer"], each_layer["forward_s"])
        for each in record.summary.get("ranks") or ()
        for each_layer in each.get("layers") or ()
    ]
    alike: dict[object, list[float]] = {}
    for _, index, took_s in rows:
        alike.setdefault(kinds.get(index, index), []).append(took_s)
    return [
        Timed(rank, index, took_s, median_low(own) if len(own) > 1 else None)
        for rank, index, took_s in rows
        for own in [alike[kinds.get(index, index)]]
    ]


def _kind(told: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what layers that cost the same have alike; those that count nothing also by name."""
    size = told["parameters"], told["forward_flops"], told["backward_flops"]
    return size if told["forward_flops"] else (*size, told["kind"])


def slow_ones(timed: Sequence[Timed]) -> list[Slow]:
    """Return slow ranks, and the slow layers of ranks that are not; what costs most first."""
    found: list[Slow] = []
    slow_ranks: set[int] = set()
    for rank in sorted({each.rank for each in timed}):
        known = [each for each in timed if each.rank == rank and each.usual_s is not None]
        num_slow = sum(each.is_slow for each in known)
        if len(known) > 1 and num_slow >= _MOST_SLOW * len(known):
            slow_ranks.add(rank)
            found.append(_slow((rank,), None, known))
    others = [each for each in timed if each.rank not in slow_ranks and each.is_slow]
    for index in sorted({each.layer for each in others}):
        own = [each for each in others if each.layer == index]
        ranks = tuple(sorted({each.rank for each in own}))
        found.append(_slow(ranks, index, own[:1]))
    return sorted(found, key=lambda each: -each.forward_s)


def _slow(ranks: tuple[int, ...], layer: int | None, known: Sequence[Timed]) -> Slow:
    took_s = sum(each.took_s for each in known)
    usual_s = sum(each.usual_s or 0.0 for each in known)
    factor = took_s / usual_s if usual_s else float("inf")
    return Slow(ranks, layer, factor, took_s - usual_s)


def without(record: Record, slow: Slow) -> float | None:
    """Return the share of the traced pipeline that goes when what is slow is as fast as others.

    Simulated with what the actions took, transfers free: in the layout that ran, once as it was and
    once with less on the stages concerned. What backwards take less is told by how backward and
    forward go together on the other stages. None without a trace.
    """
    if record.traced is None:
        return None
    counts = record.summary["layout"]["layers_of_stages"]
    before, after = [], []
    size = record.traced.replicas[0].num_ranks
    for number, timeline in enumerate(record.traced.replicas):
        schedule, costs = schedule_of(timeline), mean_costs(timeline)
        before.append(simulate(schedule, costs).makespan)
        own = {rank - number * size for rank in slow.ranks} & set(range(size))
        less = _with_less(timeline, costs, _excess(record, slow, own, number * size, counts))
        after.append(simulate(schedule, less).makespan)
    whole_s = max(record.traced.replicas, key=lambda each: each.makespan).makespan
    return (max(before) - max(after)) / whole_s if whole_s else None


def _excess(
    record: Record, slow: Slow, own: set[int], first: int, counts: Sequence[int]
) -> Mapping[int, float]:
    """Return by stage what forwards take too long on the slow ranks of one replica."""
    ends = list(accumulate(counts))
    excess: dict[int, float] = {}
    for each in timed_layers(record):
        is_meant = slow.layer is None or each.layer == slow.layer
        if each.rank - first in own and is_meant and each.is_slow and each.usual_s is not None:
            stage = next(s for s, end in enumerate(ends) if each.layer < end)
            excess[stage] = excess.get(stage, 0.0) + each.took_s - each.usual_s
    return excess


def _with_less(timeline: Timeline, costs: Costs, excess: Mapping[int, float]) -> Costs:
    """Return costs with so much less on some stages, on the way forward and back."""
    num = timeline.num_stages
    ops = (Op.F, Op.B, Op.I, Op.W, Op.R)
    took = {op: list(costs.of_compute(op, num)) for op in ops}
    forward, bare = (
        [max(0.0, each[s] - excess.get(s, 0.0)) for s in range(num)]
        for each in (took[Op.F], costs.of_bare_forward(num))
    )
    for op in (Op.B, Op.I, Op.W):
        ratios = [
            took[op][s] / forward[s] for s in range(num) if s not in excess and forward[s] > 0
        ]
        for stage in excess if ratios else ():
            usual_s = median(ratios) * forward[stage]
            if took[op][stage] > _SLOW * usual_s:
                took[op][stage] = usual_s
    again = [max(0.0, took[Op.R][s] - excess.get(s, 0.0)) for s in range(num)]
    return replace(
        costs,
        forward=forward,
        bare_forward=bare,
        backward=took[Op.B],
        input_gradient=took[Op.I],
        weight_gradient=took[Op.W],
        recompute=again,
    )
