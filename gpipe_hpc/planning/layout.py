"""Decide how a model is laid out: cut, table and recomputation, the same on every rank."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from gpipe_hpc.comm.group import broadcast_object
from gpipe_hpc.comm.nests import Nest
from gpipe_hpc.engine.loss import LossFunction
from gpipe_hpc.engine.precision import casting
from gpipe_hpc.engine.steps import Site
from gpipe_hpc.engine.tables import Tables, make_tables, table_asked_for
from gpipe_hpc.errors import ConfigError, ScheduleError
from gpipe_hpc.models import Layer, find_skips, long_skips, skip_routes
from gpipe_hpc.planning.budget import Budget, fit_recompute
from gpipe_hpc.planning.choice import Example, Partition, choose_partition
from gpipe_hpc.planning.optimizer import OptimizerMemory
from gpipe_hpc.planning.partition import minimax
from gpipe_hpc.schedule import Op, Schedule, build, simulate

log = logging.getLogger("gpipe_hpc.pipeline")


@dataclass(frozen=True)
class Wishes:
    """What a user asked for; see `Pipeline`."""

    loss_fn: LossFunction
    microbatches: int
    schedule: str | Schedule
    options: Mapping[str, Any] = field(default_factory=dict)
    recompute: str = "except_last"
    memory_bytes: float | None = None
    optimizer_states: int | OptimizerMemory = 2
    offload: bool = False
    partition: str | Sequence[int] | Partition = "parameters"
    example: tuple[Nest, Nest] | None = None
    precision: str = "float32"
    seed: int = 0


class Layout(NamedTuple):
    """What was decided; `recomputed`: the layers that each stage recomputes, None for all."""

    partition: Partition
    tables: Tables
    recomputed: tuple[frozenset[int], ...] | None


def lay_out(layers: Sequence[Layer], wishes: Wishes, site: Site) -> Layout:
    """Decide on rank 0, which alone measures and needs an example, what all ranks then have.

    Raises ConfigError, ModelError, PartitionError or ScheduleError for what cannot work.
    """
    partition, table = _cut_and_order(layers, wishes, site)
    recomputed, mode = None, wishes.recompute
    if mode == "budget":
        fitted = _fit(layers, wishes, partition, table, site) if site.world.rank == 0 else None
        budget: Budget = broadcast_object(site.everybody, fitted, root=0)
        recomputed, table, mode = budget.recomputed, budget.schedule, "never"
    skips = long_skips(skip_routes(find_skips(layers), partition.counts))
    return Layout(partition, make_tables(table, mode, skips, wishes.offload), recomputed)


def _cut_and_order(
    layers: Sequence[Layer], wishes: Wishes, site: Site
) -> tuple[Partition, Schedule]:
    ranks, leads = site.mesh.stages, site.world.rank == 0
    if wishes.schedule == "auto" and wishes.options.get("placement") == "best":
        found = _best_placement(layers, wishes, site) if leads else None
        best: tuple[Partition, Schedule] = broadcast_object(site.everybody, found, root=0)
        return best

    def asked(options: Mapping[str, Any]) -> Schedule:
        return table_asked_for(
            wishes.schedule, ranks=ranks, microbatches=wishes.microbatches, options=options
        )

    table = asked(wishes.options)
    chosen = _cut(layers, wishes, table.num_stages, site) if leads else None
    partition: Partition = broadcast_object(site.everybody, chosen, root=0)
    measured = partition.stage_costs()
    if wishes.schedule == "auto" and "costs" not in wishes.options and measured is not None:
        table = asked({**wishes.options, "costs": measured})
    return partition, table


# What `placement=best` tries: a name of `auto`, and the stages of a rank.
_PLACEMENTS: Final = (("one_each", 1), ("wave", 2), ("looped", 2))
_WORTH_MORE_STAGES: Final = 0.99  # of the time with fewer


def _best_placement(
    layers: Sequence[Layer], wishes: Wishes, site: Site
) -> tuple[Partition, Schedule]:
    """Search an order on several placements, for measured layers; return the fastest, simulated."""
    ranks = site.mesh.stages
    given = wishes.partition
    if not (isinstance(given, Partition) and given.seconds):
        given = _cut(layers, wishes, ranks, site)
    measured = given
    if not measured.seconds:
        raise ConfigError(
            "schedule 'auto': placement 'best' compares placements for measured layers, expected "
            "partition 'time', got another; choose it, or a placement by name"
        )
    best: tuple[float, Partition, Schedule] | None = None
    for placement, each in _PLACEMENTS:
        if ranks * each > len(layers):
            continue
        partition = measured._replace(counts=tuple(minimax(measured.costs, ranks * each)))
        costs = partition.stage_costs()
        assert costs is not None, "the layers were measured"
        options = {**wishes.options, "placement": placement, "stages_per_rank": each}
        limit = options.get("limit")
        if limit is not None:  # in micro-batches of a rank's whole share, whatever its stages
            options["limit"] = (
                [x * each for x in limit] if isinstance(limit, list) else limit * each
            )
        table = build("auto", ranks=ranks, microbatches=wishes.microbatches, costs=costs, **options)
        seconds = simulate(table, costs).makespan
        log.info("auto: %s with %d stages a rank, %.3f s a step", placement, each, seconds)
        if best is None or seconds < best[0] * _WORTH_MORE_STAGES:
            best = seconds, partition, table
    assert best is not None, "one stage a rank is among them"
    return best[1:]


def _example(wishes: Wishes, site: Site) -> Example | None:
    given = wishes.example
    return given and Example(*given, wishes.loss_fn, wishes.seed, site.world.device)


def _cut(layers: Sequence[Layer], wishes: Wishes, num_stages: int, site: Site) -> Partition:
    with casting(wishes.precision, site.world.device):
        return choose_partition(
            wishes.partition, layers, num_stages, lambda: _example(wishes, site)
        )


def _fit(
    layers: Sequence[Layer], wishes: Wishes, partition: Partition, table: Schedule, site: Site
) -> Budget:
    if table.is_lowered or any(action.op is Op.R for row in table.ranks for action in row):
        raise ScheduleError(
            f"schedule {table.name!r}: recompute 'budget' places recomputation itself, expected a "
            f"bare table without R, got one with it or a lowered one; leave its R out"
        )
    example = _example(wishes, site)
    if example is None or wishes.memory_bytes is None:
        raise ConfigError(
            f"recompute: 'budget' counts layers on one micro-batch and fits them into memory, "
            f"expected example=(inputs, targets) and memory_bytes, got "
            f"{'no' if example is None else 'an'} example and memory_bytes="
            f"{wishes.memory_bytes}; pass both"
        )
    budget = fit_recompute(
        layers,
        partition,
        table,
        example,
        limit_bytes=wishes.memory_bytes,
        optimizer_states=wishes.optimizer_states,
        precision=wishes.precision,
        shares_casts=not wishes.offload,
    )
    log.info("%s", budget.text)
    return budget
