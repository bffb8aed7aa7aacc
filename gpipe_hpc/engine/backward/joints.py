"""The node that stands for a function call in a layer's graph, and which backwards count.

What `backward()` brings adds to `.grad` of the call's parameters. What `torch.autograd.grad` asks
for by the way, in a hook or in the forward (deep-equilibrium layers, forces, gradient penalties),
must not: autograd would not run the parameters' nodes for it. Those are no part of the graph here,
so that each joint is tied to one more leaf, which the engine runs whenever it would run them.

The gradient of a parameter itself cannot be asked for in that way. In a forward `check_asked`
refuses it. In a hook torch does, unless it is told `allow_unused`: then it returns None.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from gpipe_hpc.errors import ModelError
from gpipe_hpc.torch_compat import will_engine_execute

# Torch functions that start a backward.
STARTS: Final[frozenset[Any]] = frozenset(
    {torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward}
)

with torch.inference_mode(False):
    _LEAF: Final = torch.empty(0, device="cpu", requires_grad=True)
_NODE: Final = get_gradient_edge(_LEAF).node


class Call(Protocol):
    """A function call whose parameters are no part of the graph around it."""

    output: torch.Tensor | None  # until it is joined to that graph

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """Return those that have a gradient."""

    def input_gradients(self, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradient of each input that has one; in grad mode with a graph."""

    def leave(self, gradient: torch.Tensor) -> None:
        """Leave the parameters' gradients to somebody; `gradient` is that of the output."""


def join(call: Call, inputs: Iterable[torch.Tensor]) -> Any:
    """Return a call's output as part of the graph of `inputs`, those that have a gradient."""
    return _APPLY(call, *inputs, _LEAF)


class _Joint(torch.autograd.Function):
    """The node that stands for a call in the outer graph."""

    @staticmethod
    def forward(ctx: Any, call: Call, *anchors: torch.Tensor) -> torch.Tensor:
        ctx.joined_call, ctx.num_anchors = call, len(anchors)
        ctx.set_materialize_grads(False)
        assert call.output is not None, "a call is joined once"
        output, call.output = call.output.detach(), None
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        call: Call = ctx.joined_call
        gradient = gradients[0]
        if gradient is None:  # nothing behind it has a gradient: nor have its parameters
            return (None,) * (1 + ctx.num_anchors)
        found = call.input_gradients(gradient)
        if will_engine_execute(_NODE):
            call.leave(gradient)
        return (None, *found, None)


# What `_Joint.apply` comes to outside functorch's transforms, where nothing is joined.
_APPLY: Final[Any] = getattr(super(torch.autograd.Function, _Joint), "apply", _Joint.apply)


def runs_itself(parameter: nn.Parameter) -> bool:
    """Say whether the backward that runs now adds to a parameter as autograd does, too."""
    return will_engine_execute(get_gradient_edge(parameter).node)


def check_asked(start: Any, args: Sequence[Any], keywords: Mapping[str, Any]) -> None:
    """Refuse a backward to the parameter of a joined call: ModelError.

    Torch would find no way there. `start`: one of `STARTS`, and what it is called with.
    """
    inputs = args[1] if start is torch.autograd.grad else keywords.get("inputs")
    asked = {id(each) for each in _listed(inputs) if isinstance(each, nn.Parameter)}
    nodes = [_node_of(each) for each in _listed(args[0])] if asked else []
    seen = {None}
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        nodes.extend(following for following, _ in node.next_functions)
        call: Call | None = getattr(node, "joined_call", None)
        for parameter in () if call is None else call.parameters:
            if id(parameter) in asked:
                raise ModelError(
                    f"split backward: a layer's forward differentiates with respect to a "
                    f"parameter {tuple(parameter.shape)}, expected that only with respect to "
                    f"inputs; use torch.func.grad there, or a schedule whose backward is B"
                )


def gradient_with_graph(
    gradient: torch.Tensor, weight: torch.Tensor, held: torch.Tensor
) -> torch.Tensor:
    """Return the gradient of a linear layer's input, itself to be differentiated.

    `held`: the weight of the forward. ModelError if `weight` has another value since.
    """
    if weight.data_ptr() != held.data_ptr():
        raise ModelError(
            f"split backward: the weight {tuple(weight.shape)} of a linear layer was replaced "
            f"between its forward and a torch.autograd.grad with create_graph=True, expected as "
            f"it was; put it back after that"
        )
    return gradient.matmul(weight.conj() if weight.is_complex() else weight)


def _listed(value: Any) -> Sequence[Any]:
    if value is None:
        return ()
    return value if isinstance(value, (tuple, list)) else (value,)


def _node_of(output: Any) -> Any:
    return output.grad_fn if isinstance(output, torch.Tensor) else output.node
