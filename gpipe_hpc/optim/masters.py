"""Float32 master copies of 16-bit weights, which the optimizer updates in their place.

A bfloat16 has 8 bits of precision: changes below 1/256 of a weight are lost, as are small changes
of the optimizer's averages. So the optimizer updates a float32 master of each such weight, and the
weight is the rounded master. Masters are part of the optimizer state under the key `master`, so
that checkpoints store them by the weight's global name.
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
    """Return whether a parameter has a 16-bit dtype."""
    return parameter.dtype in _LOW


def keep_masters(optimizer: Optimizer) -> Optimizer:
    """Make an optimizer update float32 masters of its 16-bit weights; return the same optimizer.

    Each such weight costs 4 more bytes per element, its optimizer state is float32, and a step
    needs a float32 copy of the gradient. If a weight is modified between steps, its master is
    updated to match.
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
            # Only after the step, because optimizers initialize parameters with empty state.
            own.state[parameter][MASTER] = masters[parameter]
        for parameters in _alike(list(masters)):
            torch._foreach_copy_([*parameters], [masters[p] for p in parameters])
        swapped.clear()

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    return optimizer


def drop_masters(optimizer: Optimizer) -> Optimizer:
    """Make an optimizer discard masters loaded from a checkpoint; return the same optimizer.

    The next step discards them.
    """

    def before(own: Optimizer, args: Any, kwargs: Any) -> None:
        for parameter in _with_gradient(own):
            if own.state.get(parameter, {}).pop(MASTER, None) is not None:
                _cast_states(own.state[parameter], torch.float32, parameter.dtype)
            if parameter in own.state and not own.state[parameter]:
                del own.state[parameter]

    optimizer.register_step_pre_hook(before)
    return optimizer


def _with_gradient(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the optimizer's 16-bit weights that have a gradient."""
    groups = (group["params"] for group in optimizer.param_groups)
    return [p for params in groups for p in params if is_low(p) and p.grad is not None]


def _alike(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield groups of parameters with equal dtype and device, for multi-tensor kernels."""
    kinds: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter in parameters:
        kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    yield from kinds.values()


def _wide(tensors: list[Tensor]) -> list[Tensor]:
    """Return float32 copies of the tensors."""
    if any(tensor.layout is not torch.strided for tensor in tensors):
        return [tensor.float() for tensor in tensors]
    copies = [torch.empty_like(tensor, dtype=torch.float32) for tensor in tensors]
    if copies:
        torch._foreach_copy_(copies, tensors)
    return copies


def _masters(own: Optimizer, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Return the float32 masters of weights; those of modified weights are updated first."""
    found = {p: own.state[p][MASTER] for p in parameters if MASTER in own.state.get(p, {})}
    new = [parameter for parameter in parameters if parameter not in found]
    # One by one on the host, where kernel launches are cheap.
    for pack in packs(list(found), 0 if on_host(parameters[0]) else PACK):
        _update_changed_masters([found[parameter] for parameter in pack], pack)
    found |= dict(zip(new, _wide([parameter.detach() for parameter in new]), strict=True))
    return [found[parameter] for parameter in parameters]


def _update_changed_masters(masters: list[Tensor], weights: Sequence[Tensor]) -> None:
    """Set masters to their weights where weights were modified since the last step."""
    kept, low = _concatenated(masters), _concatenated(weights)
    is_same = kept.to(low.dtype) == low
    # Only on the host, since reading the result from a device would synchronize.
    if on_host(is_same) and bool(is_same.all()):
        return
    row = torch.where(is_same, kept, low.float())
    parts = torch.split(row, [master.numel() for master in masters])
    torch._foreach_copy_(
        masters, [part.view(master.shape) for part, master in zip(parts, masters, strict=True)]
    )


def _concatenated(tensors: Sequence[Tensor]) -> Tensor:
    rows = [tensor.detach().reshape(-1) for tensor in tensors]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def _cast_states(state: dict[str, Any], old: torch.dtype, new: torch.dtype) -> None:
    """Cast the optimizer state of a weight between dtypes, except its step counter."""
    for key, value in state.items():
        if key != "step" and isinstance(value, Tensor) and value.dtype == old:
            state[key] = value.to(new)
