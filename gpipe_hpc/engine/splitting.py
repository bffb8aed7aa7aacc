"""Split a backward in two: `I`, the gradients of inputs, now; `W`, those of weights, later.

While a forward runs under `DeferWeights`, each call of a function that takes a parameter (linear,
convolution, embedding, norm, matrix product) becomes a graph of its own: its output is cut off
and joined to the outer graph by one node. The outer backward asks that node for the gradient of
the inputs alone and notes the gradient of the output; `W` is then one call of autograd over all
the small graphs, whose roots are known. Nobody walks a graph in Python.

Parameters used in any other way get their gradient in `I`: their `W` is empty. So it is within
functions that torch wraps whole, such as `F.multi_head_attention_forward`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

Function = Callable[..., Any]

_LINEAR: Final = frozenset({F.linear})
_SPLIT: Final = frozenset(
    {
        F.linear,
        F.bilinear,
        F.conv1d,
        F.conv2d,
        F.conv3d,
        F.conv_transpose1d,
        F.conv_transpose2d,
        F.conv_transpose3d,
        torch.conv1d,
        torch.conv2d,
        torch.conv3d,
        F.embedding,
        F.layer_norm,
        F.group_norm,
        F.rms_norm,
        F.batch_norm,
        F.instance_norm,
        torch.matmul,
        torch.mm,
        torch.bmm,
        torch.addmm,
        torch.baddbmm,
        torch.Tensor.matmul,
        torch.Tensor.__matmul__,
        torch.Tensor.__rmatmul__,
        torch.Tensor.mm,
        torch.Tensor.bmm,
        torch.Tensor.addmm,
    }
)


class Deferred:
    """The weight gradients of one micro-batch of a stage that wait for `W`."""

    def __init__(self) -> None:
        self._edges: list[GradientEdge] = []
        self._gradients: list[torch.Tensor] = []
        self._parameters: dict[int, nn.Parameter] = {}

    def __len__(self) -> int:
        """Return how many function calls wait."""
        return len(self._edges)

    def add(
        self, edge: GradientEdge, gradient: torch.Tensor, parameters: Iterable[nn.Parameter]
    ) -> None:
        """Note the gradient of a call's output."""
        self._edges.append(edge)
        self._gradients.append(gradient)
        self._parameters.update((id(p), p) for p in parameters)

    def run(self) -> None:
        """Accumulate all weight gradients, and release what they were kept for."""
        if self._edges:
            torch.autograd.backward(
                self._edges, self._gradients, inputs=list(self._parameters.values())
            )
        self._edges, self._gradients, self._parameters = [], [], {}


class DeferWeights(TorchFunctionMode):
    """Within it, forwards leave the gradients of their parameters to `deferred`."""

    def __init__(self, deferred: Deferred) -> None:
        super().__init__()
        self._deferred = deferred

    def __torch_function__(
        self,
        func: Function,
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one torch function; split it if it is of the kind and takes a parameter."""
        keywords = dict(kwargs or {})
        if func not in _SPLIT or not torch.is_grad_enabled():
            return func(*args, **keywords)
        parameters = [
            p
            for p in (*args, *keywords.values())
            if isinstance(p, nn.Parameter) and p.requires_grad
        ]
        if not parameters:
            return func(*args, **keywords)
        return _split_call(func, args, keywords, parameters, self._deferred)


def deferring(deferred: Deferred | None) -> AbstractContextManager[object]:
    """Return a block whose forwards leave weight gradients to `deferred`; None: a plain block."""
    return nullcontext() if deferred is None else DeferWeights(deferred)


def _split_call(
    func: Function,
    args: Sequence[Any],
    keywords: dict[str, Any],
    parameters: list[nn.Parameter],
    deferred: Deferred,
) -> Any:
    """Run `func` on cut-off inputs and join its output to the graph of the real ones."""
    inputs: list[torch.Tensor] = []
    cut_off: list[torch.Tensor] = []
    # A linear map's input gradient needs nothing that its own graph keeps: see _Joint.
    explicit = func in _LINEAR

    def apart(value: Any) -> Any:
        if isinstance(value, nn.Parameter) or not isinstance(value, torch.Tensor):
            return value
        if not value.requires_grad:
            return value
        leaf = value.detach().requires_grad_(not explicit)
        inputs.append(value)
        cut_off.append(leaf)
        return leaf

    new_args = [apart(value) for value in args]
    new_keywords = {name: apart(value) for name, value in keywords.items()}
    output = func(*new_args, **new_keywords)
    if not isinstance(output, torch.Tensor):
        return func(*args, **keywords)
    weight = args[1] if explicit and len(args) > 1 else keywords.get("weight")
    call = _Call(output, cut_off, parameters, weight if explicit else None, deferred)
    # The first parameter makes the node part of the graph where no input requires a gradient.
    join: Any = _Joint.apply
    return join(call, parameters[0], *inputs)


class _Call:
    """A function call with a graph of its own."""

    def __init__(
        self,
        output: torch.Tensor,
        leaves: list[torch.Tensor],
        parameters: list[nn.Parameter],
        weight: torch.Tensor | None,
        deferred: Deferred,
    ) -> None:
        self.output: torch.Tensor | None = output
        self.edge = get_gradient_edge(output)
        self.leaves = leaves
        self.parameters = parameters
        self.weight = weight
        self.deferred = deferred

    def input_gradients(self, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of the inputs, and leave those of the weights to `W`."""
        self.deferred.add(self.edge, gradient, self.parameters)
        if not self.leaves:
            return ()
        if self.weight is not None:
            product = gradient.matmul(self.weight.detach().to(gradient.dtype))
            return (product.to(self.leaves[0].dtype),)
        return torch.autograd.grad(
            (self.edge,), self.leaves, (gradient,), retain_graph=True, allow_unused=True
        )


class _Joint(torch.autograd.Function):
    """The node that stands for a call in the outer graph."""

    @staticmethod
    def forward(ctx: Any, call: _Call, anchor: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.call = call
        assert call.output is not None, "a call is joined once"
        output, call.output = call.output.detach(), None
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        call: _Call = ctx.call
        return (None, None, *call.input_gradients(gradients[0]))
