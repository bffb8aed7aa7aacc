"""Settings that may differ from rank to rank: how much each may hold, and how slow it is.

A list has a value for each rank of one pipeline, or for each rank of all replicas, in the order of
the world. Replicas share one lay-out, so of those the one that is worst off counts.
"""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from gpipe_hpc.errors import ConfigError
from gpipe_hpc.units import bytes_text

if TYPE_CHECKING:
    from gpipe_hpc.planner.request import Request

MEASURED_PACES: Final = "measured"
"""In the place of paces: each rank times the same work at the start of a run."""


class FoundPaces(tuple[float, ...]):
    """Paces that all ranks have measured, for each of them: on rank 0, which cuts by them.

    Empty on every other rank, which is told of none but those of the cut.
    """


def memory_limits(request: "Request") -> tuple[float, ...] | None:
    """Return the bytes that each rank of a pipeline may fill; None where no limit is given.

    The request is for a known number of stages, its bytes are numbers. Raises ConfigError.
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
    """Return how many times as long as rank 0 each rank of a pipeline takes; None: nobody tells.

    Rank 0 is the one that measures layers. None, too, where paces are still to be measured, and
    where rank 0 alone knows those that were. Raises ConfigError.
    """
    given = request.paces
    is_elsewhere = isinstance(given, FoundPaces) and not given
    if given is None or isinstance(given, str) or is_elsewhere:
        return None
    paces = _of_one_pipeline("paces", given, _ranks_of(request), request.replicas, max)
    return tuple(pace / given[0] for pace in paces)


def _ranks_of(request: "Request") -> int:
    assert isinstance(request.stages, int), "a layout is for a known number of ranks"
    return request.stages


_REMEDIES: Final = {
    "memory_bytes": "write the bytes of each, or one number for all",
    "paces": "2 is a rank that takes twice as long as one with 1",
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
        every = f", or for each of all {ranks * replicas}" if replicas > 1 else ""
        raise ConfigError(
            f"pipeline.{name}: expected a number above 0 for each of {ranks} ranks of a "
            f"pipeline{every}, got {list(given)}; {_REMEDIES[name]}"
        )
    return tuple(worst(values[rank::ranks]) for rank in range(ranks))


def _is_positive(value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 < float(str(value)) < math.inf


def excess_bytes(held: Sequence[float], limits: Sequence[float] | None) -> float:
    """Return by how many bytes the rank that lacks most exceeds what it may fill; 0 for none."""
    if limits is None:
        return 0.0
    return max(0.0, *(have - most for have, most in zip(held, limits, strict=True)))


def limits_text(limits: Sequence[float]) -> str:
    """Return what ranks may fill: ``24 GB``, or ``8 GB to 24 GB``."""
    least, most = min(limits), max(limits)
    return bytes_text(least) if least == most else f"{bytes_text(least)} to {bytes_text(most)}"
