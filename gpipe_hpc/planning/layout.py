"""Decide how a model is laid out: cut, table and recomputation."""

import hashlib
from dataclasses import dataclass, replace
from typing import Final

from gpipe_hpc.engine.stages.tables import Tables
from gpipe_hpc.errors import ConfigError, ScheduleError
from gpipe_hpc.models import find_skips, long_skips, skip_routes
from gpipe_hpc.planning.budget.fitting import Budget, choose_recompute
from gpipe_hpc.planning.gauges import Gauge
from gpipe_hpc.planning.partition import Partition, choose_partition
from gpipe_hpc.planning.request import Request
from gpipe_hpc.planning.tables import make_tables, recomputes, table_asked_for
from gpipe_hpc.planning.units import flops_text
from gpipe_hpc.schedule import Schedule, digest, num_stages, simulate


@dataclass(frozen=True)
class Layout:
    """All that is decided before a run: plain data, made once and sent to every rank.

    `partition` is the cut; placement, order of the work and what is offloaded stand in `tables`.
    `recomputed`: the layers of each stage that an ``R`` runs again, by their index; None for all.
    `replicas`: how many such pipelines run side by side. `searched` and `budget` say in words what
    was compared and chosen; they decide nothing.
    """

    partition: Partition
    tables: Tables
    recomputed: tuple[frozenset[int], ...] | None = None
    replicas: int = 1
    searched: str = ""
    budget: str = ""

    @property
    def schedule(self) -> Schedule:
        """Return the lowered table of a training step."""
        return self.tables.training

    def digest(self) -> str:
        """Return a hash of all that decides a run, the same in every process."""
        again = [sorted(layers) for layers in self.recomputed or ()]
        runs_all = self.recomputed is None
        decided = self.partition.counts, runs_all, again, self.replicas, *map(digest, self.tables)
        return hashlib.sha256(repr(decided).encode()).hexdigest()


def lay_out(request: Request, gauge: Gauge) -> Layout:
    """Lay out what is asked for, on `request.stages` ranks, by what a gauge says of the layers.

    The same request and the same figures give the same layout, whoever asks. Raises ConfigError,
    ModelError, PartitionError or ScheduleError for what cannot work.
    """
    partition, table, searched = _ordered(request, cut(request, gauge))
    budget, recompute = None, request.recompute
    if recompute == "budget":
        budget = _fit(request, partition, table, gauge)
        table, recompute = budget.schedule, "never"
    skips = long_skips(skip_routes(find_skips(gauge.layers), partition.counts))
    return Layout(
        partition,
        make_tables(table, recompute, skips, request.offload),
        budget.recomputed if budget else None,
        request.replicas,
        searched,
        budget.text if budget else "",
    )


def cut(request: Request, gauge: Gauge) -> Partition:
    """Make the cut of a layout, the only part for which a gauge may run layers.

    A request for that cut (`partition=`), or for the layout's own, gives the same layout. Raises
    what `lay_out` raises.
    """
    given = request.partition
    if _compares_placements(request) and isinstance(given, Partition) and given.times:
        return given  # of whichever placement was the best: its times are what counts
    return choose_partition(given, _num_stages(request), gauge)


def _compares_placements(request: Request) -> bool:
    return request.schedule == "auto" and request.options.get("placement") == "best"


def _num_stages(request: Request) -> int:
    if request.schedule != "auto":
        return _table(request).num_stages  # refuses what cannot be built before layers are run
    if _compares_placements(request):
        return _ranks(request)
    size = {"ranks": _ranks(request), "microbatches": request.microbatches}
    return num_stages("auto", **size, **request.options)


def _table(request: Request, **options: object) -> Schedule:
    return table_asked_for(
        request.schedule,
        ranks=_ranks(request),
        microbatches=request.microbatches,
        options={**options, **request.options},
    )


def _ranks(request: Request) -> int:
    assert request.stages is not None, "a layout is for a known number of ranks"
    return request.stages


def _ordered(request: Request, partition: Partition) -> tuple[Partition, Schedule, str]:
    """Return the cut, a table without communication, and what was compared to find them."""
    if request.schedule != "auto":
        return partition, _table(request), ""
    if _compares_placements(request):
        return _best_placement(request, partition)
    costs = {"costs": partition.stage_costs()} if partition.times else {}
    return partition, _table(request, **costs), ""


# What `placement=best` tries: a name of `auto`, and the stages of a rank.
_PLACEMENTS: Final = (("one_each", 1), ("wave", 2), ("looped", 2))
_WORTH_MORE_STAGES: Final = 0.99  # of the time with fewer


def _best_placement(request: Request, given: Partition) -> tuple[Partition, Schedule, str]:
    """Search an order on several placements for what layers take; return the fastest, simulated."""
    ranks = _ranks(request)
    if not given.times or "costs" in request.options:
        raise ConfigError(
            f"schedule 'auto': placement 'best' compares placements for measured layers, expected "
            f"partition 'time' and no costs, got {'costs' if given.times else 'another'}; correct "
            f"that, or choose a placement by name"
        )
    best: tuple[float, Partition, Schedule] | None = None
    lines: list[str] = []
    for placement, each in _PLACEMENTS:
        if each > 1 and ranks * each > len(given.costs):
            continue
        partition = given.cut_anew(ranks * each)
        table, took = _searched(request, partition, placement, each)
        amount = f"{took:.3f} s" if partition.is_measured else flops_text(took)
        lines.append(f"auto: {placement} with {each} stages a rank, {amount} a step")
        if best is None or took < best[0] * _WORTH_MORE_STAGES:
            best = took, partition, table
    assert best is not None, "one stage a rank is among them"
    return *best[1:], "\n".join(lines)


def _searched(
    request: Request, partition: Partition, placement: str, each: int
) -> tuple[Schedule, float]:
    """Return the order that `auto` finds on a placement, and how long it takes, simulated."""
    costs = partition.stage_costs()
    assert costs is not None, "the layers' times are known"
    options = {**request.options, "placement": placement, "stages_per_rank": each, "costs": costs}
    limit = options.get("limit")
    if limit is not None:  # in micro-batches of a rank's whole share, whatever its stages
        options["limit"] = [x * each for x in limit] if isinstance(limit, list) else limit * each
    table = _table(replace(request, schedule_options=options))
    return table, simulate(table, costs).makespan


def _fit(request: Request, partition: Partition, table: Schedule, gauge: Gauge) -> Budget:
    if table.is_lowered or recomputes(table):
        raise ScheduleError(
            f"schedule {table.name!r}: recompute 'budget' places recomputation itself, expected a "
            f"bare table without R, got one with it or a lowered one; leave its R out"
        )
    if not isinstance(request.memory_bytes, int | float):
        raise ConfigError(
            f"recompute: 'budget' fits layers into memory, expected memory_bytes, got "
            f"{request.memory_bytes}; give the bytes that a rank may fill"
        )
    return choose_recompute(
        gauge.count,
        partition.counts,
        table,
        request.memory_bytes,
        request.optimizer_states,
        [each.forward for each in partition.times] if partition.is_measured else (),
    )
