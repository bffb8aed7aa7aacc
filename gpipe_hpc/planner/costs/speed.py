"""Relative speeds of ranks: each rank measures the same small computation."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from statistics import median
from typing import Final

import torch
from torch.nn import functional

from gpipe_hpc.device.device import Device
from gpipe_hpc.engine import casting
from gpipe_hpc.planner.costs.clock import WorkClock
from gpipe_hpc.planner.costs.rates import ramp
from gpipe_hpc.units import ranges_text

ALIKE_WITHIN: Final = 1.15
"""Ranks count as equally fast if they take at most this multiple of the fastest one's time."""

_WIDTH: Final = 512
_ROWS: Final = 64  # on a CPU; a core takes about 20 ms
_ROWS_OF_ACCELERATORS: Final = 8192
_REPEATS: Final = 8
_LIMIT_S: Final = 2.0


def seconds_of_work(device: Device, precision: str, clock: WorkClock | None = None) -> float:
    """Measure the seconds of a device for one transformer MLP block, forward and backward.

    The block has two matrix products, a GELU and a normalisation. The result is the minimum of
    several repetitions without the first. Uses no random numbers.
    """
    clock = clock or WorkClock()
    rows = _ROWS_OF_ACCELERATORS if device.is_accelerator else _ROWS
    inputs = ramp(device, rows, _WIDTH).detach()
    weights = [ramp(device, _WIDTH, 4 * _WIDTH), ramp(device, 4 * _WIDTH, _WIDTH)]

    def work() -> None:
        with casting(precision, device), torch.enable_grad():
            hidden = functional.gelu(inputs @ weights[0])
            output = functional.layer_norm(inputs + hidden @ weights[1], (_WIDTH,))
            torch.autograd.grad(output.float().square().sum(), weights)

    times: list[float] = []
    began_s = clock.now()
    while len(times) < 2 or (len(times) <= _REPEATS and clock.now() - began_s < _LIMIT_S):
        times.append(clock.timed(work, device)[1])
    return min(times[1:])


def paces_of_times(times: Sequence[float]) -> tuple[float, ...]:
    """Return the slowdown of each rank relative to the fastest, from the seconds of each.

    Ranks within `ALIKE_WITHIN` of the fastest of their group get one slowdown, that of the group's
    median, rounded to tenths, so that equal ranks stay equal despite noise.
    """
    found = [1.0] * len(times)
    first: float | None = None
    for group in _groups(times):
        middle = median(times[rank] for rank in group)
        first = middle if first is None else first
        for rank in group:
            found[rank] = round(middle / first, 1)
    return tuple(found)


def _groups(times: Sequence[float]) -> Iterator[list[int]]:
    """Yield groups of ranks that count as equally fast, the fastest group first."""
    order = sorted(range(len(times)), key=lambda rank: times[rank])
    group: list[int] = []
    for rank in order:
        if group and times[rank] > ALIKE_WITHIN * times[group[0]]:
            yield group
            group = []
        group.append(rank)
    if group:
        yield group


def confirms(measured: Sequence[float], known: Sequence[float]) -> bool:
    """Return whether the measured relative speeds of ranks agree with the known ones.

    Each sequence may be scaled by any common factor.
    """
    if len(measured) != len(known):
        return False
    ratios = [now / before for now, before in zip(measured, known, strict=True)]
    return max(ratios) <= ALIKE_WITHIN**2 * min(ratios)


def paces_text(paces: Sequence[float]) -> str:
    """Describe slowdowns, as ``ranks 0-3: 1, rank 4: 2.5 times as long as the fastest``."""
    fastest = min(paces)
    if max(paces) == fastest:
        return f"all {len(paces)} ranks count as equally fast"
    order = sorted(range(len(paces)), key=lambda rank: (paces[rank], rank))
    parts = []
    for pace, ranks in groupby(order, key=lambda rank: paces[rank]):
        own = list(ranks)
        parts.append(f"rank{'s' * (len(own) > 1)} {ranges_text(own)}: {pace / fastest:.3g}")
    return f"{', '.join(parts)} times as long as the fastest"
