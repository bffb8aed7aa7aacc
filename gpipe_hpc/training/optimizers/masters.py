"""Weights in 16 bits with masters in float32, which the optimizer changes in their place.

A bfloat16 has 8 bits of precision: what is added to a weight is lost below 1/256 of it, and so is
what a small change adds to the optimizer's means. So the optimizer works on a master of each such
weight, in float32, and the weight is what the master rounds to. A master is part of the
optimizer's state, as `master`: checkpoints keep it by the weight's global name.
"""

from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gpipe_hpc.comm.device import on_host

MASTER: Final = "master"
_LOW: Final = (torch.bfloat16, torch.float16)


def is_low(parameter: Tensor) -> bool:
    """Say whether a parameter is of 16 bits."""
    return parameter.dtype in _LOW


def keep_masters(optimizer: Optimizer) -> Optimizer:
    """Let an optimizer step on float32 masters of its weights in 16 bits; return the same one.

    For each such weight it keeps 4 bytes a number more, its own state is float32, and during a
    step there is a float32 copy of the gradient. A weight that was changed between two steps goes
    on from what it was changed to.
    """
    swapped: list[tuple[nn.Parameter, Tensor, Tensor]] = []

    @torch.no_grad()
    def before(own: Optimizer, args: Any, kwargs: Any) -> None:
        for parameter in _with_gradient(own):
            gradient, low = parameter.grad, parameter.data
            assert gradient is not None, "chosen so"
            state = own.state.get(parameter, {})
            swapped.append((parameter, low, gradient))
            master = _master(parameter, state.get(MASTER))
            _cast_states(state, low.dtype, torch.float32)
            parameter.grad = None
            parameter.data = master
            parameter.grad = gradient.float()

    @torch.no_grad()
    def after(own: Optimizer, args: Any, kwargs: Any) -> None:
        for parameter, low, gradient in swapped:
            master = parameter.data
            parameter.grad = None
            parameter.data = low
            parameter.copy_(master)
            parameter.grad = gradient
            # Not before the step: optimizers begin where their state is empty.
            own.state[parameter][MASTER] = master
        swapped.clear()

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    return optimizer


def drop_masters(optimizer: Optimizer) -> Optimizer:
    """Let an optimizer go on without the masters that a checkpoint may have; return the same."""

    def before(own: Optimizer, args: Any, kwargs: Any) -> None:
        for parameter in _with_gradient(own):
            if own.state.get(parameter, {}).pop(MASTER, None) is not None:
                _cast_states(own.state[parameter], torch.float32, parameter.dtype)
            if parameter in own.state and not own.state[parameter]:
                del own.state[parameter]

    optimizer.register_step_pre_hook(before)
    return optimizer


def _with_gradient(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the weights in 16 bits that a step changes."""
    groups = (group["params"] for group in optimizer.param_groups)
    return [p for params in groups for p in params if is_low(p) and p.grad is not None]


def _master(parameter: nn.Parameter, kept: Tensor | None) -> Tensor:
    """Return the float32 of a weight: what was kept, where that still rounds to the weight."""
    wide = parameter.detach().float()
    if kept is None:
        return wide
    is_same = kept.to(parameter.dtype) == parameter
    # Only where nobody waits for a device to say it.
    if on_host(is_same) and bool(is_same.all()):
        return kept
    return torch.where(is_same, kept, wide)


def _cast_states(state: dict[str, Any], old: torch.dtype, new: torch.dtype) -> None:
    """Cast what an optimizer keeps of a weight; its count of steps is no such number."""
    for key, value in state.items():
        if key != "step" and isinstance(value, Tensor) and value.dtype == old:
            state[key] = value.to(new)
