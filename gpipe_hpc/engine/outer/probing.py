"""Whether an optimizer's step on a matrix is its step on any part of the matrix's elements.

It is tried out: kinds of optimizers are many, and a name says nothing.
"""

from collections import OrderedDict, defaultdict
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from gpipe_hpc.errors import ConfigError

_ROWS, _COLUMNS, _CUT, _STEPS = 4, 3, 5, 2
# What an optimizer has for its own object.
_HOOKS: Final = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
)


def check_divisible(optimizer: Optimizer) -> None:
    """Raise ConfigError unless the optimizer's step goes element by element.

    Tries it with the options of each of its groups on a small matrix, whole and cut in two, with
    the same numbers. The optimizer itself stays as it is.
    """
    name = type(optimizer).__name__
    if any(optimizer.state.values()):
        raise ConfigError(
            f"outer.shard=flat: expected an optimizer that makes its state in its first step, got "
            f"{name}, which has made one for whole parameters already; use outer.shard=oss, which "
            f"divides whole tensors"
        )
    for group in optimizer.param_groups:
        try:
            whole, parts = (_moved(optimizer, group, cuts) for cuts in (False, True))
            # Held against how far it went: some go a thousandth of a weight.
            differ = not bool((whole - parts).abs().max() <= 1e-6 * whole.abs().max())
            found = "a step on a matrix that is not that of its elements"
        except Exception as error:
            differ, found = True, f"{type(error).__name__}: {error}"
        if differ:
            raise ConfigError(
                f"outer.shard=flat: expected an optimizer that updates each element by itself, got "
                f"{name}: {found}; use outer.shard=oss, which divides whole tensors"
            )


def _moved(optimizer: Optimizer, group: dict[str, Any], cuts: bool) -> torch.Tensor:
    """Return how far some steps move the elements of a matrix; `cuts`: as two parts of a row."""
    generator = torch.Generator().manual_seed(0)
    like = next(iter(group["params"]), torch.zeros(1))
    row = torch.randn(_ROWS * _COLUMNS, generator=generator).to(like.device, torch.float64)
    shapes = [row[:_CUT], row[_CUT:]] if cuts else [row.view(_ROWS, _COLUMNS)]
    parameters = [nn.Parameter(part.clone()) for part in shapes]
    probe = object.__new__(type(optimizer))
    probe.__dict__.update(optimizer.__dict__)
    probe.__dict__ |= {hooks: OrderedDict() for hooks in _HOOKS}
    probe.state = defaultdict(dict)
    probe.param_groups = [{**group, "params": parameters}]
    if not group.get("lr", 1.0):  # it rises later: what does not move tells nothing
        probe.param_groups[0]["lr"] = 1e-3
    for _ in range(_STEPS):
        gradient = torch.randn(_ROWS * _COLUMNS, generator=generator).to(like.device, torch.float64)
        split = [gradient[:_CUT], gradient[_CUT:]] if cuts else [gradient.view(_ROWS, _COLUMNS)]
        for parameter, part in zip(parameters, split, strict=True):
            parameter.grad = part
        probe.step()
    return torch.cat([parameter.detach().reshape(-1) for parameter in parameters]) - row
