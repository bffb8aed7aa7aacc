"""Optimal partition of a sequence of layers into contiguous stages.

Every function returns the number of layers of each stage, in order. Notation: n layers, K stages;
``prefix[j]`` is the cost of the first j layers, so layers i..j-1 cost prefix[j] - prefix[i].
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

from gpipe_hpc.errors import PartitionError
from gpipe_hpc.planner.cutting.pins import EndRanges, Pins


def minimax(
    costs: Sequence[float], stages: int, *, allow_empty: bool = False, pins: Pins = ()
) -> list[int]:
    """Return the partition that minimizes the cost of the most expensive stage.

    Exact for floats too: costs are scaled to integers, so no sum is rounded. Ties are broken by the
    smallest sum of squared stage costs, then of squared layer counts, then fewer layers in earlier
    stages (which keep more micro-batches alive).

    Args:
      costs: finite and nonnegative, in any unit.
      allow_empty: allow more stages than layers; then the last stages are empty.
      pins: layers that must be on given stages.

    Raises PartitionError for invalid costs, more stages than layers, or pins that no partition
    satisfies.
    """
    _check_sizes(len(costs), stages, allow_empty)
    used = min(stages, len(costs))
    prefix = [0, *accumulate(integers(costs))]
    ends = EndRanges.where(pins, len(costs), used) if costs else EndRanges((0,), (0,))
    limit = _least_bottleneck(prefix, ends)
    return _most_even(prefix, ends, limit) + [0] * (stages - used)


def uniform(num_layers: int, stages: int, *, allow_empty: bool = False) -> list[int]:
    """Return a partition whose stages differ by at most one layer, the smaller stages first."""
    return minimax([1] * num_layers, stages, allow_empty=allow_empty)


def check_given_cut(
    counts: Sequence[int], num_layers: int, stages: int, *, allow_empty: bool = False
) -> list[int]:
    """Check a partition given by the user as numbers of layers, and return it.

    Raises PartitionError for a wrong number of stages or a wrong sum, for negative numbers, and for
    empty stages without `allow_empty`.
    """
    shown = list(counts)
    if len(shown) != stages:
        raise PartitionError(
            f"partition: wrong number of stages: expected {stages} numbers of layers, got "
            f"{len(shown)} in {shown}; set one number for each stage"
        )
    least = 0 if allow_empty else 1
    for stage, count in enumerate(shown):
        if isinstance(count, bool) or not isinstance(count, int) or count < least:
            raise PartitionError(
                f"partition: invalid stage {stage}: expected a whole number of layers, at least "
                f"{least}, got {count!r} in {shown}; correct that number"
            )
    if sum(shown) != num_layers:
        raise PartitionError(
            f"partition: wrong sum of layers: the model has {num_layers} layers, got "
            f"{sum(shown)} = {' + '.join(map(str, shown))}; change the numbers by "
            f"{num_layers - sum(shown):+d} in total"
        )
    return shown


def _check_sizes(num_layers: int, stages: int, allow_empty: bool) -> None:
    if stages < 1:
        raise PartitionError(
            f"partition: expected at least 1 stage, got {stages}; increase the number of stages"
        )
    if stages > num_layers and not allow_empty:
        raise PartitionError(
            f"partition: more stages than layers: the model has {num_layers} layers, got {stages} "
            f"stages; use fewer stages, or split the model into more layers"
        )


def integers(costs: Sequence[float]) -> list[int]:
    """Scale costs exactly to integers, by one common power of two."""
    ratios = []
    for index, cost in enumerate(costs):
        if not math.isfinite(cost) or cost < 0:
            raise PartitionError(
                f"partition: invalid cost of layer {index}: expected a finite nonnegative number, "
                f"got {cost}; correct that cost"
            )
        ratios.append((cost if isinstance(cost, int) else float(cost)).as_integer_ratio())
    scale = math.lcm(*(denominator for _, denominator in ratios))
    return [numerator * (scale // denominator) for numerator, denominator in ratios]


def _least_bottleneck(prefix: list[int], ends: EndRanges) -> int:
    """Return the smallest limit of the stage cost for which some partition exists.

    `ends` are the allowed ends of stages.
    """
    stages = len(ends.low) - 1
    low = max((b - a for a, b in pairwise(prefix)), default=0)
    low, high = max(low, -(-prefix[-1] // max(stages, 1))), prefix[-1]
    while low < high:
        middle = (low + high) // 2
        reach = _furthest(prefix, ends, middle)
        if all(end >= least for end, least in zip(reach, ends.low, strict=True)):
            high = middle
        else:
            low = middle + 1
    return high


def _furthest(prefix: list[int], ends: EndRanges, limit: int) -> list[int]:
    """Return the most layers that the first 0, 1, ... stages can hold within the limit."""
    reach = [0]
    for most in ends.high[1:]:
        reach.append(min(most, bisect_right(prefix, prefix[reach[-1]] + limit) - 1))
    return reach


def _earliest(prefix: list[int], ends: EndRanges, limit: int) -> list[int]:
    """Return the fewest layers before stage 0, 1, ... with which the remaining layers fit."""
    start = [len(prefix) - 1]
    for least in ends.low[-2::-1]:
        start.append(max(least, bisect_left(prefix, prefix[start[-1]] - limit)))
    return start[::-1]


def _most_even(prefix: list[int], ends: EndRanges, limit: int) -> list[int]:
    """Return the partition with the smallest sum of squares among those within the limit.

    Dynamic programming over the ends of stages. The squared cost of a stage satisfies the
    quadrangle inequality (also with an infinite cost beyond the limit), so the best start of a
    stage increases with its end, and each stage is solved by divide and conquer in O(K n log n)
    total.
    """
    num_layers = len(prefix) - 1
    furthest, earliest = _furthest(prefix, ends, limit), _earliest(prefix, ends, limit)
    weight = num_layers**2 + 1  # makes one number of the pair (cost squared, layers squared)
    best = {0: 0}
    starts: list[dict[int, int]] = []
    for low, high in zip(earliest[1:], furthest[1:], strict=True):
        best, chosen = _solve_row(prefix, limit, weight, best, low, high)
        starts.append(chosen)
    found = [num_layers]
    for chosen in reversed(starts):
        found.append(chosen[found[-1]])
    return [end - start for start, end in pairwise(found[::-1])]


def _solve_row(
    prefix: list[int], limit: int, weight: int, before: dict[int, int], low: int, high: int
) -> tuple[dict[int, int], dict[int, int]]:
    """Return, for each end low..high of a stage, the smallest objective value and its start.

    `before` maps the end of the previous stage to the smallest value for all earlier stages.
    """
    best: dict[int, int] = {}
    chosen: dict[int, int] = {}
    tasks = [(low, high, min(before), max(before))]
    while tasks:
        first, last, start_low, start_high = tasks.pop()
        if first > last:
            continue
        end = (first + last) // 2
        total = prefix[end]
        fitting = bisect_left(prefix, total - limit)
        candidates = range(max(start_low, fitting), min(start_high, end - 1) + 1)
        best[end], chosen[end] = min(
            (before[i] + weight * (total - prefix[i]) ** 2 + (end - i) ** 2, i) for i in candidates
        )
        tasks.append((first, end - 1, start_low, chosen[end]))
        tasks.append((end + 1, last, chosen[end], start_high))
    return best, chosen
