"""Learning rate schedule: the learning rate of each step, computed from the step number alone."""

import math

from torch.optim import Optimizer

from gpipe_hpc.optim.large_batch.ramp import batch_size_at
from gpipe_hpc.settings import Config


def lr_at(step: int, config: Config) -> float:
    """Return the learning rate of the step after `step` finished ones.

    The rate rises linearly over ``lr.warmup_steps`` from ``lr.start_ratio`` of ``optimizer.lr`` to
    the peak, then follows half a cosine down to ``lr.min_ratio`` of the peak at ``train.steps``, or
    stays constant. Later steps keep the final value. The peak is ``optimizer.lr`` times the batch
    size scaling (`scale_at`). With AdaScale, `step` counts steps of the base batch, and the result
    is to be multiplied by the gain.
    """
    assert step >= 0, f"step {step}"
    peak, shape = config.optimizer.lr * scale_at(step, config), config.lr
    if step < shape.warmup_steps:
        start = config.optimizer.lr * shape.start_ratio
        return start + (peak - start) * (step + 1) / shape.warmup_steps
    if shape.decay == "constant":
        return peak
    num_steps = max(1, config.train.steps - shape.warmup_steps)
    progress = min(1.0, (step - shape.warmup_steps) / num_steps)
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak * (shape.min_ratio + (1.0 - shape.min_ratio) * cosine)


def scale_at(step: int, config: Config) -> float:
    """Return the factor by which ``optimizer.lr`` is scaled for the batch size of a step.

    With ``lr.base_batch_size``: batch / base (``lr.scaling=linear``: Goyal et al., Accurate, large
    minibatch SGD, 2017, section 2.1) or its square root; else 1. AdaScale measures its own factor.
    """
    base, scaling = config.lr.base_batch_size, config.lr.scaling
    if base is None or scaling == "adascale":
        return 1.0
    scale = batch_size_at(step, config.train) / base
    return math.sqrt(scale) if scaling == "sqrt" else scale


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate of all parameter groups."""
    for group in optimizer.param_groups:
        group["lr"] = lr
