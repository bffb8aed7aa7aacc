"""What the copies of a stage send one another to sum their gradients, as text."""

from collections import Counter
from typing import Final

from gpipe_hpc.engine.outer.settings import Outer
from gpipe_hpc.models import stage_layers
from gpipe_hpc.planning.counted import ModelCount
from gpipe_hpc.planning.layout import Layout
from gpipe_hpc.planning.units import bytes_text

_MOST_SHOWN: Final = 8  # stages


def sums_text(model: ModelCount, layout: Layout, outer: Outer) -> str:
    """Say over what gradients are summed, in how many buckets, and what each rank sends for it.

    The bytes are those of a ring, of which none sends less in all: 2 (C - 1) / C of the gradients
    for C copies (Patarasuk and Yuan, 2009), in two halves where the optimizer's state is divided.
    Nothing where no stage has a copy.
    """
    buckets, replicas = layout.tables.buckets, layout.replicas
    if not any(buckets):
        return ""
    if outer.is_apart and replicas > 1:
        parts = f", in {outer.parts} parts in turn" if outer.parts > 1 else ""
        return (
            f"parameters are averaged over {replicas} replicas every {outer.every} steps "
            f"(outer.every={outer.every}){parts}{_compressed(outer)}; gradients are not summed "
            f"over replicas"
        )
    placement = layout.schedule.placement
    is_mirrored = any(len(placement.holders(stage)) > 1 for stage in range(len(buckets)))
    over = [f"{replicas} replicas"] * (replicas > 1) + ["the copies of a stage"] * is_mirrored
    counts = [len(each) for each in buckets]
    shown = " + ".join(map(str, counts))
    if len(counts) > _MOST_SHOWN:
        shown = f"{sum(counts)}"
    head = (
        f"gradients are summed over {' and '.join(over)}: {shown} buckets of at most "
        f"{bytes_text(outer.bucket_bytes)} or one parameter"
    )
    if outer.compress != "none":
        return f"{head}{_compressed(outer)}"
    sent = ring_bytes(model, layout)
    least, most = bytes_text(min(sent)), bytes_text(max(sent))
    amount = least if least == most else f"{least} to {most}"
    return f"{head}; each rank sends {amount} a step for it in a ring, which sends the least"


def _compressed(outer: Outer) -> str:
    return "" if outer.compress == "none" else f", compressed (outer.compress={outer.compress})"


def ring_bytes(model: ModelCount, layout: Layout) -> list[float]:
    """Return what each rank sends in a step to sum gradients over all copies in a ring; bytes."""
    placement = layout.schedule.placement
    spans = stage_layers(layout.partition.counts)
    of_rank = [
        model.named_weights(i for stage in placement.stages_of(rank) for i in spans[stage])
        for rank in range(placement.num_ranks)
    ]
    holders = Counter(name for weights in of_rank for name in weights)
    share = {name: 1 - 1 / (layout.replicas * count) for name, count in holders.items()}
    return [
        sum(
            2 * share[name] * weight.nbytes for name, weight in weights.items() if weight.is_trained
        )
        for weights in of_rank
    ]
