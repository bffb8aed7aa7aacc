"""Another look at the cut, once some steps have run: is there a better one for what layers took?"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

from gpipe_hpc.errors import PartitionError
from gpipe_hpc.models import stage_layers
from gpipe_hpc.planner.advice import Known
from gpipe_hpc.planner.costs.gauges import MEASURED, LayerTimes
from gpipe_hpc.planner.cutting.partition import Partition
from gpipe_hpc.planner.forecast import rank_forecasts
from gpipe_hpc.planner.layout import Layout, lay_out
from gpipe_hpc.planner.memory.by_rank import excess_bytes, memory_limits
from gpipe_hpc.planner.ordering import is_simulated, shared_by
from gpipe_hpc.planner.request import Request
from gpipe_hpc.planner.stages import count_stages
from gpipe_hpc.schedule import simulate

LEAST_GAIN: Final = 0.1  # of the simulated step; less is within what steps differ by
MOST_OFF: Final = 0.2  # of what was planned for a stage; more is told
MOST_ACTIONS: Final = 5_000  # of a table: all ranks wait while it is looked at


class Review(NamedTuple):
    """A better cut, and what speaks for it.

    `gain`: the share of the simulated step that it saves; `counted_gain`: what the cut by counted
    FLOPs would, less than 0 if it is slower, None if it does not fit. `layer`: the one whose share
    of the measured time is furthest above its share of the FLOPs, `times_counted` that many times.
    """

    counts: tuple[int, ...]
    gain: float
    counted_gain: float | None
    layer: int
    times_counted: float

    def text(self) -> str:
        """Return it as a warning: what was seen, the gain, and the settings to paste."""
        cut = ",".join(map(str, self.counts))
        by_flops = "does not fit"
        if self.counted_gain is not None:
            by_flops = f"{100 * abs(self.counted_gain):.0f} % {_than(self.counted_gain)}"
        return (
            f"partition: layers take other times than the cut was made for: layers.{self.layer} "
            f"{self.times_counted:.1f} times its share of the counted FLOPs. Expected of a better "
            f"cut, simulated for the measured times: a step {100 * self.gain:.0f} % shorter (the "
            f"cut by counted FLOPs: {by_flops}); start the next run with pipeline.partition=[{cut}]"
        )


def _than(gain: float) -> str:
    return "shorter" if gain >= 0 else "longer"


def review(
    request: Request, layout: Layout, gauge: Known, counted: Sequence[LayerTimes]
) -> Review | None:
    """Return a cut that is better for the gauge's times than the layout's; None if none is much.

    `counted` are the same layers by FLOPs. Both cuts are laid out as asked, within the memory where
    that is given, and simulated with free transfers. Nothing is said of a cut that does not fit,
    of one rank alone, nor of tables that would take long.
    """
    kept, schedule = layout.partition, layout.schedule
    if schedule.num_ranks == 1 or schedule.num_actions > MOST_ACTIONS:
        return None
    took = [each.forward + each.backward for each in gauge.times]
    flops = [each.forward + each.backward for each in counted]
    if not sum(took) or not sum(flops):
        return None
    is_open = is_simulated(request, kept)
    better = _Tried.of(request, _cut(took, kept, request), kept, gauge, is_open=is_open)
    if better is None or better.counts == kept.counts:
        return None
    before_s = _step_s(layout, kept._replace(times=gauge.times))
    gain = 1 - better.step_s / before_s
    if gain < LEAST_GAIN:
        return None
    by_flops = _Tried.of(request, _cut(flops, kept, request), kept, gauge)
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


class _Tried(NamedTuple):
    """A cut as it was laid out, and its simulated step."""

    counts: tuple[int, ...]
    step_s: float

    @classmethod
    def of(
        cls,
        request: Request,
        counts: tuple[int, ...],
        kept: Partition,
        gauge: Known,
        *,
        is_open: bool = False,
    ) -> "_Tried | None":
        """Lay out a cut, or where some rank lacks memory for it a roomier one; None: none fits.

        `is_open`: or a faster one that is found by simulating.
        """
        costs = tuple(each.forward + each.backward for each in gauge.times)
        asked = kept._replace(
            counts=counts,
            costs=costs,
            measure=MEASURED,
            times=gauge.times,
            is_open=is_open,
            made_on="",
        )
        try:
            layout = lay_out(replace(request, partition=asked), gauge)
        except PartitionError:
            return None
        cut = layout.partition
        ranks = rank_forecasts(
            gauge.count,
            count_stages(gauge.count, cut.counts),
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
    """Say in one line which stages took other times than planned; nothing where none did by much.

    Held against the seconds that the cut was made for; where it was made for none, against each
    stage's share of the FLOPs. Slow ranks take as long as the cut says they do.
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
    by = "as timed for the cut" if kept.is_measured else "by shares of the counted FLOPs"
    return (
        f"stages: a micro-batch took other times than planned ({by}; forward and backward): "
        f"{'; '.join(off)}"
    )


def _most_above(took: Sequence[float], flops: Sequence[float]) -> tuple[int, float]:
    """Return the layer that takes most time beyond its share of the FLOPs, and how many times."""
    shares = [(own / sum(took), due / sum(flops)) for own, due in zip(took, flops, strict=True)]
    layer = max(range(len(shares)), key=lambda index: shares[index][0] - shares[index][1])
    own, due = shares[layer]
    return layer, own / max(due, 1 / (1000 * len(shares)))  # of a layer without FLOPs: a floor


def by_forwards(
    basis: Sequence[LayerTimes], forwards_s: Mapping[int, float], counts: Sequence[int]
) -> tuple[LayerTimes, ...]:
    """Return how the time of each stage is shared by its layers, as their forwards were seen.

    Within a stage, forwards are as long as was seen, and backwards go with them as `basis` has it.
    A stage of which some layer was not seen stays as in the basis. Only what layers of one stage
    are to one another counts.
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
            if not each.forward:  # no FLOPs: a backward is taken to be twice its forward
                parts = [seen, 2 * seen, seen, seen, seen]
            found[layer] = LayerTimes(*parts)
    return tuple(found)
