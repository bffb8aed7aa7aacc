"""Find layers and ranks that are slower than similar ones, and the time that they cost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import median, median_low
from typing import Any, Final, NamedTuple

from gpipe_hpc.report.record import Record
from gpipe_hpc.schedule import Costs, Op, Timeline, mean_costs, schedule_of, simulate

_SLOW: Final = 1.3  # minimum ratio to similar layers for a layer to count as slow
_MOST_SLOW: Final = 0.75  # minimum share of slow layers for the rank itself to count as slow


class TimedLayer(NamedTuple):
    """Measured forward time of a layer on a rank, and that of similar layers (None without any)."""

    rank: int
    layer: int
    took_s: float
    usual_s: float | None

    @property
    def is_slow(self) -> bool:
        """Return whether the layer is clearly slower than similar layers."""
        return self.usual_s is not None and self.took_s > _SLOW * self.usual_s


@dataclass(frozen=True)
class SlowPart:
    """A slow rank (`layer` is None), or a layer that is slow on some ranks.

    Attributes:
      factor: ratio of the measured time to that of similar layers.
      forward_s: additional seconds of the forwards per micro-batch.
    """

    ranks: tuple[int, ...]
    layer: int | None
    factor: float
    forward_s: float


def timed_layers(record: Record) -> list[TimedLayer]:
    """Return the time of each layer on each rank, with the low median of similar layers.

    Layers are similar if they have equal parameters and FLOPs, or are the same layer in another
    replica.
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
        TimedLayer(rank, index, took_s, median_low(own) if len(own) > 1 else None)
        for rank, index, took_s in rows
        for own in [alike[kinds.get(index, index)]]
    ]


def _kind(told: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return a key that is equal for similar layers; layers without FLOPs also compare by name."""
    size = told["parameters"], told["forward_flops"], told["backward_flops"]
    return size if told["forward_flops"] else (*size, told["kind"])


def slow_parts(timed: Sequence[TimedLayer]) -> list[SlowPart]:
    """Return slow ranks, and layers that are slow on other ranks, the most expensive first."""
    found: list[SlowPart] = []
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


def _slow(ranks: tuple[int, ...], layer: int | None, known: Sequence[TimedLayer]) -> SlowPart:
    took_s = sum(each.took_s for each in known)
    usual_s = sum(each.usual_s or 0.0 for each in known)
    factor = took_s / usual_s if usual_s else float("inf")
    return SlowPart(ranks, layer, factor, took_s - usual_s)


def without(record: Record, slow: SlowPart) -> float | None:
    """Return the share of the traced pipeline time that `slow` costs; None without a trace.

    The step is simulated with measured times and free transfers, as measured and with normal times
    on the affected stages. Their backward is reduced to the ratio of backward to forward on other
    stages.
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
    record: Record, slow: SlowPart, own: set[int], first: int, counts: Sequence[int]
) -> Mapping[int, float]:
    """Return, by stage, the additional forward seconds of slow layers on a replica's ranks."""
    ends = list(accumulate(counts))
    excess: dict[int, float] = {}
    for each in timed_layers(record):
        is_meant = slow.layer is None or each.layer == slow.layer
        if each.rank - first in own and is_meant and each.is_slow and each.usual_s is not None:
            stage = next(s for s, end in enumerate(ends) if each.layer < end)
            excess[stage] = excess.get(stage, 0.0) + each.took_s - each.usual_s
    return excess


def _with_less(timeline: Timeline, costs: Costs, excess: Mapping[int, float]) -> Costs:
    """Return costs with `excess` seconds less on some stages, in forward and backward."""
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
