"""Which layers and skips belong to the stages of a partition.

A partition is given as `counts`, the number of layers of each stage, in order.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

from gpipe_hpc.models.skips import Skip


def stage_layers(counts: Sequence[int]) -> list[range]:
    """Return the indices of the layers of each stage."""
    return [range(first, last) for first, last in pairwise([0, *accumulate(counts)])]


def layer_stages(counts: Sequence[int]) -> list[int]:
    """Return the stage index of each layer."""
    return [stage for stage, num_layers in enumerate(counts) for _ in range(num_layers)]


def skip_routes(skips: Sequence[Skip], counts: Sequence[int]) -> dict[tuple[int, int], list[Skip]]:
    """Return the skips between each pair of stages (source, destination), in order of layers.

    A skip to the next stage is sent with the boundary; skips within a stage are omitted.
    """
    stage_of = layer_stages(counts)
    routes: dict[tuple[int, int], list[Skip]] = {}
    for skip in skips:
        route = stage_of[skip.source], stage_of[skip.destination]
        if route[0] != route[1]:
            routes.setdefault(route, []).append(skip)
    return dict(sorted(routes.items()))


def long_skips(routes: Mapping[tuple[int, int], Sequence[Skip]]) -> tuple[tuple[int, int], ...]:
    """Return the pairs of stages (source, destination) at least two apart that skips connect."""
    return tuple(route for route in routes if route[1] > route[0] + 1)
