"""Any number of ranks: which runs become one table of rows with holes, and which schedules can."""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from gpipe_hpc.errors import ConfigError
from gpipe_hpc.schedule.families.rerouted import ORDERS
from gpipe_hpc.schedule.registry import canonical_schedule
from gpipe_hpc.schedule.table.placements import copies_in_rows
from gpipe_hpc.schedule.table.schedule import Placement

WITH_HOLES: Final = (*ORDERS, "rerouted", "auto")
"""The schedules by name that pipelines with holes can have."""


class Rows(NamedTuple):
    """One pipeline on all ranks, in rows of `stages`, the last of which has holes.

    `microbatches` are those of all rows; `schedule` with `options` makes the table.
    """

    ranks: int
    microbatches: int
    schedule: str
    options: dict[str, Any]


def replicas_on(ranks: int, stages: object, replicas: int | None) -> int:
    """Return the number of pipelines of a run on so many ranks, if none is given.

    As many as needed to use all ranks; the last may have holes. 1 if the number of stages is not
    known either.
    """
    if replicas is not None:
        return replicas
    return max(1, -(-ranks // stages)) if isinstance(stages, int) and stages > 0 else 1


def num_rows(ranks: int, stages: int | None, replicas: int) -> int | None:
    """Return the number of pipelines whose micro-batches run, if some ranks are missing.

    None if stages x replicas equals the ranks or cannot be made to. If one replica was requested,
    as many as needed to use all ranks.
    """
    if stages is None or stages < 1 or ranks in (stages * replicas, 0):
        return None
    if replicas == 1:
        return -(-ranks // stages) if ranks > stages and ranks % stages else None
    return replicas if stages <= ranks < stages * replicas else None


def in_rows(
    ranks: int,
    stages: int | None,
    replicas: int,
    microbatches: int,
    schedule: object,
    options: Mapping[str, Any],
) -> Rows | None:
    """Return how pipelines with holes run on so many ranks; None if there are no holes.

    Raises ConfigError for a schedule that cannot have holes.
    """
    rows = num_rows(ranks, stages, replicas)
    if rows is None or stages is None:
        return None
    return one_table(ranks, stages, rows * microbatches, schedule, options)


def one_table(
    ranks: int, stages: int, microbatches: int, schedule: object, options: Mapping[str, Any]
) -> Rows:
    """Return how all ranks run the micro-batches as one pipeline, in rows of `stages`.

    Raises ConfigError for a schedule that cannot have holes.
    """
    name = canonical_schedule(schedule) if isinstance(schedule, str) else "of your own"
    placement = options.get("placement", "rerouted")
    if name not in WITH_HOLES or (name == "auto" and placement != "rerouted"):
        got = f"auto with placement {placement!r}" if name == "auto" else f"schedule {name!r}"
        near = sorted({ranks // stages * stages, -(-ranks // stages) * stages} - {0})
        raise ConfigError(
            f"schedule: {ranks} ranks share {stages} stages in pipelines that have holes, expected "
            f"one of {', '.join(WITH_HOLES)} for it, got {got}; use one of them "
            f"(pipeline.schedule=zb_h1), or start {' or '.join(map(str, near))} ranks for whole "
            f"replicas"
        )
    if "stages" in options:
        raise ConfigError(
            f"schedule {name!r}: expected no option stages beside stages={stages}, got "
            f"{options['stages']}; leave it out"
        )
    made = {**options, "stages": stages}
    if name in ORDERS:
        made["order"] = name
    elif name == "auto":
        made["placement"] = "rerouted"
    return Rows(
        ranks,
        microbatches,
        "auto" if name == "auto" else "rerouted",
        made,
    )


def refuse_whole_replicas(ranks: int, stages: int, asked: Mapping[str, object]) -> None:
    """Raise ConfigError for settings that need whole replicas, by name."""
    for name, value in asked.items():
        if value:
            raise ConfigError(
                f"{name}: {ranks} ranks make pipelines of {stages} stages with holes, which run as "
                f"one, expected nothing that is of whole replicas, got {value}; leave it out, or "
                f"start a multiple of {stages} ranks"
            )


def rows_text(placement: Placement) -> str:
    """Return text on how many ranks hold each stage; empty without rows."""
    copies = copies_in_rows(placement)
    if copies is None:
        return ""
    stages_of: dict[int, list[int]] = {}
    for stage, number in enumerate(copies):
        stages_of.setdefault(number, []).append(stage)
    each = [
        f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))} on {number} "
        f"rank{'s' * (number > 1)}"
        for number, stages in sorted(stages_of.items(), reverse=True)
    ]
    held = f"{len(copies)} stage{'s' * (len(copies) > 1)}"
    return (
        f"{placement.num_ranks} ranks hold {held}: {'; '.join(each)}. All of them run the "
        f"{placement.num_microbatches} micro-batches of a step as one pipeline"
    )
