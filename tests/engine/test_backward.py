"""Calls of autograd's engine: edges that hold their graph, gradients as torch's own functions."""

import gc

import torch

from gpipe_hpc import Pipeline
from gpipe_hpc.engine.backward import accumulate_gradients, differentiate, edge_of


class Double(torch.autograd.Function):
    """A function in Python, which doubles; its backward writes into what it is given."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient.mul_(2)


def test_an_edge_of_a_python_function_holds_its_graph():
    """In older versions of torch such a node dies with the tensor, whoever has it."""
    weight = torch.ones(3, requires_grad=True)
    output = Double.apply(weight * 3)
    edge = edge_of(output)
    assert not isinstance(edge.node, torch._C._FunctionBase)
    del output
    gc.collect()
    accumulate_gradients([edge], [torch.ones(3)])
    assert weight.grad.tolist() == [6.0] * 3


def test_edges_of_leaves_and_of_second_outputs():
    x = torch.arange(6.0, requires_grad=True)
    first, second = x.split(3)
    (got,) = differentiate([edge_of(second)], [torch.ones(3)], [x])
    assert got.tolist() == [0, 0, 0, 1, 1, 1]
    accumulate_gradients([edge_of(x), edge_of(first)], [torch.ones(6), torch.ones(3)])
    assert x.grad.tolist() == [2, 2, 2, 1, 1, 1]


def test_only_the_inputs_asked_for_get_gradients():
    x, y = (torch.ones(2, requires_grad=True) for _ in range(2))
    accumulate_gradients([edge_of(x * y)], [torch.ones(2)], [x])
    assert x.grad.tolist() == [1, 1] and y.grad is None
    unused = torch.ones(2, requires_grad=True)
    assert differentiate([edge_of(x * y)], [torch.ones(2)], [unused]) == (None,)


def test_a_loss_that_writes_into_its_gradient_harms_no_other_microbatch():
    def loss(y, _):
        return Double.apply(y.sum()), float(len(y))

    layer = torch.nn.Linear(2, 1)
    pipe = Pipeline([layer], loss, microbatches=4, recompute="never")
    x = torch.ones(8, 2)
    pipe.step(x, x)
    assert layer.weight.grad.tolist() == [[2.0, 2.0]]
