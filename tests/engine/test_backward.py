"""Calls of the autograd engine through graph edges, with the gradients of torch's own functions."""

import gc

import torch

from gpipe_hpc import Pipeline
from gpipe_hpc.engine.backward import accumulate_gradients, differentiate, edge_of


class Double(torch.autograd.Function):
    """Double the input, as a Python function whose backward modifies its argument in place."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient.mul_(2)


def test_edge_keeps_the_graph_of_a_python_function_alive():
    """Older versions of torch free such a node together with its tensor."""
    weight = torch.ones(3, requires_grad=True)
    output = Double.apply(weight * 3)
    edge = edge_of(output)
    assert not isinstance(edge.node, torch._C._FunctionBase)
    del output
    gc.collect()
    accumulate_gradients([edge], [torch.ones(3)])
    assert weight.grad.tolist() == [6.0] * 3


def test_edges_of_leaf_and_second_output_receive_gradients():
    x = torch.arange(6.0, requires_grad=True)
    first, second = x.split(3)
    (got,) = differentiate([edge_of(second)], [torch.ones(3)], [x])
    assert got.tolist() == [0, 0, 0, 1, 1, 1]
    accumulate_gradients([edge_of(x), edge_of(first)], [torch.ones(6), torch.ones(3)])
    assert x.grad.tolist() == [2, 2, 2, 1, 1, 1]


def test_only_requested_inputs_get_gradients():
    x, y = (torch.ones(2, requires_grad=True) for _ in range(2))
    accumulate_gradients([edge_of(x * y)], [torch.ones(2)], [x])
    assert x.grad.tolist() == [1, 1] and y.grad is None
    unused = torch.ones(2, requires_grad=True)
    assert differentiate([edge_of(x * y)], [torch.ones(2)], [unused]) == (None,)


def test_loss_may_modify_its_gradient_in_place():
    """Otherwise one micro-batch would change the initial gradient of the next."""

    def loss(y, _):
        return Double.apply(y.sum()), float(len(y))

    layer = torch.nn.Linear(2, 1)
    pipe = Pipeline([layer], loss, microbatches=4, recompute="never")
    x = torch.ones(8, 2)
    pipe.step(x, x)
    assert layer.weight.grad.tolist() == [[2.0, 2.0]]
