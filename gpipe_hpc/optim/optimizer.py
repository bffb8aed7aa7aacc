"""Build optimizers from settings, with weight decay only on matrices, also for empty ranks."""

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
    """Return the configured optimizer over this rank's parameters, which may be none.

    16-bit weights get float32 masters (`keep_masters`) unless ``config.masters`` is false, which
    logs a warning. Frozen parameters are left out. Weight decay applies to parameters of two or
    more dimensions, not to biases and norms; the same holds for the trust ratio of LARS and LAMB,
    unless ``config.adapt_vectors`` is set. Groups contain ``param_names``, the global names in the
    given order.
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
        # Torch requires at least one group, but it may be empty.
        groups = [{"params": []}]
    optimizer = _of_kind(groups, config)
    if config.masters:
        return keep_masters(optimizer)
    low = next((name for name, each in trained if is_low(each)), None)
    if low is not None:
        log.warning(
            "optimizer: %s has 16-bit weights without masters (optimizer.masters=false): in "
            "bfloat16, changes below 1/256 of a weight are lost, so weights do not change at small "
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
        f"optimizer: unknown kind {type(config).__name__}, not one of conf/optimizer; "
        f"choose optimizer=adamw, sgd, rmsprop, lars or lamb"
    )


def _adapted(config: OptimizerConfig, *, is_plain: bool) -> dict[str, bool]:
    """Return the `adapt` option of a parameter group for LARS and LAMB; empty for others."""
    if not isinstance(config, LARSConfig | LAMBConfig):
        return {}
    return {"adapt": config.adapt_vectors or not is_plain}


@contextmanager
def own_options(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Context that restores the options of parameter groups (lr, ...) after loading a checkpoint.

    A resumed run thus uses its own settings.
    """
    given = [dict(group) for group in optimizer.param_groups]
    yield
    for group, options in zip(optimizer.param_groups, given, strict=True):
        group.update(options)


def optimizer_memory(config: OptimizerConfig) -> OptimizerMemory:
    """Return the memory model of the configured optimizer."""
    states, made, of_all = _numbers_per_parameter(config)
    return OptimizerMemory(states, config.masters, temporaries=made, of_all_on_device=of_all)


def _numbers_per_parameter(config: OptimizerConfig) -> tuple[int, int, int | None]:
    """Return the numbers of state values and of temporaries per parameter element.

    The third number is that of temporaries if torch updates all parameters of a device at once.
    """
    decays = int(config.weight_decay > 0)
    match config:
        case AdamWConfig():
            return 2, 0, 0
        case SGDConfig():
            return int(config.momentum > 0), decays + config.nesterov, decays
        case RMSPropConfig():
            states = 1 + int(config.momentum > 0) + int(config.centered)
            # In single-tensor mode, temporaries of a weight are freed after the next one's exist.
            return states, decays + 2, decays + 1
        case LARSConfig():
            return int(config.momentum > 0), 1, None
        case LAMBConfig():
            return 2, 2, None
    raise ConfigError(
        f"optimizer: unknown kind {type(config).__name__}, not one of conf/optimizer; "
        f"choose optimizer=adamw, sgd, rmsprop, lars or lamb"
    )
