"""Split a backward in two: `I`, the gradients of inputs, now; `W`, those of weights, later.

While a forward runs under `DeferWeights`, each call of a function that takes a parameter (linear,
convolution, embedding, matrix product) becomes a graph of its own: its output is cut off
and joined to the outer graph by one node. The outer backward asks that node for the gradient of
the inputs alone and notes the gradient of the output; `W` is then one call of autograd over all
the small graphs, whose roots are known. Nobody walks a graph in Python.

Parameters used in any other way get their gradient in `I`: their `W` is empty. So it is in norms,
whose kernels make all gradients in one pass over the activations, within functions that torch
wraps whole (`F.multi_head_attention_forward`), in compiled layers, under functorch's transforms,
in the forward of an `autograd.Function` and in what `torch.utils.checkpoint` runs again. A layer
may differentiate itself, in its forward or in a hook.

What `backward()` brings adds to `.grad` of a call's parameters. What `torch.autograd.grad` asks
for by the way, in a hook or in the forward (deep-equilibrium layers, forces, gradient penalties),
must not: autograd would not run the parameters' nodes for it. Those are no part of the outer graph,
so each joining node is tied to one more leaf, which the engine runs whenever it would run them.
The gradient of a parameter itself cannot be asked for in that way. In a forward `check_asked`
refuses it. In a hook torch refuses it, or returns None with `allow_unused=True`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from gpipe_hpc.data_parallel import AccumulationHook
from gpipe_hpc.engine.backward.calls import (
    accumulate_gradients,
    differentiate,
    edge_of,
    reachable_nodes,
)
from gpipe_hpc.errors import ModelError
from gpipe_hpc.torch_compat import (
    HANDS_OVER_BACKWARD,
    are_functorch_transforms_active,
    asked_of_backward,
    is_forward_ad_enabled,
    top_saved_tensors_hooks,
    will_engine_execute,
)

# Torch functions that start a backward.
STARTS: Final[frozenset[Any]] = frozenset(
    {torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward}
)

with torch.inference_mode(False):
    _LEAF: Final = torch.empty(0, device="cpu", requires_grad=True)
_NODE: Final = get_gradient_edge(_LEAF).node


def join(call: "DeferredCall", inputs: Iterable[torch.Tensor]) -> Any:
    """Return a call's output as part of the graph of `inputs`, those that have a gradient."""
    return _APPLY(call, *inputs, _LEAF)


class _Joint(torch.autograd.Function):
    """The node that stands for a call in the outer graph."""

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
    starts = [_node_of(each) for each in _listed(args[0])] if asked else []
    for node in reachable_nodes(starts):
        call: DeferredCall | None = getattr(node, "joined_call", None)
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

    `hold` is told of the inputs of each call, which its graph keeps as they are.
    """

    def __init__(self, hold: Callable[[Iterable[torch.Tensor]], None] | None = None) -> None:
        self.hold = hold
        self.is_in_forward = False
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
        return len(self._edges)

    def add(
        self, edge: GradientEdge, gradient: torch.Tensor, parameters: Iterable[nn.Parameter]
    ) -> None:
        """Note the gradient of a call's output; ModelError if that cannot wait for `W`."""
        if self.is_in_forward or torch.is_grad_enabled():
            raise ModelError(
                "split backward: a layer, or the loss, calls backward() on what was computed "
                "within its forward, or with create_graph, expected neither; use "
                "torch.autograd.grad, torch.func.grad or torch.func.vjp there, or a schedule whose "
                "backward is B"
            )
        self._edges.append(edge)
        self._gradients.append(gradient)
        for parameter in parameters:
            self._parameters[id(parameter)] = parameter
            if _has_hooks(parameter) and runs_itself(parameter):
                raise ModelError(
                    f"split backward: a parameter {tuple(parameter.shape)} with a hook is used by "
                    f"a function that leaves its gradient to W, and by another that does not; "
                    f"the hook would be called for each part, expected once; use a schedule whose "
                    f"backward is B, or take the hook off"
                )

    def run(self) -> None:
        """Accumulate all weight gradients, and release what they were kept for."""
        if self._edges:
            accumulate_gradients(self._edges, self._gradients, list(self._parameters.values()))
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
        keywords, deferred = kwargs or {}, self._deferred
        if torch.compiler.is_compiling():
            return func(*args, **keywords)
        if func in STARTS:
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
    """Say whether a call is of a nested tensor without the jagged layout, which has no sizes."""
    first = args[0] if args else None
    return isinstance(first, torch.Tensor) and first.is_nested and first.layout is torch.strided


def _may_split() -> bool:
    """Say whether what runs now is an ordinary forward: once, eager, with a graph."""
    if not torch.is_grad_enabled():
        return False
    if not is_forward_ad_enabled():
        # Within an `autograd.Function`, whose backward may ask for the gradients of parameters.
        return False
    return not (are_functorch_transforms_active() or _is_checkpointed())


def _is_checkpointed() -> bool:
    """Say whether `torch.utils.checkpoint` will run this again and compare what it saves."""
    hooks = top_saved_tensors_hooks(True)
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
    """Do what `_split_call` does for the commonest call: its input gradient is one product."""
    leaf = input.detach()
    output = F.linear(leaf, weight, bias)
    parameters = [p for p in (weight, bias) if p is not None and p.requires_grad]
    if deferred.hold is not None:
        deferred.hold([leaf])
    return join(
        DeferredCall(output, [leaf], parameters, weight, weight.detach(), deferred), [input]
    )


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


def _has_hooks(parameter: nn.Parameter) -> bool:
    """Say whether the user has put a hook on a parameter, other than on its node."""
    hooks = (parameter._post_accumulate_grad_hooks or {}).values()
    return bool(parameter._backward_hooks) or not all(
        isinstance(h, AccumulationHook) for h in hooks
    )


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


class DeferredCall:
    """A function call with a graph of its own; for a linear layer with what the forward held."""

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
        self.leaves = leaves
        self.parameters = parameters
        self.weight = weight
        self.held = held
        self.deferred = deferred

    def leave(self, gradient: torch.Tensor) -> None:
        """Leave the gradients of the weights to `W`."""
        self.deferred.add(self.edge, gradient, self.parameters)

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
        """Return them for `create_graph`: functions of `gradient` and of the parameters."""
        if self.weight is not None and self.held is not None:
            return (gradient_with_graph(gradient, self.weight, self.held),)
        if len(self.leaves) > 1:  # they may be functions of one another, whose graph is not here
            raise ModelError(
                "split backward: a layer differentiates with create_graph=True what a torch "
                "function made of a parameter and several inputs, expected of one input; use "
                "torch.func.grad there, or a schedule whose backward is B"
            )
        return differentiate((self.edge,), (gradient,), self.leaves, create_graph=True)
