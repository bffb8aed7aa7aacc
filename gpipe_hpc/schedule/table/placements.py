"""Placements: which rank holds which stage. The shapes that schedules share."""

from collections.abc import Sequence

from gpipe_hpc.schedule.table.schedule import Placement


def one_stage_each(num_ranks: int, num_microbatches: int) -> Placement:
    """Place stage k on rank k."""
    return looped(num_ranks, 1, num_microbatches)


def looped(num_ranks: int, stages_per_rank: int, num_microbatches: int) -> Placement:
    """Place stage s on rank s mod K: the way leads round the ranks `stages_per_rank` times."""
    route = tuple(range(num_ranks)) * stages_per_rank
    return Placement((route,), (0,) * num_microbatches)


def wave(num_ranks: int, num_waves: int, num_microbatches: int) -> Placement:
    """Place stages down the ranks and up again, `num_waves` times; one wave is V-shaped.

    Where a wave turns, two stages that follow one another are on one rank.
    """
    down = tuple(range(num_ranks))
    return Placement(((down + down[::-1]) * num_waves,), (0,) * num_microbatches)


def mirrored(num_ranks: int, num_pipelines: int, route_of: Sequence[int]) -> Placement:
    """Place pipelines in pairs, one down the ranks and one up, each pair starting further on.

    Pair j starts at rank j K / f of f pairs; each rank holds `num_pipelines` stages, one a route.
    """
    routes: list[tuple[int, ...]] = []
    for pipeline in range(num_pipelines):
        shift = pipeline // 2 * (2 * num_ranks // num_pipelines)
        down = tuple((stage + shift) % num_ranks for stage in range(num_ranks))
        routes.append(down if pipeline % 2 == 0 else down[::-1])
    return Placement(tuple(routes), tuple(route_of))
