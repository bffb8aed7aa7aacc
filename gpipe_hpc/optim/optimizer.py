"""Optimizers from the settings: weight decay on matrices alone, and ranks without parameters."""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from gpipe_hpc.errors import ConfigError
from gpipe_hpc.optim.adamw import AdamW
from gpipe_hpc.optim.large_batch.lamb import LAMB
from gpipe_hpc.optim.large_batch.lars import LARS
from gpipe_hpc.optim.masters import drop_masters, is_low, keep_masters
from gpipe_hpc.planner import OptimizerMemory
from gpipe_hpc.settings import (
    AdamWConfig,
    LAMBConfig,
    LARSConfig,
    OptimizerConfig,
    RMSPropConfig,
    SGDConfig,
)

log = logging.getLogger("gpipe_hpc.train")

NamedParameters = Iterable[tuple[str, nn.Parameter]]


def build_optimizer(
    named_parameters: NamedParameters, config: OptimizerConfig
) -> torch.optim.Optimizer:
    """Return the configured optimizer over this rank's parameters; there may be none.

    Weights in 16 bits get float32 masters (`keep_masters`) unless ``config.masters`` is false: then
    a warning says so. Frozen parameters are left out. Parameters of two or more dimensions decay,
    biases and norms do not; nor do LARS and LAMB adapt their steps, unless
    ``config.adapt_vectors``. The groups carry ``param_names``, the global names, in the order
    given.
    """
    trained = [(name, each) for name, each in named_parameters if each.requires_grad]
    decayed = [(name, each) for name, each in trained if each.ndim >= 2]
    plain = [(name, each) for name, each in trained if each.ndim < 2]
    groups: list[dict[str, Any]] = [
        {"params": parameters, "weight_decay": decay, **_adapted(config, is_plain=is_plain)}
        for parameters, decay, is_plain in (
            (decayed, config.weight_decay, False),
            (plain, 0.0, True),
        )
        if parameters
    ]
    if not groups:
        # Torch refuses no groups at all, but takes one without parameters: nothing to step.
        groups = [{"params": []}]
    optimizer = _of_kind(groups, config)
    if config.masters:
        return keep_masters(optimizer)
    low = next((name for name, each in trained if is_low(each)), None)
    if low is not None:
        log.warning(
            "optimizer: %s has weights in 16 bits without masters (optimizer.masters=false): steps "
            "below 1/256 of a weight are lost in bfloat16, and weights stand still at small "
            "learning rates",
            low,
        )
    return drop_masters(optimizer)


def _of_kind(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    match config:
        case AdamWConfig():
            beta1, beta2 = config.betas
            return AdamW(groups, config.lr, (beta1, beta2), config.eps)
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
        case LARSConfig():
            return LARS(groups, config.lr, momentum=config.momentum, trust=config.trust)
        case LAMBConfig():
            beta1, beta2 = config.betas
            return LAMB(groups, config.lr, betas=(beta1, beta2), eps=config.eps)
    raise ConfigError(
        f"optimizer: unknown kind, expected one of conf/optimizer, got {type(config).__name__}; "
        f"choose optimizer=adamw, sgd, rmsprop, lars or lamb"
    )


def _adapted(config: OptimizerConfig, *, is_plain: bool) -> dict[str, bool]:
    """Return whether steps follow the norms of the group's parameters, where the kind does so."""
    if not isinstance(config, LARSConfig | LAMBConfig):
        return {}
    return {"adapt": config.adapt_vectors or not is_plain}


@contextmanager
def own_options(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Keep the groups' options over a load: a run is resumed with the settings it is given."""
    given = [dict(group) for group in optimizer.param_groups]
    yield
    for group, options in zip(optimizer.param_groups, given, strict=True):
        group.update(options)


def optimizer_memory(config: OptimizerConfig) -> OptimizerMemory:
    """Return what the optimizer keeps for each parameter, and makes of it in a step."""
    states, made, of_all = _numbers_per_parameter(config)
    return OptimizerMemory(states, config.masters, temporaries=made, of_all_on_device=of_all)


def _numbers_per_parameter(config: OptimizerConfig) -> tuple[int, int, int | None]:
    """Return how many numbers stay for each of a parameter, and how many a step makes of one.

    And, where torch takes all of a device at once, how many of each it makes then.
    """
    decays = int(config.weight_decay > 0)
    match config:
        case AdamWConfig():
            return 2, 0, 0
        case SGDConfig():
            return int(config.momentum > 0), decays + config.nesterov, decays
        case RMSPropConfig():
            states = 1 + int(config.momentum > 0) + int(config.centered)
            # One by one it keeps what it made of a weight until it has that of the next.
            return states, decays + 2, decays + 1
        case LARSConfig():
            return int(config.momentum > 0), 1, None
        case LAMBConfig():
            return 2, 2, None
    raise ConfigError(
        f"optimizer: unknown kind, expected one of conf/optimizer, got {type(config).__name__}; "
        f"choose optimizer=adamw, sgd, rmsprop, lars or lamb"
    )
