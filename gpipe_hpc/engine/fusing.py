"""Linear layers whose weight gradients are added up by the matrix product that makes them.

Autograd makes the gradient of a weight for one micro-batch and adds it to `.grad`: a pass over two
matrices of the weight's size, which for short micro-batches costs as much as a tenth of the
product. Here the product adds to `.grad` itself. Where it sums in blocks (beyond some hundred rows)
the last bits differ from those of two steps.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import nn

from gpipe_hpc.engine.backward.calls import accumulate_gradients, edge_of
from gpipe_hpc.engine.backward.joints import gradient_with_graph
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
    if type(weight) is not nn.Parameter or weight.numel() < SMALLEST_WEIGHT[splits]:
        return False
    if weight.dim() != 2 or weight.dtype not in _FLOATS or not weight.requires_grad:
        return False
    if bias is not None and (type(bias) is not nn.Parameter or bias.shape != weight.shape[:1]):
        return False
    if type(input) not in (torch.Tensor, nn.Parameter) or input.is_nested:
        return False
    if input.layout is not torch.strided or torch.is_autocast_enabled(weight.device.type):
        return False
    return not (has_hooks(weight) or (bias is not None and has_hooks(bias)))


def has_hooks(parameter: nn.Parameter) -> bool:
    """Say whether somebody is to be told of a parameter's gradient, other than by its node."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


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

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """Return the weight, and the bias if there is one."""
        return (self._weight,) if self._bias is None else (self._weight, self._bias)

    def leave(self, gradient: torch.Tensor) -> None:
        """Leave the gradients of the parameters; `gradient` is that of the output."""
        self._leave(self, gradient)

    def input_gradients(self, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradient of the input, if it has one."""
        if not self._is_asked:
            return ()
        self._check()
        with self._as_written():
            if torch.is_grad_enabled():
                return (gradient_with_graph(gradient, self._weight, self._held),)
            return (gradient.matmul(self._held),)

    def accumulate(self, gradient: torch.Tensor) -> None:
        """Add the parameters' gradients to their `.grad`; `gradient` is that of the output.

        Once: the input is let go, as the graph that holds this call lives until the last layer.
        """
        self._check()
        self._is_done = True
        rows = gradient.reshape(-1, gradient.shape[-1])
        inputs = self.input.reshape(-1, self.input.shape[-1])
        self.input = inputs.new_empty(0)
        weight, bias = self._weight, self._bias
        with torch.no_grad(), self._as_written():
            if has_hooks(weight):  # given since the forward
                accumulate_gradients([edge_of(weight)], [rows.t().mm(inputs)])
            elif weight.grad is None:
                weight.grad = rows.t().mm(inputs)
            else:
                weight.grad.addmm_(rows.t(), inputs)
            if bias is None or not bias.requires_grad:
                return
            if has_hooks(bias):
                accumulate_gradients([edge_of(bias)], [rows.sum(0)])
            elif bias.grad is None:
                bias.grad = rows.sum(0)
            else:
                bias.grad.add_(rows.sum(0))

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
