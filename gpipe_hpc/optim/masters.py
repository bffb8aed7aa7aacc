"""Weights in 16 bits with masters in float32, which the optimizer changes in their place.

A bfloat16 has 8 bits of precision: what is added to a weight is lost below 1/256 of it, and so is
what a small change adds to the optimizer's means. So the optimizer works on a master of each such
weight, in float32, and the weight is what the master rounds to. A master is part of the
optimizer's state, as `master`: checkpoints keep it by the weight's global name.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gpipe_hpc.comm.collectives.packed import PACK, packs
from gpipe_hpc.device.device import on_host

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
        for parameters in _alike(_with_gradient(own)):
            gradients = [p.grad for p in parameters if p.grad is not None]
            for parameter, gradient, master, wide in zip(
                parameters, gradients, _masters(own, parameters), _wide(gradients), strict=True
            ):
                swapped.append((parameter, parameter.data, gradient))
                _cast_states(own.state.get(parameter, {}), parameter.dtype, torch.float32)
                parameter.grad = None
                parameter.data = master
                parameter.grad = wide

    @torch.no_grad()
    def after(own: Optimizer, args: Any, kwargs: Any) -> None:
        masters = {parameter: parameter.data for parameter, _, _ in swapped}
        for parameter, low, gradient in swapped:
            parameter.grad = None
            parameter.data = low
            parameter.grad = gradient
            # Not before the step: optimizers begin where their state is empty.
            own.state[parameter][MASTER] = masters[parameter]
        for parameters in _alike(list(masters)):
            torch._foreach_copy_([*parameters], [masters[p] for p in parameters])
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


def _alike(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield parameters of one dtype and device together: so few kernels do for all of them."""
    kinds: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter in parameters:
        kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    yield from kinds.values()


def _wide(tensors: list[Tensor]) -> list[Tensor]:
    """Return copies in float32."""
    if any(tensor.layout is not torch.strided for tensor in tensors):
        return [tensor.float() for tensor in tensors]
    copies = [torch.empty_like(tensor, dtype=torch.float32) for tensor in tensors]
    if copies:
        torch._foreach_copy_(copies, tensors)
    return copies


def _masters(own: Optimizer, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Return the float32 of weights: what was kept, where that still rounds to the weight."""
    found = {p: own.state[p][MASTER] for p in parameters if MASTER in own.state.get(p, {})}
    new = [parameter for parameter in parameters if parameter not in found]
    # On the host, where kernels cost nothing to start, one by one.
    for pack in packs(list(found), 0 if on_host(parameters[0]) else PACK):
        _follow([found[parameter] for parameter in pack], pack)
    found |= dict(zip(new, _wide([parameter.detach() for parameter in new]), strict=True))
    return [found[parameter] for parameter in parameters]


def _follow(masters: list[Tensor], weights: Sequence[Tensor]) -> None:
    """Let masters take over what was changed in their weights since."""
    kept, low = _in_a_row(masters), _in_a_row(weights)
    is_same = kept.to(low.dtype) == low
    # Only where nobody waits for a device to say it.
    if on_host(is_same) and bool(is_same.all()):
        return
    row = torch.where(is_same, kept, low.float())
    parts = torch.split(row, [master.numel() for master in masters])
    torch._foreach_copy_(
        masters, [part.view(master.shape) for part, master in zip(parts, masters, strict=True)]
    )


def _in_a_row(tensors: Sequence[Tensor]) -> Tensor:
    rows = [tensor.detach().reshape(-1) for tensor in tensors]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def _cast_states(state: dict[str, Any], old: torch.dtype, new: torch.dtype) -> None:
    """Cast what an optimizer keeps of a weight; its count of steps is no such number."""
    for key, value in state.items():
        if key != "step" and isinstance(value, Tensor) and value.dtype == old:
            state[key] = value.to(new)
