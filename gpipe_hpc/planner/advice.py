"""Find settings that would make a run's steps faster, by simulating them with measured times."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from gpipe_hpc.errors import GpipeError
from gpipe_hpc.models import Layer, stage_layers
from gpipe_hpc.planner.costs.cost_models import MEASURED, LayerTimes
from gpipe_hpc.planner.costs.counted import ModelCount
from gpipe_hpc.planner.cutting.partition import Partition
from gpipe_hpc.planner.forecast import forecast
from gpipe_hpc.planner.layout import Layout, lay_out
from gpipe_hpc.planner.memory.by_rank import excess_bytes
from gpipe_hpc.planner.ordering import is_simulated, shared_by
from gpipe_hpc.planner.request import Request
from gpipe_hpc.schedule import Op, Timeline, mean_costs, mean_forwards, num_stages, simulate
from gpipe_hpc.schedule.families.rerouted import ORDERS
from gpipe_hpc.schedule.table.placements import copies_in_rows

_LEAST_GAIN: Final = 0.02  # of the time in the pipeline; smaller gains are within run-to-run noise
MOST_ACTIONS: Final = 50_000  # larger tables get no advice: simulating them would take minutes
_SCHEDULES: Final[tuple[tuple[str, Mapping[str, Any]], ...]] = (
    ("gpipe", MappingProxyType({})),
    ("one_f_one_b", MappingProxyType({})),
    ("interleaved", MappingProxyType({"stages_per_rank": 2})),
    ("zb_h1", MappingProxyType({})),
    ("zb_h2", MappingProxyType({})),
    ("zb_v", MappingProxyType({})),
    ("dualpipe_v", MappingProxyType({})),
)
_SPLITTING: Final = frozenset({"zb_h1", "zb_h2", "zb_v", "dualpipe_v"})
"""Schedules that gain by splitting the backward and delaying weight gradients."""


class Advice(NamedTuple):
    """Settings as written on the command line, and the gain expected from them.

    Attributes:
      gain: share of the time in the pipeline that the settings save.
      more_bytes: additional planned memory of the fullest rank (negative: less); None if unknown.
      assumes: an assumption of the simulation that the user should know; empty if there is none.
      without: settings of the run that must be dropped.
    """

    settings: str
    gain: float
    more_bytes: int | None = None
    assumes: str = ""
    without: tuple[str, ...] = ()

    def text(self) -> str:
        """Return one line: ``pipeline.schedule=one_f_one_b: -7 % of the time in the pipeline``."""
        left_out = f" (without {', '.join(self.without)})" if self.without else ""
        return f"{self.settings}{left_out}: {-100 * self.gain:.0f} % of the time in the pipeline"


@dataclass(frozen=True)
class KnownCosts:
    """Layer costs that are already known, for example from a run; implements `CostModel`."""

    layers: Sequence[Layer]
    times: tuple[LayerTimes, ...]
    count: ModelCount
    measure: str = MEASURED


def advise(
    request: Request,
    layout: Layout,
    cost_model: KnownCosts,
    *,
    measured_s: float = 0.0,
    shares: Sequence[float] = (),
    limits: Sequence[float] | None = None,
    finer: int | None = None,
    most_actions: int = MOST_ACTIONS,
) -> list[Advice]:
    """Return settings that would make steps faster on the same ranks, the largest gain first.

    The candidates leave the training result unchanged: other schedules, another partition, no
    recomputation, more micro-batches (with a single rank: no recomputation only). Each is tried
    alone; candidates that make a rank exceed its memory limit are dropped. The layout of the run
    and the candidates are simulated with the model's times and free transfers.

    Args:
      cost_model: measured times of the layers.
      measured_s: measured time in the pipeline with transfers; gains are shares of it.
      shares: relative sizes of the micro-batches. Empty ones do not run; the model's times are the
        mean of the others.
      limits: bytes that each rank may use.
      finer: value of pipeline.microbatches that doubles their number; None if there are too few
        samples.
      most_actions: maximum number of actions of a simulated table (1000 actions take half a
        second).
    """
    if sum(map(len, layout.schedule.ranks)) > most_actions or request.recompute == "budget":
        return []
    present = tuple(float(share > 0) for share in shares)
    before = _SimulatedLayout.of(request, layout, cost_model, present)
    whole_s = max(measured_s, before.pipeline_s)
    found = []
    for settings, other, its_gauge, assumes in _others(request, layout, cost_model, finer):
        try:
            of_finer = other.microbatches != request.microbatches
            laid_out = lay_out(other, its_gauge)
            after = _SimulatedLayout.of(other, laid_out, its_gauge, () if of_finer else present)
        except GpipeError:
            continue  # impossible for these numbers of ranks, layers and micro-batches
        gain = (before.pipeline_s - after.pipeline_s) / whole_s if whole_s else 0.0
        if _is_by_hand(request) and len(laid_out.partition.counts) != len(layout.partition.counts):
            settings += f" {_cut_setting(laid_out.partition)}"
        more_bytes = None if assumes else max(after.held_bytes) - max(before.held_bytes)
        is_too_much = excess_bytes(after.held_bytes, limits) > 0
        if gain >= _LEAST_GAIN and not (is_too_much and more_bytes):
            left_out = _dropped_options(request, other)
            found.append(Advice(settings, gain, more_bytes, assumes, left_out))
    # At equal gain (to 1 %), the settings that need less memory come first.
    return sorted(found, key=lambda each: (-round(each.gain, 2), each.more_bytes or 0))


class _SimulatedLayout(NamedTuple):
    """Simulated time of a layout in seconds, and the planned bytes of memory of each rank."""

    pipeline_s: float
    held_bytes: list[int]

    @classmethod
    def of(
        cls, request: Request, layout: Layout, cost_model: KnownCosts, present: Sequence[float]
    ) -> "_SimulatedLayout":
        kept = layout.partition
        costs = Partition(
            kept.counts, (), MEASURED, cost_model.times, kept.paces, kept.rank_paces
        ).stage_costs(layout.recomputed)
        assert costs is not None, "the times are known"
        foreseen = forecast(
            cost_model.count,
            layout.partition.counts,
            layout.schedule,
            request.kept_states,
            layout.recomputed,
            present,
            layout.sharing,
        )
        held = [rank.total_bytes for rank in foreseen.ranks]
        costs = replace(costs, shares=present)
        return cls(simulate(layout.schedule, costs).makespan, held)


_Other = tuple[str, Request, KnownCosts, str]


def _others(
    request: Request, layout: Layout, cost_model: KnownCosts, finer: int | None
) -> Iterator[_Other]:
    """Yield each candidate: settings as text, the request, its layer costs, and what it assumes."""
    kept = layout.partition
    same_cut = replace(request, partition=kept)
    if any(action.op is Op.R for row in layout.schedule.ranks for action in row):
        yield "pipeline.recompute=never", replace(same_cut, recompute="never"), cost_model, ""
    if layout.schedule.num_ranks == 1:
        return
    took = tuple(each.forward + each.backward for each in cost_model.times)
    cut = kept._replace(
        counts=(), costs=took, measure=MEASURED, times=cost_model.times, is_open=False, made_on=""
    )
    recut = cut.cut_anew(len(kept.counts), shared_by(request))
    if is_simulated(request, kept):
        recut = _laid_out(
            replace(request, partition=recut._replace(is_open=True)), cost_model, recut
        )
    if recut.counts != kept.counts:
        yield _cut_setting(recut), replace(request, partition=recut), cost_model, ""
    # A partition given by the user is valid only for its own number of stages.
    own_cut = cut if _is_by_hand(request) else kept
    if copies_in_rows(layout.schedule.placement) is not None:
        yield from _other_orders(same_cut, cost_model)
        return
    for name, options in _SCHEDULES:
        if (name, dict(options)) == (layout.schedule.name, request.options):
            continue
        if request.compile and name in _SPLITTING:
            continue  # compiled layers compute weight and input gradients together
        words = [f"pipeline.schedule={name}"]
        words += [f"pipeline.options.{key}={value}" for key, value in options.items()]
        fits = num_stages(
            name, ranks=layout.schedule.num_ranks, microbatches=request.microbatches, **options
        ) == len(kept.counts)
        other = replace(
            request,
            partition=kept if fits else own_cut,
            schedule=name,
            schedule_options=dict(options),
        )
        yield " ".join(words), other, cost_model, ""
    if finer is None:
        return
    halves = tuple(LayerTimes(*(part / 2 for part in each)) for each in cost_model.times)
    yield (
        f"pipeline.microbatches={finer}",
        replace(same_cut, microbatches=2 * request.microbatches),
        replace(cost_model, times=halves),
        "that half a micro-batch takes half the time",
    )


def _other_orders(request: Request, cost_model: KnownCosts) -> Iterator[_Other]:
    """Yield candidates with another order of actions, for pipelines with partial replicas."""
    kept = {name: value for name, value in request.options.items() if name == "stages"}
    for order in ORDERS:
        if request.options.get("order") == order or (request.compile and order in _SPLITTING):
            continue
        asked = {**kept, "order": order}
        other = replace(request, schedule="rerouted", schedule_options=asked)
        yield f"pipeline.schedule={order}", other, cost_model, ""


def _dropped_options(request: Request, other: Request) -> tuple[str, ...]:
    """Return the options of the run's schedule that the other request does not accept."""
    if other.schedule == request.schedule or other.schedule == "rerouted":
        return ()
    return tuple(f"pipeline.options.{key}" for key in request.options if key not in other.options)


def _is_by_hand(request: Request) -> bool:
    """Return whether the user has set the number of layers of each stage."""
    return not isinstance(request.partition, str | Partition)


def _laid_out(request: Request, cost_model: KnownCosts, otherwise: Partition) -> Partition:
    """Return the partition that `lay_out` chooses for a request, or `otherwise` if it fails."""
    try:
        return lay_out(request, cost_model).partition
    except GpipeError:
        return otherwise


def _cut_setting(partition: Partition) -> str:
    return f"pipeline.partition=[{','.join(map(str, partition.counts))}]"


def layer_times(
    timeline: Timeline,
    counts: Sequence[int],
    basis: Sequence[LayerTimes],
    paces: Sequence[float] = (),
) -> tuple[LayerTimes, ...]:
    """Return the times of each layer in a measured step, scaled to the speed of rank 0.

    The time of each op of a stage is divided over its layers in proportion to `basis`, which may
    have any unit (measured times or FLOPs). `paces` are the slowdowns of the stages. The ratio of
    input to weight gradients of an unsplit backward comes from `basis`.
    """
    costs = mean_costs(timeline)
    measured = {op: costs.of_compute(op, timeline.num_stages) for op in (Op.B, Op.I, Op.W)}
    kept_took, bare_took = mean_forwards(timeline)
    times: list[LayerTimes] = []
    for stage, span in enumerate(stage_layers(counts)):
        own = [basis[layer] for layer in span]
        pace = paces[stage] if paces else 1.0
        took = {op: seconds[stage] / pace for op, seconds in measured.items()}
        kept_s, bare_s = _both_forwards(kept_took[stage], bare_took[stage], own)
        forward = _spread(kept_s / pace, [each.forward for each in own])
        bare = _spread(bare_s / pace, [each.bare_forward for each in own])
        backward = _spread(took[Op.B] or took[Op.I] + took[Op.W], [each.backward for each in own])
        for each, ahead, alone, back in zip(own, forward, bare, backward, strict=True):
            # Both were measured separately under varying load, so a half may exceed the whole.
            share = min(1.0, each.of_input / each.backward) if each.backward else 0.5
            times.append(LayerTimes(ahead, back, share * back, (1 - share) * back, alone))
    return tuple(times)


def _both_forwards(
    kept: float | None, bare: float | None, basis: Sequence[LayerTimes]
) -> tuple[float, float]:
    """Return a stage's forward times with and without an autograd graph.

    If only one of them was measured, the other is estimated by their ratio in `basis`.
    """
    with_graph, without = sum(each.forward for each in basis), sum(e.bare_forward for e in basis)
    ratio = without / with_graph if with_graph and without else 1.0
    if kept is None and bare is None:
        return 0.0, 0.0
    if kept is None:
        assert bare is not None, "kept and bare are not both None"
        return bare / ratio, bare
    return kept, kept * ratio if bare is None else bare


def _spread(total: float, weights: Sequence[float]) -> list[float]:
    """Divide a total in proportion to the weights, or evenly if all weights are 0."""
    whole = sum(weights)
    if not whole:
        return [total / len(weights) for _ in weights]
    return [total * weight / whole for weight in weights]
