"""Validation loss and metrics, computed through the pipeline."""

from collections import defaultdict
from collections.abc import Callable
from contextlib import closing
from typing import NamedTuple

from gpipe_hpc.trainer.session import Session


class Validation(NamedTuple):
    """Mean loss and metrics over the validation samples."""

    loss: float
    metrics: dict[str, float]


def validate(session: Session, stops: Callable[[], bool]) -> Validation | None:
    """Evaluate all validation samples; return None if there are none or if the run is stopped.

    Batches are weighted as the loss requires: by samples, or by the tokens that are not ignored.
    `stops` is called after each batch, with the same result on every rank, and ends the evaluation
    if it returns True.
    """
    total = weight = 0.0
    sums: dict[str, float] = defaultdict(float)
    weights: dict[str, float] = defaultdict(float)
    with closing(session.validation_batches()) as batches:
        for batch in batches:
            result = session.pipe.evaluate(batch.inputs, batch.targets)
            total += result.loss * result.weight
            weight += result.weight
            for name, (part, count) in result.metric_sums.items():
                sums[name] += part
                weights[name] += count
            if stops():
                return None
    if not weight:
        return None
    metrics = {name: sums[name] / weights[name] for name in sums if weights[name]}
    return Validation(total / weight, metrics)
