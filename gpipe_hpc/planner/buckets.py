"""Gradient buckets of each stage, and how the stage's replicas shard the optimizer state."""

from collections.abc import Sequence

from gpipe_hpc.data_parallel import Buckets, GradientSize, fill_buckets
from gpipe_hpc.models import Layer, find_ties, sizes_of_layers, stage_layers
from gpipe_hpc.planner.memory.sharing import OptimizerSharing
from gpipe_hpc.planner.request import Request
from gpipe_hpc.schedule import Placement


def buckets_of(
    request: Request, counts: Sequence[int], placement: Placement, layers: Sequence[Layer]
) -> tuple[Buckets, ...]:
    """Return the gradient buckets of each stage; stages without replicas have none.

    Tied parameters are in no bucket: their gradients are all-reduced at the end of the step over
    all ranks that hold them.
    """
    spans = stage_layers(counts)
    copied = [request.replicas * len(placement.holders(stage)) > 1 for stage in range(len(spans))]
    if not any(copied):
        return ()
    tied = {tie.name for tie in find_ties(layers)}
    sizes = [
        {name: GradientSize(*size) for name, size in each.items() if name not in tied}
        for each in sizes_of_layers(layers)
    ]
    return tuple(
        fill_buckets(
            {name: sized for layer in span for name, sized in sizes[layer].items()},
            request.combining.bucket_bytes,
        )
        if has_copies
        else ()
        for span, has_copies in zip(spans, copied, strict=True)
    )


def sharing_of(
    request: Request, counts: Sequence[int], placement: Placement, layers: Sequence[Layer]
) -> OptimizerSharing | None:
    """Return how replicas shard the optimizer state, or None if each replica keeps all of it."""
    if request.combining.shard == "none":
        return None
    return OptimizerSharing.of(
        request.combining.shard,
        request.replicas,
        buckets_of(request, counts, placement, layers),
    )
