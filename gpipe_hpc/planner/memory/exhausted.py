"""Explain an out-of-memory error: planned and allocated memory, and possible remedies."""

from collections.abc import Iterator

from gpipe_hpc.device.memory_snapshot import MemorySnapshot
from gpipe_hpc.planner.forecast import RankForecast
from gpipe_hpc.planner.report.columns import aligned
from gpipe_hpc.planner.request import Request
from gpipe_hpc.units import bytes_text

_UNKNOWN = "-"


def explain_exhausted(
    snapshot: MemorySnapshot, planned: RankForecast | None, request: Request
) -> str:
    """Return a table of a rank's planned and allocated memory, followed by remedies.

    `planned` is None if memory was not forecast, for example in library use.
    """
    lines = [_table(snapshot, planned), _where(snapshot)]
    return "\n".join(
        [*lines, f"out of memory; remedies: {'; '.join(_remedies(snapshot, request))}"]
    )


def _table(snapshot: MemorySnapshot, planned: RankForecast | None) -> str:
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
    found[0], found[2] = bytes_text(snapshot.weights), bytes_text(snapshot.gradients)
    found[4] = f"of {snapshot.num_kept} micro-batches"
    found[6] = bytes_text(snapshot.allocated)
    more = [] if planned is None else [("update", planned.update_bytes)]
    if planned is not None and not planned.is_on_device:
        more.append(("saving", planned.saving_bytes))
    for name, part in more:
        if part:
            names.insert(-1, name)
            expected.insert(-1, bytes_text(part))
            found.insert(-1, _UNKNOWN)
    rows = [["memory", "planned", "allocated"]]
    rows += [list(row) for row in zip(names, expected, found, strict=True)]
    return aligned(rows, left={0})


def _where(snapshot: MemorySnapshot) -> str:
    if not snapshot.is_accelerator:
        free = "" if snapshot.free is None else f"; {bytes_text(snapshot.free)} are free"
        return f"on {snapshot.device}, for the whole process{free}"
    text = (
        f"on {snapshot.device}: {bytes_text(snapshot.peak)} at peak, torch has reserved "
        f"{bytes_text(snapshot.reserved)}"
    )
    if snapshot.total is None:
        return text
    return f"{text} of {bytes_text(snapshot.total)}"


def _remedies(snapshot: MemorySnapshot, request: Request) -> Iterator[str]:
    """Yield remedies, the cheapest first, except those already in use."""
    unused = snapshot.reserved - snapshot.allocated
    if snapshot.is_accelerator and unused > 0.2 * snapshot.reserved:
        yield (
            f"{bytes_text(unused)} of torch's reserved memory are fragmented: set "
            f"PYTORCH_ALLOC_CONF=expandable_segments:True"
        )
    if snapshot.total is not None and snapshot.free is not None:
        others = snapshot.total - snapshot.allocated - snapshot.free
        if others > 0.1 * snapshot.total:
            yield f"other processes use {bytes_text(others)} of the device: end them"
    yield f"use more micro-batches (pipeline.microbatches above {request.microbatches})"
    if request.recompute not in ("always", "budget"):
        yield "pipeline.recompute=always, or pipeline.recompute=budget with pipeline.memory_bytes"
    if not request.offload and snapshot.is_accelerator:
        yield "pipeline.offload=true, which moves activations to host memory"
    if request.schedule == "gpipe":
        yield "pipeline.schedule=1f1b, which keeps fewer micro-batches alive"
    if request.precision == "float32":
        yield "train.precision=bfloat16"
    if request.replicas > 1 and request.combining.shard == "none":
        yield "outer.shard=flat, which shards gradients and optimizer state over the replicas"
    yield "use more stages (pipeline.stages), or a smaller batch (train.batch_size)"
    yield "run `python -m gpipe_hpc.plan` with these settings to see what a layout needs"
