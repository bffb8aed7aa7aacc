"""Another look at the cut, once some steps have run: is there a better one for what layers took?"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

from gpipe_hpc.planning.advice import Known
from gpipe_hpc.planning.costs.gauges import MEASURED, LayerTimes
from gpipe_hpc.planning.cutting.partition import Partition
from gpipe_hpc.planning.layout import Layout, lay_out
from gpipe_hpc.planning.ordering import shared_by
from gpipe_hpc.planning.request import Request
from gpipe_hpc.schedule import simulate

LEAST_GAIN: Final = 0.1  # of the simulated step; less is within what steps differ by
MOST_ACTIONS: Final = 5_000  # of a table: all ranks wait while it is looked at


class Review(NamedTuple):
    """A better cut, and what speaks for it.

    `gain`: the share of the simulated step that it saves; `counted_gain`: what the cut by counted
    FLOPs would, less than 0 if it is slower. `layer`: the one whose share of the measured time is
    furthest above its share of the FLOPs, `times_counted` that many times.
    """

    counts: tuple[int, ...]
    gain: float
    counted_gain: float
    layer: int
    times_counted: float

    def text(self) -> str:
        """Return it as a warning: what was seen, the gain, and the settings to paste."""
        cut = ",".join(map(str, self.counts))
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

    `counted` are the same layers by FLOPs. Both cuts are simulated on the layout's table, with free
    transfers. Nothing is said of one rank alone, nor of tables that would take long.
    """
    kept, schedule = layout.partition, layout.schedule
    if schedule.num_ranks == 1 or schedule.num_actions > MOST_ACTIONS:
        return None
    took = [each.forward + each.backward for each in gauge.times]
    flops = [each.forward + each.backward for each in counted]
    if not sum(took) or not sum(flops):
        return None
    before_s = _step_s(request, kept.counts, kept, gauge)
    better = _cut(took, kept, request)
    gain = 1 - _step_s(request, better, kept, gauge) / before_s
    if better == kept.counts or gain < LEAST_GAIN:
        return None
    by_flops = _step_s(request, _cut(flops, kept, request), kept, gauge)
    layer, above = _most_above(took, flops)
    return Review(better, gain, 1 - by_flops / before_s, layer, above)


def _cut(costs: Sequence[float], kept: Partition, request: Request) -> tuple[int, ...]:
    own = Partition((), tuple(costs), MEASURED, (), kept.paces, kept.rank_paces)
    return own.cut_anew(len(kept.counts), shared_by(request)).counts


def _step_s(request: Request, counts: tuple[int, ...], kept: Partition, gauge: Known) -> float:
    """Return the simulated step of a cut."""
    cut = Partition(counts, (), MEASURED, gauge.times, kept.paces, kept.rank_paces)
    layout = lay_out(replace(request, partition=cut), gauge)
    costs = cut.stage_costs(layout.recomputed)
    assert costs is not None, "the times are known"
    return simulate(layout.schedule, costs).makespan


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
