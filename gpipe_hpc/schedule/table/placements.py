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


def copies_in_rows(placement: Placement) -> list[int] | None:
    """Return how many ranks hold each stage, where each holds one and some share; else None."""
    copies = [len(placement.holders(stage)) for stage in range(placement.num_stages)]
    is_in_rows = max(copies) > 1 and sum(copies) == placement.num_ranks
    return copies if is_in_rows else None


def with_holes(
    copies: Sequence[int], num_microbatches: int, paces: Sequence[float] = ()
) -> Placement:
    """Place stage s on ``copies[s]`` ranks, in rows of which each has a rank for a stage or none.

    Ranks are numbered row by row. Micro-batches take the rows in turn; where a row has none for a
    stage, the rank of another one that has the fewest micro-batches of the stage so far takes it.
    `paces`: how many times as long each rank takes. Where they differ, the ranks of a stage share
    its micro-batches so that the last of them ends as early as can be, and a micro-batch stays in
    its row as long as no rank gets ahead of its share.
    """
    num_rows = max(copies)
    numbers = iter(range(sum(copies)))
    held = [[next(numbers) if row < n else -1 for n in copies] for row in range(num_rows)]
    are_alike = len(set(paces)) <= 1
    home = [microbatch % num_rows for microbatch in range(num_microbatches)]
    routes: dict[tuple[int, ...], int] = {}
    route_of: list[int] = []
    columns: list[list[int]] = []
    for stage, count in enumerate(copies):
        if are_alike:
            rows = _in_turn(home, count)
        else:
            rows = _by_paces(home, [paces[held[row][stage]] for row in range(count)])
            home = rows
        columns.append([held[row][stage] for row in rows])
    for route in zip(*columns, strict=True):
        route_of.append(routes.setdefault(route, len(routes)))
    # Rows that no micro-batch takes hold their stages all the same.
    taken = {rank for column in columns for rank in column}
    for own in held:
        if not all(rank in taken for rank in own if rank >= 0):
            idle = tuple(rank if rank >= 0 else held[0][s] for s, rank in enumerate(own))
            routes.setdefault(idle, len(routes))
    return Placement(tuple(routes), tuple(route_of))


def _in_turn(home: Sequence[int], count: int) -> list[int]:
    """Return the row of each micro-batch in a stage that the first `count` rows hold."""
    taken = [home.count(row) for row in range(count)]
    rows: list[int] = []
    for row in home:
        if row >= count:
            row = taken.index(min(taken))
            taken[row] += 1
        rows.append(row)
    return rows


def _by_paces(before: Sequence[int], paces: Sequence[float]) -> list[int]:
    """Return the row of each micro-batch in a stage that rows of such paces hold.

    `before`: the rows that they come from.
    """
    quota = shares_of(len(before), paces)
    together = 1 / sum(1 / pace for pace in paces)  # of all ranks, for a micro-batch
    taken = [0] * len(paces)
    rows: list[int] = []
    for number, row in enumerate(before, 1):
        stays = row < len(paces) and taken[row] < quota[row]
        if not (stays and taken[row] * paces[row] <= number * together):
            free = (each for each in range(len(paces)) if taken[each] < quota[each])
            row = min(free, key=lambda each: (taken[each] + 1) * paces[each])
        taken[row] += 1
        rows.append(row)
    return rows


def shares_of(number: int, paces: Sequence[float]) -> list[int]:
    """Return how many of some pieces ranks take, so that the last of them ends early as can be.

    `paces`: how many times as long each takes for a piece. Each next one goes to where it would end
    first, which no other choice beats.
    """
    shares = [0] * len(paces)
    for _ in range(number):
        first = min(range(len(paces)), key=lambda each: (shares[each] + 1) * paces[each])
        shares[first] += 1
    return shares
