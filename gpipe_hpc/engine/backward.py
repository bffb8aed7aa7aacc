"""Backwards: calls of autograd's engine, and the split of a backward into I and W.

`I` computes the gradients of inputs at once, `W` those of weights later. While a forward runs under
`DeferWeights`, each call of a function that takes a parameter (linear, convolution, embedding,
matrix product) gets a graph of its own: its output is detached, and one node joins it to the outer
graph. In the outer backward this node computes the gradients of the inputs only and stores the
gradient of the output. `W` is then one call of autograd over all the small graphs, whose roots are
known, so no graph is walked in Python.

Parameters that are used in any other way get their gradient in `I`, and their `W` is empty. These
are parameters of norms (whose kernels compute all gradients in one pass), parameters within
functions that torch wraps as a whole (`F.multi_head_attention_forward`), in compiled layers, under
functorch's transforms, in the forward of an `autograd.Function`, and in functions that
`torch.utils.checkpoint` runs again. A layer may differentiate itself, in its forward or in a hook.

`backward()` adds to `.grad` of a call's parameters. `torch.autograd.grad` in a hook or in a forward
(deep-equilibrium layers, forces, gradient penalties) must not: autograd would not run the
parameters' nodes for it. These nodes are not part of the outer graph, so each joining node has one
more input, a leaf that the engine runs whenever it would run them. The gradient of a parameter
itself cannot be computed that way: in a forward `check_asked` raises ModelError; in a hook torch
raises, or returns None with `allow_unused=True`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from gpipe_hpc.data_parallel import AccumulationHook
from gpipe_hpc.errors import ModelError
from gpipe_hpc.torch_compat import (
    HANDS_OVER_BACKWARD,
    are_functorch_transforms_active,
    asked_of_backward,
    is_forward_ad_enabled,
    run_backward,
    top_saved_tensors_hooks,
    will_engine_execute,
)

Edges = Sequence[GradientEdge]
Tensors = Sequence[torch.Tensor]

# Torch functions that start a backward.
_STARTS: Final[frozenset[Any]] = frozenset(
    {torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward}
)

with torch.inference_mode(False):
    _LEAF: Final = torch.empty(0, device="cpu", requires_grad=True)
_NODE: Final = get_gradient_edge(_LEAF).node


def edge_of(tensor: torch.Tensor) -> GradientEdge:
    """Return the graph edge at which a backward starts from a tensor that requires a gradient."""
    node: Any = tensor.grad_fn
    if node is None:
        return get_gradient_edge(tensor)
    if isinstance(node, BackwardCFunction):
        # In older torch the node of an `autograd.Function` does not keep its graph alive.
        with torch.enable_grad():
            return edge_of(tensor.view_as(tensor))
    return GradientEdge(node, tensor.output_nr)


def reachable_nodes(nodes: Iterable[Any]) -> Iterator[Any]:
    """Yield the nodes of an autograd graph that can be reached from `nodes`, each once."""
    left, seen = list(nodes), {None}
    while left:
        node = left.pop()
        if node not in seen:
            seen.add(node)
            left.extend(following for following, _ in node.next_functions)
            yield node


def accumulate_gradients(edges: Edges, gradients: Tensors, inputs: Tensors = ()) -> None:
    """Run a backward as `torch.autograd.backward` does, without its checks of shapes in Python.

    The checks take as long as the backward of a small layer. Autograd's engine itself refuses
    shapes that cannot be broadcast, and all gradients passed here were computed by autograd.
    """
    run_backward(
        tuple(edges),
        tuple(gradients),
        False,  # keep_graph
        False,  # create_graph
        tuple(inputs),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def differentiate(
    edges: Edges, gradients: Tensors, inputs: Tensors, *, create_graph: bool = False
) -> tuple[torch.Tensor | None, ...]:
    """Return gradients as `torch.autograd.grad` does; keeps the graph; unused inputs get None."""
    found: tuple[torch.Tensor | None, ...] = run_backward(
        tuple(edges),
        tuple(gradients),
        True,  # keep_graph
        create_graph,
        tuple(inputs),
        allow_unreachable=True,
        accumulate_grad=False,
    )
    return found


def join(call: "DeferredCall", inputs: Iterable[torch.Tensor]) -> Any:
    """Return the output of a call, joined to the graph of `inputs`, which require gradients."""
    return _APPLY(call, *inputs, _LEAF)


class _Joint(torch.autograd.Function):
    """The autograd node that represents a deferred call in the outer graph."""

    @staticmethod
    def forward(ctx: Any, call: "DeferredCall", *anchors: torch.Tensor) -> torch.Tensor:
        ctx.joined_call, ctx.num_anchors = call, len(anchors)
        ctx.set_materialize_grads(False)
        assert call.output is not None, "a call is joined once"
        output, call.output = call.output.detach(), None
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        call: DeferredCall = ctx.joined_call
        gradient = gradients[0]
        if gradient is None:  # then the inputs and parameters of the call have none either
            return (None,) * (1 + ctx.num_anchors)
        found = call.input_gradients(gradient)
        if will_engine_execute(_NODE):
            call.deferred.add(call.edge, gradient, call.parameters)
        return (None, *found, None)


# `_Joint.apply` without its check for functorch's transforms, under which no call is joined.
_APPLY: Final[Any] = getattr(super(torch.autograd.Function, _Joint), "apply", _Joint.apply)


def check_asked(start: Any, args: Sequence[Any], keywords: Mapping[str, Any]) -> None:
    """Raise ModelError for a call of autograd that differentiates by a joined call's parameter.

    The outer graph has no path to that parameter. `start`: one of `_STARTS`, called with the other
    arguments.
    """
    inputs = args[1] if start is torch.autograd.grad else keywords.get("inputs")
    asked = {id(each) for each in _listed(inputs) if isinstance(each, nn.Parameter)}
    starts = [_node_of(each) for each in _listed(args[0])] if asked else []
    for node in reachable_nodes(starts):
        call: DeferredCall | None = getattr(node, "joined_call", None)
        for parameter in () if call is None else call.parameters:
            if id(parameter) in asked:
                raise ModelError(
                    f"split backward: a layer's forward differentiates with respect to a "
                    f"parameter {tuple(parameter.shape)}, which is supported only with respect to "
                    f"inputs; use torch.func.grad there, or a schedule whose backward is B"
                )


def _listed(value: Any) -> Sequence[Any]:
    if value is None:
        return ()
    return value if isinstance(value, (tuple, list)) else (value,)


def _node_of(output: Any) -> Any:
    return output.grad_fn if isinstance(output, torch.Tensor) else output.node


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
    """The weight gradients of one micro-batch of a stage that `W` will compute.

    `hold` is called with the inputs of each deferred call, whose graph keeps them alive.
    """

    def __init__(self, hold: Callable[[Iterable[torch.Tensor]], None] | None = None) -> None:
        self.hold = hold
        self.is_in_forward = False
        self._edges: list[GradientEdge] = []
        self._gradients: list[torch.Tensor] = []
        self._parameters: dict[int, nn.Parameter] = {}

    @contextmanager
    def in_forward(self) -> Iterator[None]:
        """Return a block for the forward, in which a backward through a deferred call raises."""
        self.is_in_forward = True
        try:
            yield
        finally:
            self.is_in_forward = False

    def __len__(self) -> int:
        """Return the number of deferred calls."""
        return len(self._edges)

    def add(
        self, edge: GradientEdge, gradient: torch.Tensor, parameters: Iterable[nn.Parameter]
    ) -> None:
        """Store the gradient of a call's output for `W`; ModelError if it cannot be deferred."""
        if self.is_in_forward or torch.is_grad_enabled():
            raise ModelError(
                "split backward: a layer or the loss calls backward() within its forward, or with "
                "create_graph=True, which a split backward cannot defer; use torch.autograd.grad, "
                "torch.func.grad or torch.func.vjp there, or a schedule whose backward is B"
            )
        self._edges.append(edge)
        self._gradients.append(gradient)
        for parameter in parameters:
            self._parameters[id(parameter)] = parameter
            if _has_hooks(parameter) and will_engine_execute(edge_of(parameter).node):
                raise ModelError(
                    f"split backward: a parameter {tuple(parameter.shape)} with a hook is used by "
                    f"a function that defers its weight gradient to W and by one that does not, so "
                    f"the hook would be called for each part of the gradient; use a schedule whose "
                    f"backward is B, or remove the hook"
                )

    def run(self) -> None:
        """Accumulate all weight gradients and release the graphs."""
        if self._edges:
            accumulate_gradients(self._edges, self._gradients, list(self._parameters.values()))
        self._edges, self._gradients, self._parameters = [], [], {}


class DeferWeights(TorchFunctionMode):
    """A mode in which forwards defer the gradients of their parameters to `deferred`."""

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
        """Run one torch function; defer its weight gradients if it takes a trained parameter."""
        keywords, deferred = kwargs or {}, self._deferred
        if torch.compiler.is_compiling():
            return func(*args, **keywords)
        if func in _STARTS:
            check_asked(func, args, keywords)
            return func(*args, **keywords)
        if not HANDS_OVER_BACKWARD:
            asked = asked_of_backward(func)
            if asked is not None:
                check_asked(torch.autograd.backward, asked[:1], {"inputs": asked[1]})
        if func not in _SPLIT or not _may_split() or _is_old_nested(args):
            return func(*args, **keywords)
        if func is F.linear and not keywords and _is_plain_linear(*args):
            return _split_linear(*args, deferred=deferred)
        parameters = [p for p in (*args, *keywords.values()) if _is_trained(p)]
        if not parameters:
            return func(*args, **keywords)
        return _split_call(func, args, keywords, parameters, deferred)


def _is_old_nested(args: Sequence[Any]) -> bool:
    """Return whether the first argument is a nested tensor of the old layout, without sizes."""
    first = args[0] if args else None
    return isinstance(first, torch.Tensor) and first.is_nested and first.layout is torch.strided


def _may_split() -> bool:
    """Return whether the present call is part of an ordinary forward: eager, once, with a graph."""
    if not torch.is_grad_enabled():
        return False
    if not is_forward_ad_enabled():
        # Within an `autograd.Function`, whose backward may compute the gradients of parameters.
        return False
    return not (are_functorch_transforms_active() or _is_checkpointed())


def _is_checkpointed() -> bool:
    """Return whether the call runs within `torch.utils.checkpoint`, which will repeat it."""
    hooks = top_saved_tensors_hooks(True)
    return bool(hooks) and getattr(hooks[0], "__module__", None) == checkpoint.__name__


def _split_call(
    func: Function,
    args: Sequence[Any],
    keywords: Mapping[str, Any],
    parameters: list[nn.Parameter],
    deferred: Deferred,
) -> Any:
    """Run `func` on detached inputs and join its output to the graph of the original inputs."""
    inputs = [value for value in (*args, *keywords.values()) if _is_input(value)]
    leaves: list[torch.Tensor] = []

    def apart(value: Any) -> Any:
        if not _is_input(value):
            return value
        leaves.append(value.detach().requires_grad_())
        # Autocast caches casts of leaves until the step ends; only casts of weights should stay.
        is_cast = torch.is_autocast_enabled(value.device.type)
        return leaves[-1].view_as(leaves[-1]) if is_cast else leaves[-1]

    output = func(
        *(apart(value) for value in args),
        **{name: apart(value) for name, value in keywords.items()},
    )
    if deferred.hold is not None:
        deferred.hold(leaves)
    return join(DeferredCall(output, leaves, parameters, None, None, deferred), inputs)


def _split_linear(
    input: torch.Tensor,
    weight: nn.Parameter,
    bias: nn.Parameter | None = None,
    *,
    deferred: Deferred,
) -> Any:
    """Run `F.linear` as `_split_call` does; the gradient of its input is one matmul."""
    leaf = input.detach()
    output = F.linear(leaf, weight, bias)
    parameters = [p for p in (weight, bias) if p is not None and p.requires_grad]
    if deferred.hold is not None:
        deferred.hold([leaf])
    return join(
        DeferredCall(output, [leaf], parameters, weight, weight.detach(), deferred), [input]
    )


def _is_plain_linear(input: Any, weight: Any, bias: Any = None) -> bool:
    """Return whether the input requires a gradient, and this takes one matmul with the weight.

    Not under autocast, which uses a cast of the weight that only the call's own graph keeps.
    """
    return (
        type(weight) is nn.Parameter
        and weight.dim() == 2
        and (bias is None or type(bias) is nn.Parameter)
        and (weight.requires_grad or (bias is not None and bias.requires_grad))
        and _is_input(input)
        and not torch.is_autocast_enabled(weight.device.type)
    )


def _has_hooks(parameter: nn.Parameter) -> bool:
    """Return whether the user has registered a hook on a parameter, other than on its node."""
    hooks = (parameter._post_accumulate_grad_hooks or {}).values()
    return bool(parameter._backward_hooks) or not all(
        isinstance(h, AccumulationHook) for h in hooks
    )


def _is_trained(value: Any) -> bool:
    # The exact class first: torch's own `isinstance` check of a Parameter is slow.
    return (
        isinstance(value, torch.Tensor)
        and value.requires_grad
        and (type(value) is nn.Parameter or isinstance(value, nn.Parameter))
    )


def _is_input(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or not value.requires_grad:
        return False
    return value.grad_fn is not None or not isinstance(value, nn.Parameter)


class DeferredCall:
    """A function call with a graph of its own, whose weight gradients are deferred to `W`.

    Args:
        output: The output, until it is joined to the outer graph.
        leaves: The detached inputs that require a gradient.
        parameters: The parameters that the call takes.
        weight: The weight of a plain linear layer; None for any other call.
        held: That weight as the forward used it, detached.
        deferred: The weight gradients of the micro-batch.
    """

    __slots__ = ("deferred", "edge", "held", "leaves", "output", "parameters", "weight")

    def __init__(
        self,
        output: torch.Tensor,
        leaves: list[torch.Tensor],
        parameters: list[nn.Parameter],
        weight: nn.Parameter | None,
        held: torch.Tensor | None,
        deferred: Deferred,
    ) -> None:
        self.output: torch.Tensor | None = output
        self.edge = edge_of(output)
        self.leaves, self.parameters = leaves, parameters
        self.weight, self.held = weight, held
        self.deferred = deferred

    def input_gradients(self, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of the inputs."""
        if not self.leaves:
            return ()
        if torch.is_grad_enabled():
            return self._with_graph(gradient)
        if self.held is not None:
            held = self.held.conj() if self.held.is_complex() else self.held
            return (gradient.matmul(held),)
        return differentiate((self.edge,), (gradient,), self.leaves)

    def _with_graph(self, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the input gradients as functions of `gradient` and of the parameters."""
        weight, held = self.weight, self.held
        if weight is not None and held is not None:
            if weight.data_ptr() != held.data_ptr():
                raise ModelError(
                    f"split backward: the weight {tuple(weight.shape)} of a linear layer was "
                    f"replaced after its forward and before a torch.autograd.grad with "
                    f"create_graph=True, which needs the original weight; replace it after that "
                    f"call"
                )
            return (gradient.matmul(weight.conj() if weight.is_complex() else weight),)
        if len(self.leaves) > 1:  # one may be a function of another, by a graph that is not here
            raise ModelError(
                "split backward: a layer differentiates, with create_graph=True, the output of a "
                "torch function of a parameter and several inputs; only functions of one input are "
                "supported; use torch.func.grad there, or a schedule whose backward is B"
            )
        return differentiate((self.edge,), (gradient,), self.leaves, create_graph=True)
