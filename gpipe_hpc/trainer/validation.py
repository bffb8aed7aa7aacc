"""The validation loss, through the pipeline, over every sample."""

from collections import defaultdict
from collections.abc import Callable
from contextlib import closing
from typing import NamedTuple

from gpipe_hpc.trainer.session import Session


class Validation(NamedTuple):
    """The loss over the validation samples, and the means of the metrics."""

    loss: float
    metrics: dict[str, float]


def validate(session: Session, stops: Callable[[], bool]) -> Validation | None:
    """Evaluate on the validation samples, the tail included; None if there are none.

    Batches are weighted as the loss says (by samples, or by tokens not ignored). `stops`: asked
    after each batch, the same answer on every rank, whether to leave it; then None too.
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
