"""Edges and nodes of autograd's graphs, and calls of its engine without checks in Python."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gpipe_hpc.torch_compat import run_backward

Edges = Sequence[GradientEdge]
Tensors = Sequence[torch.Tensor]


def edge_of(tensor: torch.Tensor) -> GradientEdge:
    """Return the graph edge at which the gradient of `tensor`, which requires one, enters."""
    node: Any = tensor.grad_fn
    if node is None:
        return get_gradient_edge(tensor)
    if isinstance(node, BackwardCFunction):
        # In older versions the node of an `autograd.Function` does not keep its graph alive.
        with torch.enable_grad():
            return edge_of(tensor.view_as(tensor))
    return GradientEdge(node, tensor.output_nr)


def reachable_nodes(nodes: Iterable[Any]) -> Iterator[Any]:
    """Yield the nodes of an autograd graph that can be reached from some of them, each once."""
    left, seen = list(nodes), {None}
    while left:
        node = left.pop()
        if node not in seen:
            seen.add(node)
            left.extend(following for following, _ in node.next_functions)
            yield node


def accumulate_gradients(edges: Edges, gradients: Tensors, inputs: Tensors = ()) -> None:
    """Do what `torch.autograd.backward` does, without its checks of shapes in Python.

    They take as long as the backward of a small layer. The engine itself refuses shapes that
    cannot be broadcast; what comes here are gradients that autograd made for the same tensors.
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
    """Do what `torch.autograd.grad` does, likewise; the graph stays, unused inputs get None."""
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
