"""The learning rate as a pure function of the step: nothing to save, nothing to restore."""

import math

from torch.optim import Optimizer

from gpipe_hpc.config import Config


def lr_at(step: int, config: Config) -> float:
    """Return the learning rate of the step that follows `step` finished ones.

    Rises linearly over ``lr.warmup_steps`` and reaches ``optimizer.lr`` at the last of them, then
    follows half a cosine down to ``lr.min_ratio`` of it at ``train.steps``, or stays. Past
    ``train.steps`` it stays at the end's value.
    """
    assert step >= 0, f"step {step}"
    peak, shape = config.optimizer.lr, config.lr
    if step < shape.warmup_steps:
        return peak * (step + 1) / shape.warmup_steps
    if shape.decay == "constant":
        return peak
    num_steps = max(1, config.train.steps - shape.warmup_steps)
    progress = min(1.0, (step - shape.warmup_steps) / num_steps)
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak * (shape.min_ratio + (1.0 - shape.min_ratio) * cosine)


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Give all parameter groups this learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = lr
