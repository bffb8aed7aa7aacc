"""The placements that several schedules use: looped, wave, mirrored, and with partial replicas."""

from collections.abc import Sequence

from gpipe_hpc.schedule.table.schedule import Placement


def one_stage_each(num_ranks: int, num_microbatches: int) -> Placement:
    """Place each stage on its own rank: stage k on rank k."""
    return looped(num_ranks, 1, num_microbatches)


def looped(num_ranks: int, stages_per_rank: int, num_microbatches: int) -> Placement:
    """Place stage s on rank s mod K, so that each of K ranks holds `stages_per_rank` stages."""
    route = tuple(range(num_ranks)) * stages_per_rank
    return Placement((route,), (0,) * num_microbatches)


def wave(num_ranks: int, num_waves: int, num_microbatches: int) -> Placement:
    """Place stages down the ranks and back up, `num_waves` times; a single wave is V-shaped.

    At each turn two consecutive stages are on the same rank.
    """
    down = tuple(range(num_ranks))
    return Placement(((down + down[::-1]) * num_waves,), (0,) * num_microbatches)


def mirrored(num_ranks: int, num_pipelines: int, route_of: Sequence[int]) -> Placement:
    """Place pipelines in pairs, one down the ranks and one up, each pair at a different start rank.

    With f pairs on K ranks, pair j starts at rank j K / f. Each rank holds `num_pipelines` stages,
    one per route (Chimera).
    """
    routes: list[tuple[int, ...]] = []
    for pipeline in range(num_pipelines):
        shift = pipeline // 2 * (2 * num_ranks // num_pipelines)
        down = tuple((stage + shift) % num_ranks for stage in range(num_ranks))
        routes.append(down if pipeline % 2 == 0 else down[::-1])
    return Placement(tuple(routes), tuple(route_of))


def copies_in_rows(placement: Placement) -> list[int] | None:
    """Return the number of ranks that hold each stage of a placement with partial replicas.

    None for other placements: a rank holds several stages, or no stage is held by more than one
    rank.
    """
    copies = [len(placement.holders(stage)) for stage in range(placement.num_stages)]
    is_in_rows = max(copies) > 1 and sum(copies) == placement.num_ranks
    return copies if is_in_rows else None


def with_holes(
    copies: Sequence[int], num_microbatches: int, paces: Sequence[float] = ()
) -> Placement:
    """Place stage s on ``copies[s]`` ranks: partial replicas that lack ranks for some stages.

    Ranks are numbered replica by replica. Micro-batches are assigned to the replicas round-robin.
    If a replica lacks a stage, the rank of another replica with the fewest micro-batches of that
    stage runs it.

    Args:
        copies: number of ranks that hold each stage.
        num_microbatches: number of micro-batches of a step.
        paces: relative time of each rank per micro-batch. If they differ, the micro-batches of a
            stage are divided so that the slowest rank ends as early as possible; a micro-batch
            stays in its replica unless its rank would get ahead of its share.
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
            rows = _by_speed(home, [paces[held[row][stage]] for row in range(count)])
            home = rows
        columns.append([held[row][stage] for row in rows])
    for route in zip(*columns, strict=True):
        route_of.append(routes.setdefault(route, len(routes)))
    # Replicas that no micro-batch uses still hold their stages.
    taken = {rank for column in columns for rank in column}
    for own in held:
        if not all(rank in taken for rank in own if rank >= 0):
            idle = tuple(rank if rank >= 0 else held[0][s] for s, rank in enumerate(own))
            routes.setdefault(idle, len(routes))
    return Placement(tuple(routes), tuple(route_of))


def _in_turn(home: Sequence[int], count: int) -> list[int]:
    """Return the replica that runs each micro-batch of a stage that only `count` replicas hold.

    `home` is the replica of each micro-batch.
    """
    taken = [home.count(row) for row in range(count)]
    rows: list[int] = []
    for row in home:
        if row >= count:
            row = taken.index(min(taken))
            taken[row] += 1
        rows.append(row)
    return rows


def _by_speed(before: Sequence[int], paces: Sequence[float]) -> list[int]:
    """Return the replica that runs a stage for each micro-batch, if ranks differ in speed.

    Args:
        before: replica of each micro-batch at the previous stage.
        paces: relative time per micro-batch of each rank that holds the stage.
    """
    quota = shares_of(len(before), paces)
    together = 1 / sum(1 / pace for pace in paces)  # time per micro-batch of all ranks combined
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
    """Divide `number` equal work items among ranks so that the last one ends as early as possible.

    `paces` is the time of each rank per item. Each item is given to the rank that would finish it
    first, which is optimal.
    """
    shares = [0] * len(paces)
    for _ in range(number):
        first = min(range(len(paces)), key=lambda each: (shares[each] + 1) * paces[each])
        shares[first] += 1
    return shares
