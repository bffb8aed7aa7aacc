"""Messages for a run that resumes on other ranks or in another layout."""

import logging
from collections.abc import Mapping
from typing import Any

from gpipe_hpc.pipeline import Pipeline
from gpipe_hpc.schedule import rows_text

log = logging.getLogger("gpipe_hpc.train")


def say_change(before: Mapping[str, Any], pipe: Pipeline, position: int, source: str) -> None:
    """Log changes of the layout since a state was saved, and warn if micro-batches change.

    Args:
        before: entries of the checkpoint's manifest, which an older version may lack.
        pipe: the pipeline.
        position: samples that the run has consumed.
        source: description of the checkpoint for the message.
    """
    mesh = pipe.mesh
    stages, replicas = before.get("stages"), before.get("replicas")
    if not isinstance(stages, int) or not isinstance(replicas, int):
        return
    ranks = before.get("ranks", stages * replicas)
    is_same = (ranks, stages, replicas) == (pipe.world.size, mesh.stages, mesh.replicas)
    if not is_same:
        log.info(
            "%s before, %s now: %s; resuming at step %d, after %s samples, with the state of %s",
            _ranks(ranks),
            pipe.world.size,
            _layout(pipe),
            pipe.steps_done,
            f"{position:,}",
            source,
        )
    if "microbatches" not in before:
        return
    was, now = before["microbatches"] * replicas, pipe.num_global_microbatches
    if was != now:
        log.warning(
            "each batch was cut into %d micro-batches and is now cut into %d: random numbers of "
            "layers and the batches of BatchNorm differ from those of the earlier start; to keep "
            "them, keep pipeline.replicas x pipeline.microbatches (x train.accumulation)",
            was,
            now,
        )


def _ranks(number: int) -> str:
    return f"{number} rank{'s' * (number != 1)}"


def _layout(pipe: Pipeline) -> str:
    held = rows_text(pipe.schedule.placement)
    if held:
        return held[0].lower() + held[1:]
    count, stages = pipe.mesh.replicas, pipe.schedule.num_stages
    return (
        f"{stages} stage{'s' * (stages != 1)} on {_ranks(pipe.mesh.stages)}"
        f"{f', in {count} replicas' if count > 1 else ''}"
    )
