"""Format a search result: what was compared, and the best layouts with settings to copy."""

from collections.abc import Iterable, Sequence
from typing import Final

from gpipe_hpc.planner.report.columns import aligned
from gpipe_hpc.planner.request import Request
from gpipe_hpc.planner.search.cache import SearchCache
from gpipe_hpc.planner.search.candidates import Space
from gpipe_hpc.planner.search.explanation import explain_slower
from gpipe_hpc.planner.search.machine import FREE
from gpipe_hpc.planner.search.ranking import Ranking
from gpipe_hpc.planner.search.trial import CandidateEvaluation
from gpipe_hpc.schedule import Link
from gpipe_hpc.units import bytes_text, flops_text

_NOTES: Final = (
    "Simulated, not measured: layers are {layers}, transfers and gradient all-reduces follow the "
    "links, {rest}. Memory is weights, gradients, optimizer, activations and workspace, {process}. "
    "Off best cut: additional work of the most loaded rank compared with the best cut for these "
    "ranks (<=: upper bound; there may be no better cut). With other micro-batch sizes, dropout "
    "draws other random numbers and BatchNorm sees other batches."
)
_HEAD: Final = (
    "",
    "step",
    "samples/s",
    "bubble",
    "fill, drain",
    "imbalance",
    "transfers",
    "reduction",
    "off best cut",
    "fullest rank",
    "slowest link",
)


def machine_text(cache: SearchCache, space: Space, measured: str = "") -> str:
    """Describe the assumed ranks and links, and the settings not tried because these are unknown.

    `measured`: how layers are measured; empty if their FLOPs are counted.
    """
    machine = cache.machine
    cluster = machine.cluster
    hosts = sorted(set(cluster.hosts))
    each = f"{hosts[0]}" if len(hosts) == 1 else f"{hosts[0]} to {hosts[-1]}"
    many = f"{len(cluster.hosts)} hosts of {each}" if len(cluster.hosts) > 1 else "one host"
    ranks = f"{cluster.num_ranks} ranks" if cluster.num_ranks > 1 else "1 rank"
    layers = measured or (
        f"{machine.rates.text()}; plus {machine.layer_s:.2g} s a layer and pass "
        f"(plan.flops_per_s, plan.memory_bytes_per_s, plan.layer_s)"
    )
    lines = [f"{ranks} on {many}, {layers}"]
    if machine.has_free_links:
        lines.append(
            "links: unknown, so transfers and gradient all-reduces take no time; set plan.links to "
            "a file, or plan.link_bytes_per_s"
        )
    else:
        within, between = _link_text(cluster.within), _link_text(cluster.between)
        lines.append(
            f"links: {within} within a host" + f", {between} between" * (len(cluster.hosts) > 1)
        )
    is_open = "offload" not in space.fixed
    if space.base.memory_bytes is None:
        offloaded = " or offloaded" * is_open
        lines.append(
            f"memory: no limit set (pipeline.memory_bytes), so nothing is recomputed{offloaded}"
        )
    elif is_open and True not in space.offloads:
        lines.append(
            "offload: not tried, because the bandwidth from accelerator to host is unknown; set "
            "plan.host_copy_bytes_per_s (a run with pipeline.layout=auto measures it)"
        )
    return "\n".join(lines)


def precisions_text(
    searched: Iterable[tuple[Space, SearchCache]], *, is_measured: bool = False
) -> str:
    """List the compared precisions, with the assumed rates if layers are not measured."""
    entries = [
        f"{s.precision}" + ("" if is_measured else f" {flops_text(g.machine.rates.products)}/s")
        for s, g in searched
    ]
    return f"precisions: {', '.join(entries)}; training results differ between them"


def _link_text(link: Link) -> str:
    if link == FREE:
        return "free"
    return f"{bytes_text(link.bandwidth)}/s and {1e6 * link.latency:.3g} us"


def counts_text(ranking: Ranking, num_ways: int) -> str:
    """Describe how many layouts were compared, and how certain it is that the first is best."""
    simulated = ranking.num_simulated
    parts = [f"{simulated} simulated"] if simulated else []
    if ranking.num_too_much:
        parts.append(f"{ranking.num_too_much} need too much memory")
    if ranking.num_refused:
        parts.append(f"{ranking.num_refused} cannot be built")
    if ranking.num_unpinned:
        parts.append(f"{ranking.num_unpinned} cannot satisfy pipeline.pins")
    if ranking.num_large:
        parts.append(f"{ranking.num_large} have too large a table")
    left = ranking.num_layouts - simulated - ranking.num_too_much
    left -= ranking.num_refused + ranking.num_large + ranking.num_unpinned
    if left > 0:
        parts.append(f"{left} excluded by their lower bound")
    on = "on cuts with even stages, " * ranking.is_of_even_cuts
    sure = f"; {on}no layout is faster than the first"
    if not ranking.trials:
        sure = ""
    elif ranking.distance > 0:
        sure = f"; {on}none can be more than {100 * ranking.distance:.1f} % faster than the first"
    times = f", each with {num_ways} ways to combine gradients" if num_ways > 1 else ""
    return f"{ranking.num_layouts:,} layouts{times}: {', '.join(parts)}{sure}"


def table_text(ranking: Ranking, base: Request, batch_size: int, most: int) -> str:
    """Format the best layouts: for each its figures, its settings, and why it is not first."""
    shown = distinct(ranking.trials, most)
    rows = [list(_HEAD)]
    rows += [[str(number), *_figures(trial, batch_size)] for number, trial in enumerate(shown, 1)]
    head, *lines = aligned(rows).splitlines()
    found = [head]
    for trial, line in zip(shown, lines, strict=True):
        found.append(line)
        found.append("   " + " ".join(trial.overrides(base)))
        if trial is not shown[0]:
            found.append(f"   {explain_slower(trial, shown[0])}")
    return "\n".join(found)


def notes_text(cache: SearchCache, layers: str, prices: str) -> str:
    """Describe the assumptions behind the figures of a search.

    `layers` is the source of layer times, `prices` the setting with the overheads of a step.
    """
    rest = "and the rest takes no time: reading data, the optimizer step, sharing of a device"
    if cache.machine.prices.measured is not None:
        rest = f"and step overheads are those of {prices}; reading data is free"
    is_known = cache.machine.prices.process_bytes > 0
    process = f"and the process's memory besides tensors (from {prices})"
    if not is_known:
        process = "without memory that kernels and libraries allocate themselves"
    lines = [_NOTES.format(layers=layers, rest=rest, process=process)]
    crowd = cache.machine.crowd
    return "\n".join(lines if crowd is None or not crowd.is_full else [*lines, f"{crowd}."])


def distinct(trials: Sequence[CandidateEvaluation], most: int) -> list[CandidateEvaluation]:
    """Return the first trials, with at most two schedules per shape.

    A shape consists of replicas, stages, micro-batches, recomputation and precision.
    """
    seen: dict[tuple[object, ...], int] = {}
    found: list[CandidateEvaluation] = []
    for trial in trials:
        each = trial.candidate.written
        key = each.replicas, each.stages, each.microbatches, each.recompute, each.precision
        seen[key] = seen.get(key, 0) + 1
        if seen[key] <= 2 and len(found) < most:
            found.append(trial)
    return found


def _figures(trial: CandidateEvaluation, batch_size: int) -> list[str]:
    causes = [f"{100 * share:.1f} %" for share in (trial.bubble, *trial.causes)]
    off = trial.cut_distance
    link = "-"
    if trial.load.nbytes:
        link = bytes_text(trial.load.nbytes) + (" between" if trial.load.is_between else " within")
    return [
        _seconds(trial.step_s),
        f"{batch_size / trial.step_s:,.4g}",
        *causes,
        "-" if off is None else off.cell(),
        f"{bytes_text(trial.nbytes)} (rank {trial.rank})",
        link,
    ]


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
