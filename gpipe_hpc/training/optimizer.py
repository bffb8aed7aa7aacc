"""Optimizers from the settings: weight decay on matrices alone, and ranks without parameters."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from gpipe_hpc.config import AdamWConfig, OptimizerConfig, RMSPropConfig, SGDConfig
from gpipe_hpc.errors import ConfigError

NamedParameters = Iterable[tuple[str, nn.Parameter]]


def build_optimizer(
    named_parameters: NamedParameters, config: OptimizerConfig
) -> torch.optim.Optimizer:
    """Return the configured optimizer over this rank's parameters; there may be none.

    Frozen parameters are left out. Parameters of two or more dimensions decay, biases and norms do
    not. The groups carry ``param_names``, the global names, in the order given.
    """
    trained = [(name, each) for name, each in named_parameters if each.requires_grad]
    decayed = [(name, each) for name, each in trained if each.ndim >= 2]
    plain = [(name, each) for name, each in trained if each.ndim < 2]
    groups: list[dict[str, Any]] = [
        {"params": parameters, "weight_decay": decay}
        for parameters, decay in ((decayed, config.weight_decay), (plain, 0.0))
        if parameters
    ]
    if not groups:
        # Torch refuses no groups at all, but takes one without parameters: nothing to step.
        groups = [{"params": []}]
    match config:
        case AdamWConfig():
            beta1, beta2 = config.betas
            return torch.optim.AdamW(groups, lr=config.lr, betas=(beta1, beta2), eps=config.eps)
        case SGDConfig():
            return torch.optim.SGD(
                groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov
            )
        case RMSPropConfig():
            return torch.optim.RMSprop(
                groups,
                lr=config.lr,
                alpha=config.alpha,
                eps=config.eps,
                momentum=config.momentum,
                centered=config.centered,
            )
    raise ConfigError(
        f"optimizer: unknown kind, expected one of conf/optimizer, got {type(config).__name__}; "
        f"choose optimizer=adamw, sgd or rmsprop"
    )


@contextmanager
def own_options(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Keep the groups' options over a load: a run is resumed with the settings it is given."""
    given = [dict(group) for group in optimizer.param_groups]
    yield
    for group, options in zip(optimizer.param_groups, given, strict=True):
        group.update(options)


def states_per_parameter(config: OptimizerConfig) -> int:
    """Return how many numbers the optimizer keeps for each parameter."""
    match config:
        case AdamWConfig():
            return 2
        case SGDConfig():
            return int(config.momentum > 0)
        case RMSPropConfig():
            return 1 + int(config.momentum > 0) + int(config.centered)
    raise ConfigError(
        f"optimizer: unknown kind, expected one of conf/optimizer, got {type(config).__name__}; "
        f"choose optimizer=adamw, sgd or rmsprop"
    )
