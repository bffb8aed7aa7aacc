"""The validation loss, through the pipeline, over every sample."""

from contextlib import closing

from gpipe_hpc.training.session import Session


def validate(session: Session) -> float | None:
    """Return the loss over the validation samples, the tail included; None if there are none.

    Batches are weighted as the loss says (by samples, or by tokens not ignored).
    """
    total = weight = 0.0
    with closing(session.validation_batches()) as batches:
        for batch in batches:
            result = session.pipe.evaluate(batch.inputs, batch.targets)
            total += result.loss * result.weight
            weight += result.weight
    return total / weight if weight else None
