"""Build, lower and check the schedule tables for a request."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gpipe_hpc.data_parallel import Buckets
from gpipe_hpc.engine import Tables
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


def requested_table(
    schedule: str | Schedule, *, ranks: int, microbatches: int, options: Mapping[str, Any]
) -> Schedule:
    """Build the requested schedule for `ranks` ranks and one replica's micro-batches.

    A Schedule object is checked and returned; it may be lowered or not. Raises ScheduleError or
    ConfigError.
    """
    if isinstance(schedule, str):
        return build(schedule, ranks=ranks, microbatches=microbatches, **options)
    if not isinstance(schedule, Schedule):
        raise ScheduleError(
            f"schedule: expected a name ({', '.join(schedule_names())}) or a Schedule object, got "
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
    """Lower and check the tables for training and evaluation.

    Args:
      recompute: applies to a table without R that is not lowered.
      skips: pairs of stages that exchange skip connections.
      offload: applies to a table without OFFLOAD.
      buckets: gradient buckets of each stage, empty without replicas.
      shard: as in `Outer`; with ``flat``, parameters are gathered before a stage's first forward.
      is_apart: whether replicas train separately between synchronisations.

    Raises ScheduleError.
    """
    if table.is_lowered and table.skips != skips:
        raise ScheduleError(
            f"schedule {table.name!r}: a lowered table must have the transfers of the model's "
            f"skips: expected stages {_pairs(skips)}, got {_pairs(table.skips)}; pass the table "
            f"without communication"
        )
    table = with_recompute_and_offload(replace(table, skips=skips), recompute, offload)
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
    """Raise ScheduleError if a table's numbers of buckets differ from those of the model."""
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
                f"schedule {table.name!r}: has {op} of stage {stage} for {count} buckets, but "
                f"outer.bucket_bytes and outer.shard make {counts.get(stage, 0)}; pass the table "
                f"without communication, or write {stage}{op} once, without a number"
            )


def with_recompute_and_offload(table: Schedule, recompute: str, offload: bool) -> Schedule:
    """Add the requested recomputation and offloading to a schedule table that has none.

    The ranks then need the same memory as with the lowered table.
    """
    if not (table.is_lowered or recomputes(table)):
        table = add_recompute(table, recompute)
    if offload and not any(action.op is Op.OFFLOAD for row in table.ranks for action in row):
        table = add_offload(table)
    return table


def recomputes(table: Schedule) -> bool:
    """Return whether a schedule table contains recompute actions."""
    return any(action.op is Op.R for row in table.ranks for action in row)


def _pairs(skips: tuple[tuple[int, int], ...]) -> str:
    return ", ".join(f"{source} to {destination}" for source, destination in skips) or "none"
