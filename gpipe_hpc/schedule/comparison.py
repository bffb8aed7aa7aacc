"""Compare schedules in tables: step time, bubble, memory, weights and transfers."""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from gpipe_hpc.errors import ScheduleError
from gpipe_hpc.schedule.costs import Costs
from gpipe_hpc.schedule.passes.lowering import lower
from gpipe_hpc.schedule.registry import build
from gpipe_hpc.schedule.search.auto import AutoResult, place, search
from gpipe_hpc.schedule.simulator import simulate
from gpipe_hpc.schedule.table.actions import SENDS
from gpipe_hpc.schedule.table.placements import copies_in_rows

Variant = tuple[str, Mapping[str, Any]]

_PLAIN: Final[Mapping[str, Any]] = MappingProxyType({})
VARIANTS: Final[tuple[Variant, ...]] = (
    ("gpipe", _PLAIN),
    ("one_f_one_b", _PLAIN),
    ("looped_bfs", MappingProxyType({"stages_per_rank": 2})),
    ("interleaved", MappingProxyType({"stages_per_rank": 2})),
    ("interleaved", MappingProxyType({"stages_per_rank": 4})),
    ("zb_h1", _PLAIN),
    ("zb_h2", _PLAIN),
    ("zb_v", _PLAIN),
    ("v_half", _PLAIN),
    ("hanayo", MappingProxyType({"waves": 1})),
    ("hanayo", MappingProxyType({"waves": 2})),
    ("gems", _PLAIN),
    ("chimera", _PLAIN),
    ("chimera", MappingProxyType({"pipelines": 4})),
    ("chimera", MappingProxyType({"scaling": "forward_doubling"})),
    ("dualpipe", _PLAIN),
    ("dualpipe_v", _PLAIN),
    ("rerouted", MappingProxyType({"stages": 3})),
)


class ScheduleStats(NamedTuple):
    """Results of one schedule in a comparison of schedules.

    Attributes:
        makespan: simulated step time.
        bubble: idle share of the total time of all ranks.
        activations: largest number of micro-batches whose activations a rank keeps, in units of 1/K
            of the model on K ranks.
        weights: weights on the fullest rank, in units of 1/K of the model.
        transfers: number of sends per step.
        refusal: reason why the table could not be built, else None.
    """

    name: str
    options: Mapping[str, Any]
    makespan: float = 0.0
    bubble: float = 0.0
    activations: float = 0.0
    weights: float = 0.0
    transfers: int = 0
    refusal: str | None = None

    @property
    def label(self) -> str:
        """Return the schedule name with its options."""
        options = ", ".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.name} ({options})" if options else self.name


def compare(
    ranks: int,
    microbatches: int,
    *,
    forward: float = 1.0,
    input_gradient: float = 1.0,
    weight_gradient: float = 1.0,
    send: float = 0.0,
    variants: Iterable[Variant] = VARIANTS,
) -> list[ScheduleStats]:
    """Simulate several schedules of the same model and return the result of each.

    The arguments are the costs of each of `ranks` equal parts of the model. A schedule with v
    stages per rank divides the model into v * ranks stages, each with 1/v of the time and
    activations of a part. `send` is the time of one transfer, independent of the number of stages.
    """
    costs = Costs(
        forward=forward,
        input_gradient=input_gradient,
        weight_gradient=weight_gradient,
        send=send,
    )
    standings: list[ScheduleStats] = []
    for name, options in variants:
        try:
            bare = build(name, ranks=ranks, microbatches=microbatches, **options)
        except ScheduleError as error:
            standings.append(ScheduleStats(name, options, refusal=str(error)))
            continue
        placement = bare.placement
        copies = copies_in_rows(placement)
        timeline = simulate(bare, costs.recut(ranks, bare.num_stages, copies))
        shares: Sequence[float] = copies or [ranks / bare.num_stages] * bare.num_stages
        standings.append(
            ScheduleStats(
                name,
                options,
                makespan=timeline.makespan,
                bubble=timeline.bubble,
                activations=max(
                    peak * max((shares[stage] for stage in placement.stages_of(rank)), default=0)
                    for rank, peak in enumerate(timeline.peak_activations)
                ),
                weights=max(
                    sum(shares[stage] for stage in placement.stages_of(rank))
                    for rank in range(ranks)
                ),
                transfers=sum(a.op in SENDS for row in lower(bare).ranks for a in row),
            )
        )
    return standings


def comparison_table(standings: Sequence[ScheduleStats]) -> str:
    """Return results as a Markdown table, followed by the reasons why schedules are missing."""
    rows = [
        (
            each.label,
            f"{each.makespan:.4g}",
            f"{each.bubble:.1%}",
            f"{each.activations:g}",
            f"{each.weights:g}",
            str(each.transfers),
        )
        for each in standings
        if each.refusal is None
    ]
    heads = ("schedule", "step time", "bubble (of total)", "activations", "weights", "transfers")
    refusals = [f"Not in the table: {each.refusal}" for each in standings if each.refusal]
    return "\n".join([_markdown(heads, rows), *refusals])


class SearchGain(NamedTuple):
    """Result of a search for an action order, compared with the best named schedule.

    Both have the same placement.
    """

    placement: str
    limit: int | None
    found: AutoResult

    @property
    def gain(self) -> float | None:
        """Return the share of the best named schedule's time that is saved; None if none fits."""
        best = self.found.best_named_makespan
        return 1.0 - self.found.makespan / best if best else None


def search_gains(
    ranks: int,
    microbatches: int,
    stage_times: Sequence[float],
    *,
    send: float = 0.0,
    cases: Iterable[tuple[str, int | None]] = (
        ("one_each", None),
        ("looped", None),
        ("wave", None),
        ("mirrored", None),
    ),
) -> list[SearchGain]:
    """Search action orders for unequal stages, on several placements and with activation limits.

    `stage_times` is the time of F, of I and of W of each stage; the list repeats for further
    stages. `cases` lists (placement, limit) pairs.
    """
    gains: list[SearchGain] = []
    for kind, limit in cases:
        placement = place(kind, ranks, microbatches)
        repeated = [stage_times[at % len(stage_times)] for at in range(placement.num_stages)]
        costs = Costs(
            forward=repeated, input_gradient=repeated, weight_gradient=repeated, send=send
        )
        gains.append(SearchGain(kind, limit, search(placement, costs, limit=limit)))
    return gains


def gains_table(gains: Sequence[SearchGain]) -> str:
    """Return search results as a Markdown table."""
    heads = ("placement", "limit", "best by name", "its time", "auto", "gain", "above the bound")
    rows = [
        (
            each.placement,
            "none" if each.limit is None else str(each.limit),
            each.found.best_named or "none fits",
            f"{each.found.best_named_makespan:.4g}" if each.found.best_named else "",
            f"{each.found.makespan:.4g}",
            "" if each.gain is None else f"{each.gain:.1%}",
            f"{each.found.gap:.1%}",
        )
        for each in gains
    ]
    return _markdown(heads, rows)


def _markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with aligned columns; the first is left-aligned."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        first, *others = zip(cells, widths, strict=True)
        padded = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
        return f"| {' | '.join(padded)} |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([line(heads), f"| {' | '.join(rule)} |", *map(line, rows)])
