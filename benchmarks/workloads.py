"""The benchmarked models, their batches and their partition."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor, nn

from gpipe_hpc.models import (
    LayerSpec,
    build_gpt,
    build_layer,
    mean_squared_error,
    token_cross_entropy,
)

SEED: Final = 0
LEARNING_RATE: Final = 1e-3
NUM_UNITS: Final = 8


@dataclass(frozen=True)
class Workload:
    """A model, its batch and its loss.

    `units` is the number of layers in each of the eight pieces from which all contestants form
    stages. `make_batch` takes the number of samples; `loss_fn` returns (sum, weight), `mean_loss`
    their ratio.
    """

    name: str
    layers: tuple[LayerSpec, ...]
    units: tuple[int, ...]
    batch_size: int
    make_batch: Callable[[int], tuple[Tensor, Tensor]]
    loss_fn: Callable[[Tensor, Tensor], tuple[Tensor, Tensor | float]]
    precision: str = "float32"

    def mean_loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean loss, in float32."""
        total, weight = self.loss_fn(output, target)
        return total / weight

    def batch(self, num_samples: int | None = None) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, the same in every process."""
        with torch.random.fork_rng():
            torch.manual_seed(SEED)
            return self.make_batch(num_samples or self.batch_size)

    def counts(self, num_stages: int) -> list[int]:
        """Return the number of layers of each stage, with equal numbers of units."""
        size, rest = divmod(NUM_UNITS, num_stages)
        assert rest == 0, f"{NUM_UNITS} units do not make {num_stages} equal stages"
        return [sum(self.units[s * size : (s + 1) * size]) for s in range(num_stages)]

    def spans(self, num_stages: int) -> list[range]:
        """Return the layer indices of each stage."""
        ends = [0]
        for count in self.counts(num_stages):
            ends.append(ends[-1] + count)
        return [range(*pair) for pair in pairwise(ends)]

    def build(self, span: range) -> dict[int, nn.Module]:
        """Return layers by index, with the initial weights that all contestants use."""
        return {index: build_layer(self.layers[index], index=index, seed=SEED) for index in span}

    def module(self, span: range) -> nn.Module:
        """Return layers as one module for a peer; in bfloat16 it applies autocast itself."""
        module = nn.Sequential(*self.build(span).values())
        return module if self.precision == "float32" else Casting(module)


class Casting(nn.Module):
    """A module that runs under autocast to bfloat16."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Tensor) -> Any:
        """Run the module under autocast."""
        with torch.autocast("cpu", torch.bfloat16):
            return self.module(*inputs)


def global_parameters(module: nn.Module, span: range) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of `Workload.module` by global name (`layers.<index>.<name>`)."""
    inner = module.module if isinstance(module, Casting) else module
    for name, parameter in inner.named_parameters():
        position, rest = name.split(".", 1)
        yield f"layers.{span[int(position)]}.{rest}", parameter


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer that all contestants use."""
    return torch.optim.SGD(parameters, lr=LEARNING_RATE)


def _tokens(seq_len: int, vocab_size: int, num_samples: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, vocab_size, (2, num_samples, seq_len))
    return tokens[0], tokens[1]


def _images(size: int, num_samples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(num_samples, 3, size, size), torch.randint(0, 10, (num_samples,))


def _vectors(width: int, num_samples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(num_samples, width), torch.randn(num_samples, width)


def _gpt(name: str, width: int, seq_len: int, batch_size: int, precision: str) -> Workload:
    """A: 8 blocks, 4 heads, vocabulary 512."""
    layers = build_gpt(
        vocab_size=512, block_size=seq_len, num_layers=NUM_UNITS, num_heads=4, width=width
    )
    return Workload(
        name=name,
        layers=tuple(layers),
        units=(3, 2, 2, 2, 2, 2, 2, 4),
        batch_size=batch_size,
        make_batch=partial(_tokens, seq_len, 512),
        loss_fn=token_cross_entropy,
        precision=precision,
    )


def _convolutions(name: str, channels: int, size: int, batch_size: int) -> Workload:
    """B: a stem, 8 blocks of a 3x3 convolution and ReLU, average pooling, 10 classes."""
    block = [LayerSpec(nn.Conv2d, channels, channels, 3, padding=1), LayerSpec(nn.ReLU)]
    stem = [LayerSpec(nn.Conv2d, 3, channels, 3, padding=1), LayerSpec(nn.ReLU)]
    head = [
        LayerSpec(nn.AdaptiveAvgPool2d, 1),
        LayerSpec(nn.Flatten),
        LayerSpec(nn.Linear, channels, 10),
    ]
    return Workload(
        name=name,
        layers=(*stem, *block * NUM_UNITS, *head),
        units=(4, 2, 2, 2, 2, 2, 2, 5),
        batch_size=batch_size,
        make_batch=partial(_images, size),
        loss_fn=token_cross_entropy,
    )


def _wide(name: str, width: int, batch_size: int) -> Workload:
    """C: 8 times Linear and ReLU; boundaries are as large as a layer's weights."""
    return Workload(
        name=name,
        layers=(LayerSpec(nn.Linear, width, width), LayerSpec(nn.ReLU)) * NUM_UNITS,
        units=(2,) * NUM_UNITS,
        batch_size=batch_size,
        make_batch=partial(_vectors, width),
        loss_fn=mean_squared_error,
    )


def _tiny(name: str) -> Workload:
    """T: 8 times Linear(8, 8), which measures the overhead of a step."""
    return Workload(
        name=name,
        layers=(LayerSpec(nn.Linear, 8, 8),) * NUM_UNITS,
        units=(1,) * NUM_UNITS,
        batch_size=64,
        make_batch=partial(_vectors, 8),
        loss_fn=mean_squared_error,
    )


_MAKERS: Final[Mapping[tuple[str, str], Callable[[str], Workload]]] = MappingProxyType(
    {
        ("A", "full"): lambda name: _gpt(name, 256, 128, 32, "float32"),
        ("A16", "full"): lambda name: _gpt(name, 256, 128, 32, "bfloat16"),
        ("B", "full"): lambda name: _convolutions(name, 64, 32, 64),
        ("C", "full"): lambda name: _wide(name, 1024, 4096),
        ("T", "full"): _tiny,
        ("A", "tiny"): lambda name: _gpt(name, 32, 16, 32, "float32"),
        ("A16", "tiny"): lambda name: _gpt(name, 32, 16, 32, "bfloat16"),
        ("B", "tiny"): lambda name: _convolutions(name, 8, 8, 32),
        ("C", "tiny"): lambda name: _wide(name, 64, 64),
        ("T", "tiny"): _tiny,
    }
)


def make_workload(name: str, size: str = "full") -> Workload:
    """Return a workload by name; size ``tiny`` is for tests of the harness."""
    return _MAKERS[name, size](name)


def casting(workload: Workload) -> torch.autocast:
    """Return the autocast context in which a plain loop computes a workload's forwards."""
    return torch.autocast("cpu", torch.bfloat16, enabled=workload.precision == "bfloat16")


def plain_gradients(workload: Workload) -> dict[str, Tensor]:
    """Return the gradients of the mean loss, computed by a plain loop."""
    span = range(len(workload.layers))
    modules = workload.build(span)
    value, targets = workload.batch()
    with casting(workload):
        for module in modules.values():
            value = module(value)
    torch.autograd.backward(workload.mean_loss(value, targets))
    whole = nn.Sequential(*modules.values())
    return {
        name: parameter.grad
        for name, parameter in global_parameters(whole, span)
        if parameter.grad is not None
    }
