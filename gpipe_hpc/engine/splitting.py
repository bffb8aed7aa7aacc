"""Split a backward in two: `I`, the gradients of inputs, now; `W`, those of weights, later.

While a forward runs under `DeferWeights`, each call of a function that takes a parameter (linear,
convolution, embedding, matrix product) becomes a graph of its own: its output is cut off
and joined to the outer graph by one node. The outer backward asks that node for the gradient of
the inputs alone and notes the gradient of the output; `W` is then one call of autograd over all
the small graphs, whose roots are known. Nobody walks a graph in Python.

Parameters used in any other way get their gradient in `I`: their `W` is empty. So it is in norms,
whose kernels make all gradients in one pass over the activations, within functions that torch
wraps whole (`F.multi_head_attention_forward`), in compiled layers, under functorch's transforms
and in what `torch.utils.checkpoint` runs again.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import GradientEdge
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from gpipe_hpc.engine.backward import accumulate_gradients, differentiate, edge_of
from gpipe_hpc.engine.fusing import LinearCall, may_fuse
from gpipe_hpc.errors import ModelError

Function = Callable[..., Any]

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
        F.embedding_bag,
        torch.matmul,
        torch.mm,
        torch.bmm,
        torch.addmm,
        torch.baddbmm,
        torch.einsum,
        torch.tensordot,
        torch.Tensor.matmul,
        torch.Tensor.__matmul__,
        torch.Tensor.__rmatmul__,
        torch.Tensor.mm,
        torch.Tensor.bmm,
        torch.Tensor.addmm,
    }
)


class Deferred:
    """The weight gradients of one micro-batch of a stage that wait for `W`.

    `hold` is told of the inputs of each call, which its graph keeps as they are. `fuses`: large
    linear layers add to `.grad` as `fusing` says. `splits`: whether there is a `W`; without it
    those add at once, and autograd does all else.
    """

    def __init__(
        self,
        hold: Callable[[Iterable[torch.Tensor]], None] | None = None,
        *,
        fuses: bool = False,
        splits: bool = True,
    ) -> None:
        self.hold, self.fuses, self.splits = hold, fuses, splits
        self.is_in_forward = False
        self._linears: list[tuple[LinearCall, torch.Tensor]] = []
        self._edges: list[GradientEdge] = []
        self._gradients: list[torch.Tensor] = []
        self._parameters: dict[int, nn.Parameter] = {}

    @contextmanager
    def in_forward(self) -> Iterator[None]:
        """Return a block within which nobody but a layer or the loss could call `add`."""
        self.is_in_forward = True
        try:
            yield
        finally:
            self.is_in_forward = False

    def __len__(self) -> int:
        """Return how many function calls wait."""
        return len(self._edges) + len(self._linears)

    def add(
        self, edge: GradientEdge, gradient: torch.Tensor, parameters: Iterable[nn.Parameter]
    ) -> None:
        """Note the gradient of a call's output; ModelError if a layer asked for it, not `I`."""
        self._refuse_others()
        self._edges.append(edge)
        self._gradients.append(gradient)
        for parameter in parameters:
            self._parameters[id(parameter)] = parameter

    def add_linear(self, call: LinearCall, gradient: torch.Tensor) -> None:
        """Note the gradient of a linear layer's output, or add up those of its parameters now."""
        self._refuse_others()
        if self.splits:
            self._linears.append((call, gradient))
        else:
            call.accumulate(gradient)

    def _refuse_others(self) -> None:
        if self.is_in_forward or torch.is_grad_enabled():
            raise ModelError(
                "split backward, or fuse_accumulation: a layer, or the loss, differentiates what "
                "was computed within its forward, expected that only in the backward; use "
                "torch.func.grad or torch.func.vjp there, or a schedule whose backward is B, "
                "without fuse_accumulation"
            )

    def run(self) -> None:
        """Accumulate all weight gradients, and release what they were kept for."""
        if self._edges:
            accumulate_gradients(self._edges, self._gradients, list(self._parameters.values()))
        for call, gradient in self._linears:
            call.accumulate(gradient)
        self._edges, self._gradients, self._parameters, self._linears = [], [], {}, []


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
        keywords = kwargs or {}
        deferred, is_linear = self._deferred, func is F.linear and not keywords
        if not (is_linear if not deferred.splits else func in _SPLIT) or not _may_split():
            return func(*args, **keywords)
        if is_linear and deferred.fuses and may_fuse(*args, splits=deferred.splits):
            return _fused_linear(*args, deferred=deferred)
        if not deferred.splits:
            return func(*args, **keywords)
        if is_linear and _is_plain_linear(*args):
            return _split_linear(*args, deferred=deferred)
        parameters = [p for p in (*args, *keywords.values()) if _is_trained(p)]
        if not parameters:
            return func(*args, **keywords)
        return _split_call(func, args, keywords, parameters, deferred)


def _may_split() -> bool:
    """Say whether what runs now is an ordinary forward: once, eager, with a graph."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    return not (torch._C._are_functorch_transforms_active() or _is_checkpointed())


def _is_checkpointed() -> bool:
    """Say whether `torch.utils.checkpoint` will run this again and compare what it saves."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return bool(hooks) and getattr(hooks[0], "__module__", None) == checkpoint.__name__


def _split_call(
    func: Function,
    args: Sequence[Any],
    keywords: Mapping[str, Any],
    parameters: list[nn.Parameter],
    deferred: Deferred,
) -> Any:
    """Run `func` on cut-off inputs and join its output to the graph of the real ones."""
    inputs = [value for value in (*args, *keywords.values()) if _is_input(value)]
    leaves: list[torch.Tensor] = []

    def apart(value: Any) -> Any:
        if not _is_input(value):
            return value
        leaves.append(value.detach().requires_grad_())
        # Autocast remembers casts of leaves for the whole step; only those of weights shall stay.
        is_cast = torch.is_autocast_enabled(value.device.type)
        return leaves[-1].view_as(leaves[-1]) if is_cast else leaves[-1]

    output = func(
        *(apart(value) for value in args),
        **{name: apart(value) for name, value in keywords.items()},
    )
    # Something must make the node part of the graph. No parameter: its hooks would be called.
    anchors = inputs or [torch.empty(0, requires_grad=True)]
    return _joined(_Call(output, leaves, parameters, None, deferred), leaves, deferred, anchors)


def _split_linear(
    input: torch.Tensor,
    weight: nn.Parameter,
    bias: nn.Parameter | None = None,
    *,
    deferred: Deferred,
) -> Any:
    """Do what `_split_call` does for the commonest call: its input gradient is one product."""
    leaf = input.detach()
    output = F.linear(leaf, weight, bias)
    parameters = [p for p in (weight, bias) if p is not None and p.requires_grad]
    call = _Call(output, [leaf], parameters, weight.detach(), deferred)
    return _joined(call, [leaf], deferred, [input])


def _fused_linear(
    input: torch.Tensor,
    weight: nn.Parameter,
    bias: nn.Parameter | None = None,
    *,
    deferred: Deferred,
) -> Any:
    """Run a linear layer without a graph of its own: its gradients are known."""
    call = LinearCall(input, weight, bias, deferred.add_linear)
    anchor = input if input.requires_grad else torch.empty(0, requires_grad=True)
    return _joined(call, [call.input], deferred, [anchor])


def _is_plain_linear(input: Any, weight: Any, bias: Any = None) -> bool:
    """Say whether the input's gradient is asked for and takes nothing but the weight itself.

    Not under autocast, which makes another weight of it that the call's own graph keeps.
    """
    return (
        type(weight) is nn.Parameter
        and weight.dim() == 2
        and (bias is None or type(bias) is nn.Parameter)
        and (weight.requires_grad or (bias is not None and bias.requires_grad))
        and _is_input(input)
        and not torch.is_autocast_enabled(weight.device.type)
    )


def _joined(
    call: "_Call | LinearCall",
    held: list[torch.Tensor],
    deferred: Deferred,
    anchors: Sequence[torch.Tensor],
) -> Any:
    """Return a call's output as part of the graph of `anchors`; it keeps `held` for that."""
    if deferred.hold is not None:
        deferred.hold(held)
    join: Any = _Joint.apply
    return join(call, *anchors)


def _is_trained(value: Any) -> bool:
    # Of the class itself: torch's own check of a Parameter looks at far more.
    return (
        isinstance(value, torch.Tensor)
        and value.requires_grad
        and (type(value) is nn.Parameter or isinstance(value, nn.Parameter))
    )


def _is_input(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or not value.requires_grad:
        return False
    return value.grad_fn is not None or not isinstance(value, nn.Parameter)


class _Call:
    """A function call with a graph of its own."""

    __slots__ = ("deferred", "edge", "leaves", "output", "parameters", "weight")

    def __init__(
        self,
        output: torch.Tensor,
        leaves: list[torch.Tensor],
        parameters: list[nn.Parameter],
        weight: torch.Tensor | None,
        deferred: Deferred,
    ) -> None:
        self.output: torch.Tensor | None = output
        self.edge = edge_of(output)
        self.leaves = leaves
        self.parameters = parameters
        self.weight = weight
        self.deferred = deferred

    def input_gradients(self, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of the inputs, and leave those of the weights to `W`."""
        self.deferred.add(self.edge, gradient, self.parameters)
        if not self.leaves:
            return (None,)
        if self.weight is not None:
            weight = self.weight.conj() if self.weight.is_complex() else self.weight
            return (gradient.matmul(weight),)
        return differentiate((self.edge,), (gradient,), self.leaves)


class _Joint(torch.autograd.Function):
    """The node that stands for a call in the outer graph."""

    @staticmethod
    def forward(ctx: Any, call: _Call | LinearCall, *anchors: torch.Tensor) -> torch.Tensor:
        ctx.call, ctx.num_anchors = call, len(anchors)
        ctx.set_materialize_grads(False)
        assert call.output is not None, "a call is joined once"
        output, call.output = call.output.detach(), None
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        call: _Call | LinearCall = ctx.call
        if gradients[0] is None:  # nothing behind it has a gradient: nor have its parameters
            return (None,) * (1 + ctx.num_anchors)
        return (None, *call.input_gradients(gradients[0]))
