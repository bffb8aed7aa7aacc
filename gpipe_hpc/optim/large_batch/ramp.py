"""The size of the global batch as a pure function of the step: nothing to save or restore."""

from gpipe_hpc.settings import TrainConfig


def batch_size_at(step: int, train: TrainConfig) -> int:
    """Return the samples of the global batch of the step that follows `step` finished ones.

    It grows from ``train.batch_ramp.start`` to ``train.batch_size`` over ``train.batch_ramp.steps``
    steps, linearly in stairs of ``train.batch_ramp.increment`` samples. An epoch's last batch may
    have fewer.
    """
    assert step >= 0, f"step {step}"
    ramp, full = train.batch_ramp, train.batch_size
    if ramp.start is None or step >= ramp.steps:
        return full
    grown = (full - ramp.start) * step // ramp.steps
    return ramp.start + grown // ramp.increment * ramp.increment


def smallest_batch(num_samples: int, num_steps: int, train: TrainConfig) -> int:
    """Return the samples of the smallest batch among the first steps of a run.

    `num_samples`: of an epoch, whose last batch may be smaller than those before.
    """
    smallest, offset, step = num_samples, 0, 0
    while step < num_steps:
        wanted = batch_size_at(step, train)
        size = min(wanted, num_samples - offset)
        smallest = min(smallest, size)
        if wanted == train.batch_size and offset == 0:
            # From here on all epochs are cut alike.
            tail = num_samples % wanted
            is_reached = num_steps - step >= -(-num_samples // wanted)
            return min(smallest, tail) if tail and is_reached else smallest
        offset = (offset + size) % num_samples
        step += 1
    return smallest
