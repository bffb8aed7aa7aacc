"""Describe the gradient all-reduces between the replicas of a stage."""

from collections import Counter
from collections.abc import Sequence
from typing import Final

from gpipe_hpc.models import stage_layers
from gpipe_hpc.planner.costs.counted import ModelCount
from gpipe_hpc.planner.layout import Layout
from gpipe_hpc.settings import Outer
from gpipe_hpc.units import bytes_text

_MOST_SHOWN: Final = 8  # stages
_WIDE: Final = 4  # bytes of a float32


def reductions_text(
    model: ModelCount, layout: Layout, outer: Outer, link_bytes_per_s: float | None = None
) -> str:
    """Describe the gradient all-reduces of a step: replicas, buckets, and bytes sent by each rank.

    The bytes are those of a ring, the minimum: 2 (C - 1) / C of the gradients for C replicas
    (Patarasuk and Yuan, 2009), in two halves if the optimizer state is sharded. `link_bytes_per_s`
    adds the time of the transfer. Empty if no stage has a replica.
    """
    buckets, replicas = layout.tables.buckets, layout.replicas
    if not any(buckets):
        return ""
    if outer.uses_local_sgd and replicas > 1:
        parts = f", in {outer.parts} parts in turn" if outer.parts > 1 else ""
        return (
            f"parameters are averaged over {replicas} replicas every {outer.every} steps "
            f"(outer.every={outer.every}){parts}{_compressed(outer)}; gradients are not reduced "
            f"over replicas{_outer_step(model, layout, outer, link_bytes_per_s)}"
        )
    placement = layout.schedule.placement
    is_mirrored = any(len(placement.holders(stage)) > 1 for stage in range(len(buckets)))
    over = [f"{replicas} replicas"] * (replicas > 1) + ["mirrored stages"] * is_mirrored
    counts = [len(each) for each in buckets]
    shown = " + ".join(map(str, counts))
    if len(counts) > _MOST_SHOWN:
        shown = f"{sum(counts)}"
    head = (
        f"gradients are reduced over {' and '.join(over)}: {shown} buckets of at most "
        f"{bytes_text(outer.bucket_bytes)} or one parameter"
    )
    if outer.compress != "none":
        return f"{head}{_compressed(outer)}"
    sent = ring_bytes(model, layout)
    text = (
        f"{head}; each rank sends {_span(sent)} per step in a ring, the minimum"
        f"{_taking(max(sent), link_bytes_per_s)}"
    )
    if outer.shard == "flat":
        half = _taking(max(sent) / 2, link_bytes_per_s)
        text += f"; half of it gathers parameters (UNSHARD) during the next step's forwards{half}"
    return text


def _outer_step(
    model: ModelCount, layout: Layout, outer: Outer, link_bytes_per_s: float | None
) -> str:
    """Describe the bytes that an outer step (local SGD) sends, in total and per training step."""
    if outer.compress != "none":
        return ""
    sent = ring_bytes(model, layout, is_wide=True)
    steps = f"during {outer.behind} steps" if outer.behind else "while all ranks wait"
    return (
        f"; each rank sends {_span(sent)} per outer step in a ring, {steps}"
        f"{_taking(max(sent), link_bytes_per_s)}: "
        f"{_span([each / outer.every for each in sent])} per training step"
        f"{_taking(max(sent) / outer.every, link_bytes_per_s)}"
    )


def _span(sent: Sequence[float]) -> str:
    least, most = bytes_text(min(sent)), bytes_text(max(sent))
    return least if least == most else f"{least} to {most}"


def _taking(num_bytes: float, link_bytes_per_s: float | None) -> str:
    """Return the time to send some bytes, in parentheses; empty without a bandwidth."""
    if link_bytes_per_s is None:
        return ""
    return f" ({num_bytes / link_bytes_per_s:.3g} s at {bytes_text(link_bytes_per_s)}/s)"


def _compressed(outer: Outer) -> str:
    return "" if outer.compress == "none" else f", compressed (outer.compress={outer.compress})"


def ring_bytes(model: ModelCount, layout: Layout, *, is_wide: bool = False) -> list[float]:
    """Return the bytes that each rank sends in a ring all-reduce of its gradients.

    `is_wide`: elements are sent in float32 or wider, as for averaged parameters.
    """
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
            2 * share[name] * (max(weight.nbytes, _WIDE * weight.num_elements * is_wide))
            for name, weight in weights.items()
            if weight.is_trained
        )
        for weights in of_rank
    ]
