"""Settings that may differ by rank: memory limits and slowdowns.

A list has one value per rank of a pipeline, or per rank of all replicas in the order of world
ranks. Replicas share one layout, so the worst value over the replicas is used.
"""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from gpipe_hpc.errors import ConfigError
from gpipe_hpc.units import bytes_text

if TYPE_CHECKING:
    from gpipe_hpc.planner.request import Request

MEASURED_PACES: Final = "measured"
"""Value of `paces` that requests a measurement at the start of a run."""


class MeasuredSlowdowns(tuple[float, ...]):
    """Slowdowns measured by all ranks: known on rank 0, empty on every other rank."""


def memory_limits(request: "Request") -> tuple[float, ...] | None:
    """Return the memory limit of each rank of a pipeline in bytes, or None without limits.

    The request must have a known number of stages. Raises ConfigError.
    """
    given = request.memory_bytes
    assert not isinstance(given, str), "the settings were read"
    if given is None:
        return None
    ranks = _ranks_of(request)
    if isinstance(given, int | float):
        return (given,) * ranks
    return _of_one_pipeline("memory_bytes", given, ranks, request.replicas, min)


def given_paces(request: "Request") -> tuple[float, ...] | None:
    """Return the slowdown of each rank of a pipeline relative to rank 0, or None if unknown.

    Rank 0 is the rank that measures layers. Also None if the slowdowns are still to be measured, or
    known only on rank 0. Raises ConfigError.
    """
    given = request.paces
    is_elsewhere = isinstance(given, MeasuredSlowdowns) and not given
    if given is None or isinstance(given, str) or is_elsewhere:
        return None
    paces = _of_one_pipeline("paces", given, _ranks_of(request), request.replicas, max)
    return tuple(pace / given[0] for pace in paces)


def _ranks_of(request: "Request") -> int:
    assert isinstance(request.stages, int), "the number of stages is resolved before"
    return request.stages


_REMEDIES: Final = {
    "memory_bytes": "set the bytes of each rank, or one number for all",
    "paces": "pace 2 means twice the computing time of pace 1",
}


def _of_one_pipeline(
    name: str,
    given: Sequence[float | str],
    ranks: int,
    replicas: int,
    worst: Callable[[list[float]], float],
) -> tuple[float, ...]:
    values = [float(each) for each in given if _is_positive(each)]
    if len(values) != len(given) or len(values) not in (ranks, ranks * replicas):
        every = f", or for each of all {ranks * replicas} ranks" if replicas > 1 else ""
        raise ConfigError(
            f"pipeline.{name}: expected a number above 0 for each of the {ranks} ranks of a "
            f"pipeline{every}, got {list(given)}; {_REMEDIES[name]}"
        )
    return tuple(worst(values[rank::ranks]) for rank in range(ranks))


def _is_positive(value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 < float(str(value)) < math.inf


def excess_bytes(held: Sequence[float], limits: Sequence[float] | None) -> float:
    """Return the largest number of bytes by which a rank exceeds its limit; 0 if none does."""
    if limits is None:
        return 0.0
    return max(0.0, *(have - most for have, most in zip(held, limits, strict=True)))


def limits_text(limits: Sequence[float]) -> str:
    """Format the memory limits: ``24 GB``, or ``8 GB to 24 GB``."""
    least, most = min(limits), max(limits)
    return bytes_text(least) if least == most else f"{bytes_text(least)} to {bytes_text(most)}"
