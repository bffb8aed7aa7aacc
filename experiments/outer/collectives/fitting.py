"""Fit alpha, beta and gamma of a link to measured times.

Closed forms are linear in the three. The fit is non-negative least squares of relative errors,
because times span orders of magnitude; outliers get small weights.
"""

from collections.abc import Sequence
from itertools import combinations
from typing import Final, NamedTuple

import torch

from experiments.outer.collectives.costs import Link, Terms

_NUM_ROUNDS: Final = 30
_LEAST_SCALE: Final = 1e-9


class Sample(NamedTuple):
    """The terms of an algorithm and its measured time."""

    terms: Terms
    seconds: float


class Fit(NamedTuple):
    """A link, and the median relative error of the samples."""

    link: Link
    error: float


def fit(samples: Sequence[Sample]) -> Fit:
    """Return the link that fits the samples best.

    Weights follow Cauchy's loss at the scale of the median error, iterated. Needs at least one
    sample with a time above zero.
    """
    measured = [sample for sample in samples if sample.seconds > 0]
    assert measured, "nothing was measured"
    seconds = torch.tensor([sample.seconds for sample in measured], dtype=torch.float64)
    # Each row is the terms divided by the time, so the right-hand side is all ones.
    rows = torch.tensor([sample.terms for sample in measured], dtype=torch.float64)
    rows = rows / seconds[:, None]
    weights = torch.ones_like(seconds)
    for _ in range(_NUM_ROUNDS):
        units = _non_negative(rows, weights)
        errors = (rows @ units - 1).abs()
        scale = max(float(errors.median()), _LEAST_SCALE)
        weights = 1 / (1 + (errors / (2 * scale)) ** 2)
    return Fit(Link(*units.tolist()), float((rows @ units - 1).abs().median()))


def _non_negative(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the best units without negative ones, by trying all subsets of positive units."""
    best, least = torch.zeros(rows.shape[1], dtype=rows.dtype), float("inf")
    roots = weights.sqrt()
    scales = rows.abs().amax(0).clamp(min=1e-300)  # units differ by ten orders of magnitude
    for number in range(1, rows.shape[1] + 1):
        for some in map(list, combinations(range(rows.shape[1]), number)):
            matrix = rows[:, some] / scales[some] * roots[:, None]
            found = torch.linalg.lstsq(matrix, roots[:, None], driver="gelsd").solution[:, 0]
            error = float(((matrix @ found - roots) ** 2).sum())
            if bool((found >= 0).all()) and error < least * (1 - 1e-12):
                best = torch.zeros(rows.shape[1], dtype=rows.dtype)
                best[some] = found / scales[some]
                least = error
    return best
