"""Calls of autograd's engine with gradients that are known to fit."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gpipe_hpc.torch_compat import run_backward

Edges = Sequence[GradientEdge]
Tensors = Sequence[torch.Tensor]


def edge_of(tensor: torch.Tensor) -> GradientEdge:
    """Return where the gradient of `tensor`, which requires one, enters its graph."""
    node: Any = tensor.grad_fn
    if node is None:
        return get_gradient_edge(tensor)
    if isinstance(node, BackwardCFunction):
        # In older versions the node of an `autograd.Function` does not keep its graph alive.
        with torch.enable_grad():
            return edge_of(tensor.view_as(tensor))
    return GradientEdge(node, tensor.output_nr)


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
