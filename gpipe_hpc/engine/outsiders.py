"""Detection of parameters that a backward reaches but that no layer of this rank has registered.

Examples are a loss that is a module with weights, a penalty over the parameters of the whole model,
or a head that keeps the embedding in a plain list. Such parameters would not be trained, reduced or
saved here, while the last two examples work in an unpartitioned model. Only the graph shows them,
so it is walked for one micro-batch of a stage in each of the first steps, before its backward.

Parameters that are read without a graph (`no_grad`, `detach`, frozen) are not detected.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from inspect import getclosurevars
from types import FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, Final
from weakref import ref

import torch
from torch import nn
from torch.autograd.graph import GradientEdge

from gpipe_hpc.engine.backward import reachable_nodes
from gpipe_hpc.errors import ModelError
from gpipe_hpc.models import Layer, named_layer_parameters

log = logging.getLogger("gpipe_hpc.pipeline")

NUM_LOOKED: Final = 2
"""Number of steps in which a stage's graph is checked."""
_DEPTH: Final = 5  # of references from a loss: partials, methods, closures, attributes, containers
_ENDS: Final = (torch.Tensor, type, ModuleType, str, bytes, int, float)
_MOST: Final = 1000  # objects that are visited


class ForeignParameters:
    """The parameters that graphs of a rank's stages must not reach.

    Args:
        model: All layers, as the user passed them; layers of other ranks are not kept alive.
        own: The layers of this rank by index.
    """

    def __init__(self, model: Sequence[Layer], own: Mapping[int, nn.Module]) -> None:
        self._layers = list(own.values())
        self._own = {id(p) for layer in self._layers for p in layer.parameters()}
        self._elsewhere = {
            name: ref(parameter)
            for index, layer in enumerate(model)
            if index not in own and isinstance(layer, nn.Module)
            for name, parameter in named_layer_parameters(index, layer)
            if id(parameter) not in self._own
        }
        self._warned: set[int] = set()

    def check(self, edges: Iterable[GradientEdge], where: str, loss_fn: object) -> None:
        """Raise ModelError if graphs reach a parameter that this rank does not train."""
        found = {id(leaf): leaf for leaf in _leaves(edges) if id(leaf) not in self._own}
        if not found:
            return
        others = {name: known() for name, known in self._elsewhere.items()}
        used = [name for name, parameter in others.items() if id(parameter) in found]
        if used:
            is_of_loss = _name_in(loss_fn, others[used[0]]) is not None
            raise ModelError(
                f"{used[0]}: {'loss_fn' if is_of_loss else where} uses this parameter, but another "
                f"rank trains it ({len(used)} such parameters): this rank would use its initial "
                f"value, and its gradient would be lost; add a penalty in the forward of its own "
                f"layer (gpipe_hpc.add_loss), or register a weight that two layers share in both "
                f"of them, so that it is tied"
            )
        for leaf in found.values():
            if isinstance(leaf, nn.Parameter):
                self._judge(leaf, where, loss_fn)
            else:  # a layer or a loss may create leaves as it runs: only lasting ones are trained
                name = _name_in(loss_fn, leaf)
                if name is not None:
                    raise _of_loss(name, leaf)

    def _judge(self, parameter: nn.Parameter, where: str, loss_fn: object) -> None:
        if any(each is parameter for layer in self._layers for each in layer.parameters()):
            return  # it was added since
        name = _name_in(loss_fn, parameter)
        if name is not None:
            raise _of_loss(name, parameter)
        if id(parameter) not in self._warned:
            self._warned.add(id(parameter))
            log.warning(
                "%s uses a parameter of shape %s that no layer has registered: it is not trained, "
                "summed over replicas or saved; make it an attribute of its layer, or freeze it "
                "with requires_grad_(False)",
                where,
                tuple(parameter.shape),
            )


def _of_loss(name: str, tensor: torch.Tensor) -> ModelError:
    return ModelError(
        f"loss_fn: {name} of shape {tuple(tensor.shape)} requires a gradient, but belongs to no "
        f"layer, so it would not be trained, summed over replicas or saved; move it to the last "
        f"layer, or freeze it with requires_grad_(False)"
    )


def _leaves(edges: Iterable[GradientEdge]) -> Iterator[torch.Tensor]:
    """Yield the leaf tensors whose gradients a backward would accumulate, each once."""
    found: set[int] = set()
    for node in reachable_nodes(edge.node for edge in edges):
        call = getattr(node, "joined_call", None)  # of a backward that is split
        leaves = [] if call is None else list(call.parameters)
        if not node.next_functions and isinstance(getattr(node, "variable", None), torch.Tensor):
            leaves.append(node.variable)
        for leaf in leaves:
            if id(leaf) not in found:
                found.add(id(leaf))
                yield leaf


def _name_in(loss_fn: object, wanted: torch.Tensor | None) -> str | None:
    """Return the path of attributes from a loss to a tensor, or None if there is none."""
    todo, seen = [("loss_fn", loss_fn, 0)], set[int]()
    while todo and len(seen) < _MOST:
        path, value, depth = todo.pop(0)
        if value is wanted:
            return path
        if id(value) in seen or depth > _DEPTH or isinstance(value, _ENDS):
            continue
        seen.add(id(value))
        todo += [(f"{path}{name}", each, depth + 1) for name, each in _parts(value)]
    return None


def _parts(value: Any) -> list[tuple[str, Any]]:
    """Return the objects that an object refers to, each with its part of a path."""
    if isinstance(value, partial):
        bound = [*enumerate(value.args), *value.keywords.items()]
        return [("", value.func), *((f"[{name!r}]", each) for name, each in bound)]
    if isinstance(value, MethodType):
        return [("", value.__self__)]
    if isinstance(value, FunctionType):
        read: dict[str, Any] = {}
        with suppress(ValueError):  # of a variable that nothing is bound to
            found = getclosurevars(value)
            read = {**found.globals, **found.nonlocals}
        return [(f".{name}", each) for name, each in read.items()]
    if isinstance(value, nn.Module):
        return [(f".{name}", each) for name, each in value.named_parameters()]
    if isinstance(value, Mapping):
        return [(f"[{name!r}]", each) for name, each in value.items()]
    if isinstance(value, list | tuple | set | frozenset):
        return [(f"[{number}]", each) for number, each in enumerate(value)]
    slots = [
        name
        for cls in type(value).__mro__
        for name, member in vars(cls).items()
        if isinstance(member, MemberDescriptorType)
    ]
    held = [(name, getattr(value, name, None)) for name in slots]
    return [(f".{name}", each) for name, each in [*getattr(value, "__dict__", {}).items(), *held]]
