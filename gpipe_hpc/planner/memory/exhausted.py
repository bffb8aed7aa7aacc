"""Explain an out-of-memory error: planned and allocated memory, and possible remedies."""

from collections.abc import Iterator

from gpipe_hpc.engine.memory_snapshot import MemorySnapshot
from gpipe_hpc.planner.forecast import RankForecast
from gpipe_hpc.planner.request import Request
from gpipe_hpc.planner.telling.columns import aligned
from gpipe_hpc.units import bytes_text

_UNKNOWN = "-"


def explain_exhausted(
    standing: MemorySnapshot, planned: RankForecast | None, request: Request
) -> str:
    """Return a table of a rank's planned and allocated memory, followed by remedies.

    `planned` is None if the run was not planned, as in library use without `python -m
    gpipe_hpc.plan`.
    """
    lines = [_table(standing, planned), _where(standing)]
    return "\n".join(
        [*lines, f"out of memory; remedies: {'; '.join(_remedies(standing, request))}"]
    )


def _table(standing: MemorySnapshot, planned: RankForecast | None) -> str:
    names = ["weights", "casts", "gradients", "optimizer", "activations", "workspace", "sum"]
    expected = [_UNKNOWN] * len(names)
    if planned is not None:
        expected = [
            bytes_text(part)
            for part in (
                planned.weight_bytes,
                planned.cast_bytes,
                planned.gradient_bytes,
                planned.optimizer_bytes,
                planned.activation_bytes,
                planned.workspace_bytes,
                planned.total_bytes,
            )
        ]
    found = [_UNKNOWN] * len(names)
    found[0], found[2] = bytes_text(standing.weights), bytes_text(standing.gradients)
    found[4] = f"of {standing.num_kept} micro-batches"
    found[6] = bytes_text(standing.allocated)
    more = [] if planned is None else [("update", planned.update_bytes)]
    if planned is not None and not planned.lies_apart:
        more.append(("saving", planned.saving_bytes))
    for name, part in more:
        if part:
            names.insert(-1, name)
            expected.insert(-1, bytes_text(part))
            found.insert(-1, _UNKNOWN)
    rows = [["memory", "planned", "allocated"]]
    rows += [list(row) for row in zip(names, expected, found, strict=True)]
    return aligned(rows, left={0})


def _where(standing: MemorySnapshot) -> str:
    if not standing.is_accelerator:
        free = "" if standing.free is None else f"; {bytes_text(standing.free)} are free"
        return f"on {standing.device}, for the whole process{free}"
    text = (
        f"on {standing.device}: {bytes_text(standing.peak)} at peak, torch has reserved "
        f"{bytes_text(standing.reserved)}"
    )
    if standing.total is None:
        return text
    return f"{text} of {bytes_text(standing.total)}"


def _remedies(standing: MemorySnapshot, request: Request) -> Iterator[str]:
    """Yield remedies, the cheapest first, without those already in use."""
    unused = standing.reserved - standing.allocated
    if standing.is_accelerator and unused > 0.2 * standing.reserved:
        yield (
            f"{bytes_text(unused)} of torch's reserved memory are fragmented: set "
            f"PYTORCH_ALLOC_CONF=expandable_segments:True"
        )
    if standing.total is not None and standing.free is not None:
        others = standing.total - standing.allocated - standing.free
        if others > 0.1 * standing.total:
            yield f"other processes use {bytes_text(others)} of the device: end them"
    yield f"use more micro-batches (pipeline.microbatches above {request.microbatches})"
    if request.recompute not in ("always", "budget"):
        yield "pipeline.recompute=always, or budget with pipeline.memory_bytes"
    if not request.offload and standing.is_accelerator:
        yield "pipeline.offload=true, which moves activations to host memory"
    if request.schedule == "gpipe":
        yield "pipeline.schedule=1f1b, which keeps fewer micro-batches alive"
    if request.precision == "float32":
        yield "train.precision=bfloat16"
    if request.replicas > 1 and request.combining.shard == "none":
        yield "outer.shard=flat, which shards gradients and optimizer state over the replicas"
    yield "use more stages (pipeline.stages), or a smaller batch (train.batch_size)"
    yield "run `python -m gpipe_hpc.plan` with these settings to see what a layout needs"
