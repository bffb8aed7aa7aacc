"""Partial replicas: runs whose number of ranks is not a multiple of the number of stages."""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from gpipe_hpc.errors import ConfigError
from gpipe_hpc.schedule.families.rerouted import ORDERS
from gpipe_hpc.schedule.registry import canonical_schedule
from gpipe_hpc.schedule.table.placements import copies_in_rows
from gpipe_hpc.schedule.table.schedule import Placement

WITH_HOLES: Final = (*ORDERS, "rerouted", "auto")
"""Names of the schedules that support partial replicas."""


class PartialReplicas(NamedTuple):
    """How to build the one table for all ranks if some replicas of `stages` ranks lack ranks.

    `microbatches` counts the micro-batches of all replicas; `schedule` and `options` are arguments
    of `build`.
    """

    ranks: int
    microbatches: int
    schedule: str
    options: dict[str, Any]


def replicas_on(ranks: int, stages: object, replicas: int | None) -> int:
    """Return the number of replicas of a run; by default the number that uses all ranks.

    The last replica may lack ranks. Returns 1 if neither `replicas` nor the number of stages is
    known.
    """
    if replicas is not None:
        return replicas
    return max(1, -(-ranks // stages)) if isinstance(stages, int) and stages > 0 else 1


def num_rows(ranks: int, stages: int | None, replicas: int) -> int | None:
    """Return the number of partial replicas of a run, or None if all replicas are complete.

    `replicas` is the number of replicas that was requested; 1 stands for the number that uses all
    ranks. Also None if the ranks are too few or too many for `replicas`.
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
) -> PartialReplicas | None:
    """Return how to build the single table with which `ranks` ranks run as partial replicas.

    None if all replicas are complete. Arguments are those of `Pipeline`; `microbatches` is per
    replica.

    Raises:
        ConfigError: the schedule does not support partial replicas.
    """
    rows = num_rows(ranks, stages, replicas)
    if rows is None or stages is None:
        return None
    return one_table(ranks, stages, rows * microbatches, schedule, options)


def one_table(
    ranks: int, stages: int, microbatches: int, schedule: object, options: Mapping[str, Any]
) -> PartialReplicas:
    """Return how to build the table with which all ranks run the micro-batches as one pipeline.

    Raises:
        ConfigError: the schedule does not support partial replicas.
    """
    name = canonical_schedule(schedule) if isinstance(schedule, str) else "of your own"
    placement = options.get("placement", "rerouted")
    if name not in WITH_HOLES or (name == "auto" and placement != "rerouted"):
        got = f"auto with placement {placement!r}" if name == "auto" else f"schedule {name!r}"
        near = sorted({ranks // stages * stages, -(-ranks // stages) * stages} - {0})
        raise ConfigError(
            f"schedule: {ranks} ranks are not a multiple of {stages} stages, and {got} does not "
            f"support partial replicas; use one of {', '.join(WITH_HOLES)} "
            f"(pipeline.schedule=zb_h1), or start {' or '.join(map(str, near))} ranks for complete "
            f"replicas"
        )
    if "stages" in options:
        raise ConfigError(
            f"schedule {name!r}: the option stages={options['stages']} conflicts with "
            f"stages={stages}; remove the option"
        )
    made = {**options, "stages": stages}
    if name in ORDERS:
        made["order"] = name
    elif name == "auto":
        made["placement"] = "rerouted"
    return PartialReplicas(
        ranks,
        microbatches,
        "auto" if name == "auto" else "rerouted",
        made,
    )


def refuse_whole_replicas(ranks: int, stages: int, asked: Mapping[str, object]) -> None:
    """Raise `ConfigError` if a setting that needs complete replicas is enabled.

    `asked` maps names of settings to their values.
    """
    for name, value in asked.items():
        if value:
            raise ConfigError(
                f"{name}: {value} needs complete replicas, but {ranks} ranks are not a multiple of "
                f"{stages} stages and run as one pipeline; remove the setting or start a multiple "
                f"of {stages} ranks"
            )


def rows_text(placement: Placement) -> str:
    """Return a sentence on how many ranks hold each stage, or "" without partial replicas."""
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
