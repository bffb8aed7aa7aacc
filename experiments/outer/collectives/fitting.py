"""A link's alpha, beta and gamma from measured times.

Closed forms are linear in the three, so this is least squares; of relative errors, as times span
orders of magnitude; none of the three below zero; and points far from the rest weigh little.
"""

from collections.abc import Sequence
from itertools import combinations
from typing import Final, NamedTuple

import torch

from experiments.outer.collectives.costs import Link, Terms

_NUM_ROUNDS: Final = 30
_LEAST_SCALE: Final = 1e-9


class Sample(NamedTuple):
    """What an algorithm took over a vector."""

    terms: Terms
    seconds: float


class Fit(NamedTuple):
    """A link, and how well it tells the samples: the median of relative errors."""

    link: Link
    error: float


def fit(samples: Sequence[Sample]) -> Fit:
    """Return the link that tells the samples best.

    Relative errors are weighted as by Cauchy's loss at the scale of their median, round after
    round. Needs at least one sample with a time above zero.
    """
    measured = [sample for sample in samples if sample.seconds > 0]
    assert measured, "nothing was measured"
    seconds = torch.tensor([sample.seconds for sample in measured], dtype=torch.float64)
    # Each row says what share of the time each unit makes: the right side is all ones.
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
    """Return the best units, none negative: the best of those subsets that are alone above zero."""
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
