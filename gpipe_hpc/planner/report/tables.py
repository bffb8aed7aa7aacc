"""Format a plan as text: layers, partition, ranks and step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from gpipe_hpc.models import Layer, skip_routes
from gpipe_hpc.planner.costs.counted import ModelCount
from gpipe_hpc.planner.costs.layer_trial import LayerCount
from gpipe_hpc.planner.cutting.cut_table import cut_table
from gpipe_hpc.planner.cutting.pins import Pins
from gpipe_hpc.planner.forecast import Forecast, RankForecast
from gpipe_hpc.planner.memory.by_rank import limits_text
from gpipe_hpc.planner.memory.shortage import shortage
from gpipe_hpc.planner.report.columns import aligned, fold_repeats
from gpipe_hpc.planner.stages import count_stages
from gpipe_hpc.planner.step_time import StepTime
from gpipe_hpc.schedule import Parallelism, Schedule
from gpipe_hpc.units import bytes_text, flops_text

_MAX_SKIPS: Final = 24  # lines of a table
_NOTES: Final = (
    "Counted, not measured: FLOPs of matrix products, convolutions and attention; activations "
    "saved by autograd; workspace: temporary memory of running layers (on cuda including cuBLAS), "
    "gradients in transit and one receive buffer. {beside}{process} Transfers take no time."
)
_NOTES_WITH_TIME: Final = (
    "Counted, not measured: activations saved by autograd; workspace: temporary memory of running "
    "layers (on cuda including cuBLAS), gradients in transit and one receive buffer. "
    "{beside}{process} The bubble is of counted FLOPs, without transfers. The step time uses "
    "plan.links, plan.prices and plan.calibration; anything they do not contain takes no time."
)

_UPDATE: Final = (
    "Update: temporary memory of the optimizer step; it replaces activations and workspace in the "
    "sum if it is larger, because they are not alive then. "
)
_SAVING: Final = (
    "Saving: host buffers for background checkpoints and for in-memory copies on other ranks. "
)
_OFFLOADED: Final = (
    "Offloaded: activations in pinned host memory, which torch may round up to powers of two. "
)
_NEIGHBOURS: Final = (
    "Neighbours: in-memory checkpoint files on the host, two each of this rank and of another "
    "rank (only two on a single host); not part of the sum. "
)
_NOT_COUNTED: Final = "Not counted: memory that kernels and libraries allocate themselves."
_PROCESS: Final = {
    False: "Process: host memory of a rank's process besides tensors",
    True: "Other: device memory besides torch's tensors; host memory is not counted",
}
_AS_SAID: Final = ", from plan.prices or plan.calibration."


@dataclass(frozen=True)
class Assumptions:
    """Assumptions behind the numbers of a plan.

    Attributes:
      flops_per_s: speed of a rank, None if unknown.
      limits: bytes that each rank may use, None if unlimited.
      recompute: the requested recomputation.
      can_cut: whether micro-batches have several samples.
      others: description of other settings, if the planned ones do not fit.
      step: simulated step time.
      measured: source of the layer times, empty if they are counted.
    """

    flops_per_s: float | None = None
    limits: Sequence[float] | None = None
    recompute: str = "except_last"
    can_cut: bool = True
    others: str = ""
    step: StepTime | None = None
    measured: str = ""

    def fit(self, ranks: Sequence[RankForecast]) -> list[bool]:
        """Return for each rank whether it stays within its memory limit."""
        if self.limits is None:
            return [True] * len(ranks)
        return [rank.total_bytes <= most for rank, most in zip(ranks, self.limits, strict=True)]


def layer_table(model: ModelCount) -> str:
    """Format the layers as a table; equal layers share a line, with the numbers of one."""
    rows = [["layers", "times", "layer", "parameters", *_FIGURES]]
    for start, period, times in fold_repeats(model.layers):
        last = start + period * times - 1
        for place in range(period):
            count = model.layers[start + place]
            span = f"{start}-{last}" if last > start else str(start)
            first = [span, f"{times} x" if times > 1 else ""] if place == 0 else ["", ""]
            rows.append([*first, count.name, f"{count.parameters:,}", *_figures(count)])
    if model.loss is not None:
        rows.append(["", "", model.loss.name, "0", *_figures(model.loss)])
    whole = count_stages(model, [len(model.layers)])[0]
    rows.append(
        [
            "all",
            "",
            f"{len(model.layers)}",
            f"{model.parameters:,}",
            flops_text(whole.forward_flops),
            flops_text(whole.backward_flops),
            bytes_text(whole.activation_bytes),
            "",
        ]
    )
    return aligned(rows, left={0, 2})


_FIGURES: Final = ("forward", "backward", "activations", "output")


def _figures(count: LayerCount) -> list[str]:
    return [
        flops_text(count.forward_flops),
        flops_text(count.backward_flops),
        bytes_text(count.activation_bytes),
        bytes_text(count.output_bytes),
    ]


def stage_table(
    layers: Sequence[Layer],
    model: ModelCount,
    counts: Sequence[int],
    schedule: Schedule,
    paces: Sequence[float] = (),
    pins: Pins = (),
) -> str:
    """Format the partition as a table: layers, ranks, parameters and FLOPs of each stage."""
    placement = schedule.placement
    return cut_table(
        layers,
        counts,
        holders=[placement.holders(stage) for stage in range(placement.num_stages)],
        costs=[float(count.flops) for count in model.layers],
        measure="FLOPs",
        paces=paces,
        pins=pins,
    )


def rank_table(ranks: Sequence[RankForecast], assumptions: Assumptions) -> str:
    """Format the peak memory and sent bytes of each rank as a table.

    Columns that are zero everywhere are omitted. With memory limits, a column shows whether ranks
    fit.
    """
    casts = any(rank.cast_bytes for rank in ranks)
    processes = any(rank.process_bytes for rank in ranks)
    process = "other" if any(rank.is_on_device for rank in ranks) else "process"
    updates = any(rank.update_bytes for rank in ranks)
    saves = any(rank.saving_bytes and not rank.is_on_device for rank in ranks)
    saves_apart = any(rank.saving_bytes and rank.is_on_device for rank in ranks)
    neighbours = any(rank.neighbour_bytes for rank in ranks)
    offloads = any(rank.offloaded_bytes and rank.is_on_device for rank in ranks)
    head = ["rank", "stages", "parameters", "weights", *["casts"] * casts, "gradients"]
    verdicts = _verdicts(ranks, assumptions)
    held = ["optimizer", "activations", "workspace", *["update"] * updates]
    held += [*["saving"] * saves, *[process] * processes, "sum"]
    beside = [*["offloaded to host"] * offloads, *["saving on host"] * saves_apart]
    beside += ["neighbours on host"] * neighbours
    rows = [[*head, *held, *beside, "sent a step", *verdicts[0]]]
    for index, rank in enumerate(ranks):
        parts = (
            rank.weight_bytes,
            *[rank.cast_bytes] * casts,
            rank.gradient_bytes,
            rank.optimizer_bytes,
            rank.activation_bytes,
            rank.workspace_bytes,
            *[rank.update_bytes] * updates,
            *[rank.saving_bytes] * saves,
            *[rank.process_bytes] * processes,
            rank.total_bytes,
            *[rank.offloaded_bytes] * offloads,
            *[rank.saving_bytes] * saves_apart,
            *[rank.neighbour_bytes] * neighbours,
            rank.sent_bytes,
        )
        stages = ",".join(map(str, rank.stages)) or "none"
        numbers = [str(index), stages, f"{rank.parameters:,}", *map(bytes_text, parts)]
        rows.append([*numbers, *verdicts[1 + index]])
    return aligned(rows, left={1})


def _verdicts(ranks: Sequence[RankForecast], assumptions: Assumptions) -> list[list[str]]:
    """Return a column that shows whether each rank fits, and the limits if they differ."""
    if assumptions.limits is None:
        return [[] for _ in range(1 + len(ranks))]
    rows = [["fits"], *([("NO", "yes")[fits]] for fits in assumptions.fit(ranks))]
    if len(set(assumptions.limits)) == 1:
        return rows
    own = ["limit", *map(bytes_text, assumptions.limits)]
    return [[limit, *row] for limit, row in zip(own, rows, strict=True)]


def step_text(found: Forecast, schedule: Schedule, assumptions: Assumptions) -> str:
    """Format bubble, time and FLOPs of a step as text."""
    timeline, num_ranks = found.timeline, schedule.num_ranks
    lines = [
        f"{schedule.name}, {schedule.num_microbatches} micro-batches"
        f"{f' ({found.num_empty} of them empty)' if found.num_empty else ''} on {num_ranks} ranks: "
        f"{flops_text(found.step_flops)} a step, including recomputation",
        f"expected bubble {100 * timeline.bubble:.1f} % (idle over total)",
    ]
    if found.step_flops:
        ideal = timeline.makespan * num_ranks / found.step_flops
        lines[1] += f": a step takes {ideal:.3f} times as long as without idle time"
        lines.append(_parallelism_text(found.parallelism))
    if assumptions.step is not None:
        lines.append(_seconds_text(assumptions.step, assumptions))
    elif assumptions.flops_per_s is not None:
        seconds = timeline.makespan / assumptions.flops_per_s
        rate = flops_text(assumptions.flops_per_s)
        lines.append(f"expected step time {seconds:.4g} s at {rate}/s a rank")
    if assumptions.limits is not None:
        lacking = shortage(
            found.ranks,
            assumptions.limits,
            recompute=assumptions.recompute,
            schedule=schedule.name,
            can_cut=assumptions.can_cut,
            others=assumptions.others,
        )
        fits = f"every rank fits, with {limits_text(assumptions.limits)} a rank"
        lines.append(f"memory: {lacking or fits}")
    return "\n".join(lines)


def _parallelism_text(found: Parallelism) -> str:
    """Format the work of a step, its depth (longest path) and their ratio, the parallelism."""
    return (
        f"work {flops_text(found.work)}, depth {flops_text(found.depth)} (longest chain of "
        f"dependent actions): average parallelism {found.average:.2f} (work over depth)"
    )


def _seconds_text(step: StepTime, assumptions: Assumptions) -> str:
    """Format the step time in seconds with its assumptions."""
    basis = assumptions.measured
    if not basis:
        rate = assumptions.flops_per_s
        basis = "counted layers" if rate is None else f"{flops_text(rate)}/s a rank"
    first, *rest = step.text().splitlines()
    return "\n".join([f"{first} at {basis}", *rest])


class Sections(NamedTuple):
    """Texts and settings from which the sections of a plan are written.

    Attributes:
      heading: title of the plan.
      cut_by: how the partition was chosen.
      searched: compared placements.
      recomputed: recomputation chosen by a memory budget.
      summed: gradient all-reduces over replicas.
      paces: slowdown of each stage if ranks differ.
      pins: layers pinned to stages.
      distance: additional work of the most loaded rank compared with the best partition.
    """

    heading: str
    cut_by: str
    searched: str = ""
    recomputed: str = ""
    summed: str = ""
    paces: tuple[float, ...] = ()
    pins: Pins = ()
    distance: str = ""


def plan_report(
    layers: Sequence[Layer],
    model: ModelCount,
    counts: Sequence[int],
    schedule: Schedule,
    found: Forecast,
    assumptions: Assumptions,
    sections: Sections,
) -> str:
    """Return the complete plan as text."""
    table = stage_table(layers, model, counts, schedule, sections.paces, sections.pins)
    cut = "\n".join(filter(None, [table, sections.distance]))
    parts = [
        sections.heading,
        f"Layers, for one micro-batch:\n{layer_table(model)}",
        f"Cut {sections.cut_by}:\n{cut}",
        skip_table(model, counts),
        sections.searched and f"Placements compared:\n{sections.searched}",
        sections.recomputed and f"Recomputed, to stay within memory:\n{sections.recomputed}",
        f"Ranks, at peak memory:\n{rank_table(found.ranks, assumptions)}",
        sections.summed and f"Replicas: {sections.summed}",
        step_text(found, schedule, assumptions),
        (_NOTES if assumptions.step is None else _NOTES_WITH_TIME).format(
            beside=_beside(found.ranks),
            process=_process_text(found.ranks),
        ),
    ]
    return "\n\n".join(filter(None, parts))


def _process_text(ranks: Sequence[RankForecast]) -> str:
    """Describe the memory of processes besides tensors, or state that it is not counted."""
    if not any(rank.process_bytes for rank in ranks):
        return _NOT_COUNTED
    return _PROCESS[any(rank.is_on_device for rank in ranks)] + _AS_SAID


def _beside(ranks: Sequence[RankForecast]) -> str:
    """Describe the optional columns that the rank table of this plan has."""
    notes = (
        (_UPDATE, any(rank.update_bytes for rank in ranks)),
        (_OFFLOADED, any(rank.offloaded_bytes and rank.is_on_device for rank in ranks)),
        (_SAVING, any(rank.saving_bytes for rank in ranks)),
        (_NEIGHBOURS, any(rank.neighbour_bytes for rank in ranks)),
    )
    return "".join(text for text, is_there in notes if is_there)


def skip_table(model: ModelCount, counts: Sequence[int]) -> str:
    """List the skip connections between different stages, with totals; empty if there are none."""
    if not model.skips:
        return ""
    routes = skip_routes(model.skips, counts)
    crossing = [(route, skip) for route, skips in routes.items() for skip in skips]
    within = len(model.skips) - len(crossing)
    straight = sum(destination > source + 1 for (source, destination), _ in crossing)
    title = (
        f"Skips, for one micro-batch: {len(model.skips)}, of which {within} within a stage, "
        f"{len(crossing) - straight} to the next stage, {straight} to later stages:"
    )
    rows = [["skip", "layers", "stages", "bytes"]]
    for (source, destination), skip in crossing[:_MAX_SKIPS]:
        nbytes = bytes_text(sum(model.carried(skip).tensors))
        layers, stages = f"{skip.source} to {skip.destination}", f"{source} to {destination}"
        rows.append([skip.name, layers, stages, nbytes])
    more = len(crossing) - _MAX_SKIPS
    lines = [title, aligned(rows, left={0})] if crossing else [title.rstrip(":")]
    return "\n".join([*lines, *([f"and {more} more"] if more > 0 else [])])
