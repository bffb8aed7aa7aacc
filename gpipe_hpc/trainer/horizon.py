"""Where a run ends."""

from gpipe_hpc.settings import TrainConfig


def last_step(train: TrainConfig) -> int:
    """Return the step after which the run ends."""
    return train.steps if train.stop_at is None else min(train.steps, train.stop_at)
