"""The last step of a run."""

from gpipe_hpc.settings import TrainConfig


def last_step(train: TrainConfig) -> int:
    """Return the step after which the run ends: the smaller of train.steps and train.stop_at."""
    return train.steps if train.stop_at is None else min(train.steps, train.stop_at)
