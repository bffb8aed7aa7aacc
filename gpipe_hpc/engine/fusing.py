"""Linear layers whose weight gradients are added up by the matrix product that makes them.

Autograd makes the gradient of a weight for one micro-batch and adds it to `.grad`: a pass over two
matrices of the weight's size, which for short micro-batches costs as much as a tenth of the
product. Here the product adds to `.grad` itself. Where it sums in blocks (beyond some hundred rows)
the last bits differ from those of two steps.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import nn

from gpipe_hpc.errors import ModelError

# Elements below which the pass that is saved is shorter than the Python that saves it; by whether
# the backward is split, as Python then makes a call of each layer anyway.
SMALLEST_WEIGHT: Final = {True: 1 << 16, False: 1 << 19}

_NOTHING: Final = nullcontext()
_FLOATS: Final = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})


def largest_weight(modules: Iterable[nn.Module]) -> int:
    """Return the elements of the largest weight of a linear layer; 0 where there is none."""
    linears = (m for module in modules for m in module.modules() if isinstance(m, nn.Linear))
    # Not `m.weight`, which a parametrization would compute.
    weights = (m._parameters.get("weight") for m in linears)
    return max((w.numel() for w in weights if type(w) is nn.Parameter), default=0)


def may_fuse(input: Any, weight: Any, bias: Any = None, *, splits: bool) -> bool:
    """Say whether a call is one of a large matrix whose gradients nobody but `.grad` is told of.

    Not under autocast, which makes another weight of it. Hooks of a parameter's AccumulateGrad
    node are not seen.
    """
    parameters = [weight] if bias is None else [weight, bias]
    if any(type(each) is not nn.Parameter for each in parameters) or weight.dim() != 2:
        return False
    if weight.numel() < SMALLEST_WEIGHT[splits] or weight.dtype not in _FLOATS:
        return False
    if bias is not None and bias.shape != weight.shape[:1]:
        return False
    if type(input) not in (torch.Tensor, nn.Parameter) or input.is_nested:
        return False
    if input.layout is not torch.strided or torch.is_autocast_enabled(weight.device.type):
        return False
    has_hooks = any(p._backward_hooks or p._post_accumulate_grad_hooks for p in parameters)
    return bool(weight.requires_grad) and not has_hooks


class LinearCall:
    """One call of a linear layer: what its gradients are made of.

    `leave` is given the call and the gradient of its output, when the backward comes by.
    """

    __slots__ = (
        *("_bias", "_held", "_is_asked", "_is_done", "_leave", "_versions", "_weight"),
        *("input", "output"),
    )

    def __init__(
        self,
        input: torch.Tensor,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        leave: Callable[["LinearCall", torch.Tensor], None],
    ) -> None:
        self.input = input.detach()
        self._is_asked = input.requires_grad
        self._weight, self._bias, self._leave = weight, bias, leave
        # What the forward works with: `.data` of the parameter may be another one by and by.
        self._held = weight.detach()
        self._is_done = False
        with torch.no_grad():
            self.output: torch.Tensor | None = F.linear(self.input, weight, bias)
        self._versions = self._now()

    def input_gradients(self, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradient of the input, and leave those of the parameters."""
        self._check()
        given = None
        if self._is_asked:
            with self._as_written():
                given = gradient.matmul(self._held)
        self._leave(self, gradient)
        return (given,)

    def accumulate(self, gradient: torch.Tensor) -> None:
        """Add the parameters' gradients to their `.grad`; `gradient` is that of the output.

        Once: the input is let go, as the graph that holds this call lives until the last layer.
        """
        self._check()
        self._is_done = True
        rows = gradient.reshape(-1, gradient.shape[-1])
        inputs = self.input.reshape(-1, self.input.shape[-1])
        self.input = inputs.new_empty(0)
        with torch.no_grad(), self._as_written():
            if self._weight.grad is None:
                self._weight.grad = rows.t().mm(inputs)
            else:
                self._weight.grad.addmm_(rows.t(), inputs)
            if self._bias is not None and self._bias.requires_grad:
                total = rows.sum(0)
                if self._bias.grad is None:
                    self._bias.grad = total
                else:
                    self._bias.grad.add_(total)

    def _as_written(self) -> AbstractContextManager[Any]:
        """Return a block without the autocast of whoever runs the backward."""
        kind = self._held.device.type
        if not torch.is_autocast_enabled(kind):
            return _NOTHING
        return torch.autocast(kind, enabled=False)

    def _now(self) -> tuple[int, int]:
        """Return the versions of what the gradients are made of."""
        return self.input._version, self._held._version if self._is_asked else 0

    def _check(self) -> None:
        shape = tuple(self._held.shape)
        if self._is_done:
            raise ModelError(
                f"fuse_accumulation: the backward of one call of a linear layer {shape} ran twice, "
                f"expected once; train without fuse_accumulation"
            )
        if self._versions != self._now():
            raise ModelError(
                f"fuse_accumulation: the input or the weight {shape} of a linear layer was "
                f"modified in place between its forward and its backward, expected as it was; "
                f"write into a copy"
            )
