"""From what a user asked for to the tables that are run."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gpipe_hpc.data_parallel import Buckets
from gpipe_hpc.engine.stages.tables import Tables
from gpipe_hpc.errors import ConfigError, ScheduleError
from gpipe_hpc.schedule import (
    Op,
    Schedule,
    add_offload,
    add_recompute,
    build,
    check,
    forward_only,
    lower,
    schedule_names,
    with_averages,
    without_reductions,
)
from gpipe_hpc.schedule.passes.gathers import add_gathers


def table_asked_for(
    schedule: str | Schedule, *, ranks: int, microbatches: int, options: Mapping[str, Any]
) -> Schedule:
    """Return a bare table for `ranks` ranks and one replica's micro-batches, or the one given.

    A Schedule that is given may be bare or lowered. Raises ScheduleError or ConfigError.
    """
    if isinstance(schedule, str):
        return build(schedule, ranks=ranks, microbatches=microbatches, **options)
    if not isinstance(schedule, Schedule):
        raise ScheduleError(
            f"schedule: expected a name ({', '.join(schedule_names())}) or a Schedule, got "
            f"{type(schedule).__name__}"
        )
    if (schedule.num_ranks, schedule.num_microbatches) != (ranks, microbatches):
        raise ConfigError(
            f"schedule {schedule.name!r}: expected a table of {ranks} ranks and {microbatches} "
            f"micro-batches, got {schedule.num_ranks} and {schedule.num_microbatches}; change "
            f"stages and microbatches, or the table"
        )
    return schedule


def make_tables(
    table: Schedule,
    recompute: str,
    skips: tuple[tuple[int, int], ...] = (),
    offload: bool = False,
    buckets: tuple[Buckets, ...] = (),
    *,
    shard: str = "none",
    is_apart: bool = False,
) -> Tables:
    """Lower and check the tables that a bare or lowered one asks for.

    `recompute` applies to a bare one without R, `offload` to a bare one without OFFLOAD. `skips`:
    the pairs of stages between which the model's skips go. `buckets`: those of each stage, empty if
    none has another copy. `shard`: as in `Outer`; with ``flat`` parameters are gathered ahead of
    a stage's first forward. `is_apart`: replicas train by themselves. Raises ScheduleError.
    """
    if table.is_lowered and table.skips != skips:
        raise ScheduleError(
            f"schedule {table.name!r}: a lowered table has its transfers, expected those of the "
            f"skips between stages {_pairs(skips)}, got {_pairs(table.skips)}; give the bare table"
        )
    table = dressed(replace(table, skips=skips), recompute, offload)
    counts = {stage: len(each) for stage, each in enumerate(buckets) if each}
    gathered = counts if shard == "flat" else {}
    training = add_gathers(table if table.is_lowered else lower(table, counts), gathered)
    check(training)
    _check_buckets(training, Op.REDUCE_GRAD, counts)
    _check_buckets(training, Op.UNSHARD, gathered)
    evaluation = add_gathers(lower(forward_only(table)), gathered)
    check(evaluation)
    if not is_apart:
        return Tables(training, evaluation, buckets)
    alone, averaging = without_reductions(training), with_averages(training)
    for each in (alone, averaging):
        check(each, is_apart=True)
    return Tables(alone, evaluation, buckets, averaging)


def _check_buckets(table: Schedule, op: Op, counts: Mapping[int, int]) -> None:
    """Refuse a lowered table that has other buckets than the model's stages."""
    found = Counter(
        action.stage
        for rank, row in enumerate(table.ranks)
        for action in row
        if action.op is op
        and action.bucket is not None
        and rank == table.placement.holders(action.stage)[0]
    )
    for stage, count in sorted(found.items()):
        if count != counts.get(stage, 0):
            raise ScheduleError(
                f"schedule {table.name!r}: has {op} of stage {stage} for {count} buckets, expected "
                f"the {counts.get(stage, 0)} that outer.bucket_bytes and outer.shard ask for; give "
                f"the bare table, or write {stage}{op} once, without a number"
            )


def dressed(table: Schedule, recompute: str, offload: bool) -> Schedule:
    """Return a table with the recomputation and the copies to the host that it lacks.

    What a rank of it holds is what a rank of the lowered table holds.
    """
    if not (table.is_lowered or recomputes(table)):
        table = add_recompute(table, recompute)
    if offload and not any(action.op is Op.OFFLOAD for row in table.ranks for action in row):
        table = add_offload(table)
    return table


def recomputes(table: Schedule) -> bool:
    """Say whether a table places recomputation."""
    return any(action.op is Op.R for row in table.ranks for action in row)


def _pairs(skips: tuple[tuple[int, int], ...]) -> str:
    return ", ".join(f"{source} to {destination}" for source, destination in skips) or "none"
