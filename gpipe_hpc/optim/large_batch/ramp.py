"""Batch size ramp: the global batch size of each step, computed from the step number alone."""

from gpipe_hpc.settings import TrainConfig


def batch_size_at(step: int, train: TrainConfig) -> int:
    """Return the global batch size of the step after `step` finished ones.

    The size grows from ``train.batch_ramp.start`` to ``train.batch_size`` over
    ``train.batch_ramp.steps`` steps, in equal increments of ``train.batch_ramp.increment`` samples.
    The last batch of an epoch may be smaller.
    """
    assert step >= 0, f"step {step}"
    ramp, full = train.batch_ramp, train.batch_size
    if ramp.start is None or step >= ramp.steps:
        return full
    grown = (full - ramp.start) * step // ramp.steps
    return ramp.start + grown // ramp.increment * ramp.increment


def smallest_batch(num_samples: int, num_steps: int, train: TrainConfig) -> int:
    """Return the size of the smallest batch in the first `num_steps` steps of a run.

    `num_samples`: samples of an epoch, whose last batch may be smaller than the others.
    """
    smallest, offset, step = num_samples, 0, 0
    while step < num_steps:
        wanted = batch_size_at(step, train)
        size = min(wanted, num_samples - offset)
        smallest = min(smallest, size)
        if wanted == train.batch_size and offset == 0:
            # All later epochs are divided the same way.
            tail = num_samples % wanted
            is_reached = num_steps - step >= -(-num_samples // wanted)
            return min(smallest, tail) if tail and is_reached else smallest
        offset = (offset + size) % num_samples
        step += 1
    return smallest
