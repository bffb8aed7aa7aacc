"""Fixtures for tests of models."""

import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from gpipe_hpc.models import LayerSpec, build_layer, find_skips, run_layers

Plain = Callable[[Iterator[Tensor], Tensor], Any]


@pytest.fixture(scope="session")
def assert_equals_plain() -> Callable[..., Any]:
    """Return a function that compares layers with a plain model that a test implements.

    The plain model receives an iterator over the parameters, in the order of the layers, and the
    inputs. Outputs and the gradients of inputs and all parameters are compared in float64, with
    weights for which no gradient vanishes. Both models draw dropout masks in the order of the
    layers.
    """

    def compare(specs: Sequence[LayerSpec], plain: Plain, shape: Sequence[int]) -> Any:
        modules = {i: build_layer(spec, index=i, seed=3).double() for i, spec in enumerate(specs)}
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(*shape, dtype=torch.float64, generator=generator)
        inputs.requires_grad_()
        parameters = [p for module in modules.values() for p in module.parameters()]
        with torch.no_grad():
            for p in parameters:
                noise = torch.randn(p.shape, dtype=p.dtype, generator=generator)
                fan_in = p[0].numel()
                p.copy_(noise * (2 / fan_in) ** 0.5 if p.ndim > 1 else p + 0.2 * noise)
        torch.manual_seed(2)
        output = run_layers(modules, specs, inputs)
        weights = iter(parameters)
        torch.manual_seed(2)
        expected = plain(weights, inputs)
        assert next(weights, None) is None, "the plain model left parameters unused"
        torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-9)
        wanted = [inputs, *parameters]
        gradients = torch.autograd.grad(scalar(output), wanted)
        for got, other in zip(
            gradients, torch.autograd.grad(scalar(expected), wanted), strict=True
        ):
            size = other.abs().max()
            assert size > 0
            assert (got - other).abs().max() <= 1e-8 * max(size, 1e-3)
        return output

    return compare


def scalar(nest: Any) -> Tensor:
    """Return a weighted sum of all elements of the outputs, with a different weight for each."""
    tensors = nest if isinstance(nest, tuple) else (nest,)
    numbers = torch.cat([tensor.flatten() for tensor in tensors])
    return (numbers * torch.linspace(1, 2, len(numbers), dtype=numbers.dtype)).sum()


@pytest.fixture(scope="session")
def assert_travels() -> Callable[[Sequence[LayerSpec]], None]:
    """Return a function that asserts that pickling preserves specs, including their skips."""

    def check(specs: Sequence[LayerSpec]) -> None:
        again = pickle.loads(pickle.dumps(specs))
        assert again == specs
        assert find_skips(again) == find_skips(specs)
        assert [(each.stashes, each.pops) for each in again] == [
            (each.stashes, each.pops) for each in specs
        ]

    return check
