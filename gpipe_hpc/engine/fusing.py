"""Linear layers whose weight gradients are added up by the matrix product that makes them.

Autograd makes the gradient of a weight for one micro-batch and adds it to `.grad`: a pass over two
matrices of the weight's size, which for short micro-batches costs as much as a tenth of the
product. Here the product adds to `.grad` itself. Where it sums in blocks (beyond some hundred rows)
the last bits differ from those of two steps.
"""

from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import nn

from gpipe_hpc.errors import ModelError

# Elements below which the pass that is saved is shorter than the Python that saves it; by whether
# the backward is split, as Python then makes a call of each layer anyway.
SMALLEST_WEIGHT: Final = {True: 1 << 16, False: 1 << 19}

_FLOATS: Final = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})


def largest_weight(modules: Iterable[nn.Module]) -> int:
    """Return the elements of the largest weight of a linear layer; 0 where there is none."""
    linears = (m for module in modules for m in module.modules() if isinstance(m, nn.Linear))
    return max((m.weight.numel() for m in linears), default=0)


def may_fuse(weight: nn.Parameter, bias: nn.Parameter | None, *, splits: bool) -> bool:
    """Say whether nobody but `.grad` is told of the gradients of a large matrix."""
    if weight.numel() < SMALLEST_WEIGHT[splits] or weight.dtype not in _FLOATS:
        return False
    return weight.requires_grad and not any(
        each is not None and (each._backward_hooks or each._post_accumulate_grad_hooks)
        for each in (weight, bias)
    )


class LinearCall:
    """One call of a linear layer: what its gradients are made of.

    `leave` is given the call and the gradient of its output, when the backward comes by.
    """

    __slots__ = ("_bias", "_is_asked", "_leave", "_versions", "_weight", "input", "output")

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
        with torch.no_grad():
            self.output: torch.Tensor | None = F.linear(self.input, weight, bias)
        self._versions = (self.input._version, weight._version)

    def input_gradients(self, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradient of the input, and leave those of the parameters."""
        self._check()
        given = gradient.matmul(self._weight.detach()) if self._is_asked else None
        self._leave(self, gradient)
        return (given,)

    def accumulate(self, gradient: torch.Tensor) -> None:
        """Add the parameters' gradients to their `.grad`; `gradient` is that of the output.

        Once: the input is let go, as the graph that holds this call lives until the last layer.
        """
        self._check()
        rows = gradient.reshape(-1, gradient.shape[-1])
        inputs = self.input.reshape(-1, self.input.shape[-1])
        self.input = inputs.new_empty(0)
        with torch.no_grad():
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

    def _check(self) -> None:
        if self._versions != (self.input._version, self._weight._version):
            shape: Any = tuple(self._weight.shape)
            raise ModelError(
                f"fuse_accumulation: the input or the weight {shape} of a linear layer was "
                f"modified in place between its forward and its backward, expected as it was; "
                f"write into a copy"
            )
