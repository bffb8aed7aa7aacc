"""The validation loss, through the pipeline, over every sample."""

from gpipe_hpc.comm.world import together
from gpipe_hpc.training.data import sequential_batches
from gpipe_hpc.training.session import Session


def validate(session: Session) -> float | None:
    """Return the loss over the validation samples, the tail included; None if there are none.

    Batches are weighted as the loss says (by samples, or by tokens not ignored).
    """
    dataset, train = session.source.validation, session.config.train
    total = weight = 0.0
    for indices in sequential_batches(
        dataset.num_samples, train.batch_size, train.validate_batches
    ):
        with together(session.pipe.world, "reading validation samples"):
            inputs, targets = session.read(dataset, indices)
        result = session.pipe.evaluate(inputs, targets)
        total += result.loss * result.weight
        weight += result.weight
    return total / weight if weight else None
