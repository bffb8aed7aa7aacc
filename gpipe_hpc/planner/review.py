"""Check after some steps whether another partition would be faster with the measured times."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

from gpipe_hpc.errors import PartitionError
from gpipe_hpc.models import stage_layers
from gpipe_hpc.planner.advice import KnownCosts
from gpipe_hpc.planner.costs.cost_models import MEASURED, LayerTimes
from gpipe_hpc.planner.cutting.partition import Partition
from gpipe_hpc.planner.forecast import rank_forecasts
from gpipe_hpc.planner.layout import Layout, lay_out
from gpipe_hpc.planner.memory.by_rank import excess_bytes, memory_limits
from gpipe_hpc.planner.ordering import is_simulated, shared_by
from gpipe_hpc.planner.request import Request
from gpipe_hpc.planner.stages import count_stages
from gpipe_hpc.schedule import simulate

LEAST_GAIN: Final = 0.1  # of the simulated step; smaller gains are within step-to-step noise
MOST_OFF: Final = 0.2  # of a stage's planned time; larger deviations are reported
MOST_ACTIONS: Final = 5_000  # larger tables are not reviewed, because all ranks wait meanwhile


class Review(NamedTuple):
    """A faster partition, and the reason for it.

    Attributes:
      gain: share of the simulated step time that the partition saves.
      counted_gain: the same for the partition by counted FLOPs; negative if slower, None if it does
        not fit.
      layer: the layer whose share of measured time exceeds its share of FLOPs most.
      times_counted: ratio of the two shares of that layer.
    """

    counts: tuple[int, ...]
    gain: float
    counted_gain: float | None
    layer: int
    times_counted: float

    def text(self) -> str:
        """Format as a warning: observation, gain, and the settings to copy."""
        cut = ",".join(map(str, self.counts))
        by_flops = "does not fit"
        if self.counted_gain is not None:
            by_flops = f"{100 * abs(self.counted_gain):.0f} % {_than(self.counted_gain)}"
        return (
            f"partition: layer times differ from those the cut was made for: layers.{self.layer} "
            f"takes {self.times_counted:.1f} times its share of the counted FLOPs. In simulation "
            f"with the measured times, a better cut makes a step {100 * self.gain:.0f} % shorter "
            f"(the cut by counted FLOPs: {by_flops}); start the next run with "
            f"pipeline.partition=[{cut}]"
        )


def _than(gain: float) -> str:
    return "shorter" if gain >= 0 else "longer"


def review(
    request: Request, layout: Layout, cost_model: KnownCosts, counted: Sequence[LayerTimes]
) -> Review | None:
    """Return a partition that is much faster than the current one by the given times, or None.

    Both are laid out as requested, within the memory limits, and simulated with free transfers.
    `counted` are the FLOPs of the same layers. Returns None for a single rank, for large tables,
    and for partitions that do not fit.
    """
    kept, schedule = layout.partition, layout.schedule
    if schedule.num_ranks == 1 or schedule.num_actions > MOST_ACTIONS:
        return None
    took = [each.forward + each.backward for each in cost_model.times]
    flops = [each.forward + each.backward for each in counted]
    if not sum(took) or not sum(flops):
        return None
    is_open = is_simulated(request, kept)
    better = _CutTrial.of(request, _cut(took, kept, request), kept, cost_model, is_open=is_open)
    if better is None or better.counts == kept.counts:
        return None
    before_s = _step_s(layout, kept._replace(times=cost_model.times))
    gain = 1 - better.step_s / before_s
    if gain < LEAST_GAIN:
        return None
    by_flops = _CutTrial.of(request, _cut(flops, kept, request), kept, cost_model)
    layer, above = _most_above(took, flops)
    counted_gain = None if by_flops is None else 1 - by_flops.step_s / before_s
    return Review(better.counts, gain, counted_gain, layer, above)


def _step_s(layout: Layout, cut: Partition) -> float:
    costs = cut.stage_costs(layout.recomputed)
    assert costs is not None, "the times are known"
    return simulate(layout.schedule, costs).makespan


def _cut(costs: Sequence[float], kept: Partition, request: Request) -> tuple[int, ...]:
    own = kept._replace(costs=tuple(costs), measure=MEASURED, times=())
    return own.cut_anew(len(kept.counts), shared_by(request)).counts


class _CutTrial(NamedTuple):
    """A partition as it was laid out, and its simulated step time."""

    counts: tuple[int, ...]
    step_s: float

    @classmethod
    def of(
        cls,
        request: Request,
        counts: tuple[int, ...],
        kept: Partition,
        cost_model: KnownCosts,
        *,
        is_open: bool = False,
    ) -> "_CutTrial | None":
        """Lay out a partition, or one that fits in memory if it does not; None if none fits.

        `is_open`: also allow a faster partition found by simulation.
        """
        costs = tuple(each.forward + each.backward for each in cost_model.times)
        asked = kept._replace(
            counts=counts,
            costs=costs,
            measure=MEASURED,
            times=cost_model.times,
            is_open=is_open,
            made_on="",
        )
        try:
            layout = lay_out(replace(request, partition=asked), cost_model)
        except PartitionError:
            return None
        cut = layout.partition
        ranks = rank_forecasts(
            cost_model.count,
            count_stages(cost_model.count, cut.counts),
            layout.schedule,
            request.kept_states,
            layout.recomputed,
            sharing=layout.sharing,
        )
        if excess_bytes([rank.total_bytes for rank in ranks], memory_limits(request)):
            return None
        return cls(cut.counts, _step_s(layout, cut))


def slow_stages_text(
    kept: Partition, took: Sequence[LayerTimes], counted: Sequence[LayerTimes]
) -> str:
    """Describe in one line the stages whose time deviates much from the plan; empty if none does.

    Stages are compared with the seconds for which the partition was made, or else with their share
    of FLOPs. Known slowdowns of ranks are taken into account.
    """
    planned = kept.times if kept.is_measured else counted
    pairs = [
        tuple(sum(each[i].forward + each[i].backward for i in span) for each in (took, planned))
        for span in stage_layers(kept.counts)
    ]
    whole, due = (sum(each) for each in zip(*pairs, strict=True))
    if not (whole and due):
        return ""
    unit = 1.0 if kept.is_measured else whole / due
    off = [
        f"stage {stage} {seconds:.3g} s, planned {unit * of_plan:.3g} s"
        for stage, (seconds, of_plan) in enumerate(pairs)
        if abs(seconds - unit * of_plan) > MOST_OFF * unit * of_plan
    ]
    if not off:
        return ""
    by = "timed for the cut" if kept.is_measured else "by shares of the counted FLOPs"
    return (
        f"stages: times of a micro-batch differ from the plan ({by}; forward and backward): "
        f"{'; '.join(off)}"
    )


def _most_above(took: Sequence[float], flops: Sequence[float]) -> tuple[int, float]:
    """Return the layer whose share of time exceeds its share of FLOPs most, and their ratio."""
    shares = [(own / sum(took), due / sum(flops)) for own, due in zip(took, flops, strict=True)]
    layer = max(range(len(shares)), key=lambda index: shares[index][0] - shares[index][1])
    own, due = shares[layer]
    return layer, own / max(due, 1 / (1000 * len(shares)))  # a lower limit for layers without FLOPs


def by_forwards(
    basis: Sequence[LayerTimes], forwards_s: Mapping[int, float], counts: Sequence[int]
) -> tuple[LayerTimes, ...]:
    """Return layer times that divide each stage's time by the observed forward times of its layers.

    Backwards scale with forwards as in `basis`. If some layer of a stage was not observed, the
    stage keeps the times of `basis`. Only the ratios within a stage are meaningful.
    """
    found = list(basis)
    ends = [0, *accumulate(counts)]
    for first, end in pairwise(ends):
        if any(layer not in forwards_s for layer in range(first, end)):
            continue
        for layer in range(first, end):
            each, seen = basis[layer], forwards_s[layer]
            factor = seen / each.forward if each.forward else 0.0
            parts = [seen, *(factor * part for part in each[1:])]
            if not each.forward:  # no FLOPs: assume that a backward takes twice its forward
                parts = [seen, 2 * seen, seen, seen, seen]
            found[layer] = LayerTimes(*parts)
    return tuple(found)
