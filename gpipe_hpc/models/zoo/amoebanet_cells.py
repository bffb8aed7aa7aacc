"""The cells of AmoebaNet-D and their operations.

Real et al., Regularized evolution for image classifier architecture search, 2019. A cell has seven
states: 0 and 1 are its two inputs, projected to C channels, and each further one is the sum of two
operations on earlier states. The output is the concatenation of some of the states.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

Operation = Callable[[int, int], nn.Module]  # (channels, stride) -> module


class FactorizedReduce(nn.Module):
    """Layer that halves height and width: [B, C, H, W] -> [B, C', H/2, W/2].

    Half of the output channels read the even pixels, half the odd ones.
    """

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.pad = nn.ZeroPad2d((0, 1, 0, 1))
        half = num_outputs // 2
        self.even = nn.Conv2d(num_inputs, half, 1, stride=2, bias=False)
        self.odd = nn.Conv2d(num_inputs, half, 1, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return the concatenation of both halves, normalised."""
        x = self.relu(x)
        halves = self.even(x), self.odd(self.pad(x[:, :, 1:, 1:]))
        out: Tensor = self.norm(torch.cat(halves, dim=1))
        return out


def relu_conv_norm(num_inputs: int, num_outputs: int) -> nn.Module:
    """Return a sequence of ReLU, 1 x 1 convolution and BatchNorm."""
    return nn.Sequential(*_unit(num_inputs, num_outputs))


def _unit(
    num_inputs: int,
    num_outputs: int,
    kernel_size: tuple[int, int] = (1, 1),
    stride: tuple[int, int] = (1, 1),
) -> list[nn.Module]:
    padding = (kernel_size[0] // 2, kernel_size[1] // 2)
    conv = nn.Conv2d(num_inputs, num_outputs, kernel_size, stride, padding, bias=False)
    return [nn.ReLU(), conv, nn.BatchNorm2d(num_outputs)]


def _none(channels: int, stride: int) -> nn.Module:
    assert stride == 1, "the identity cannot halve a state"
    return nn.Identity()


def _average_3x3(channels: int, stride: int) -> nn.Module:
    return nn.AvgPool2d(3, stride, padding=1, count_include_pad=False)


# The genotype names max pooling, but the code behind the published counts and speeds averages.
_max_3x3: Final = _average_3x3


def _max_2x2(channels: int, stride: int) -> nn.Module:
    return nn.MaxPool2d(2, stride)


def _conv_1x1(channels: int, stride: int) -> nn.Module:
    return nn.Sequential(*_unit(channels, channels, stride=(stride, stride)))


def _conv_3x3(channels: int, stride: int) -> nn.Module:
    inner = channels // 4
    return nn.Sequential(
        *_unit(channels, inner),
        *_unit(inner, inner, (3, 3), (stride, stride)),
        *_unit(inner, channels),
    )


def _conv_1x7_7x1(channels: int, stride: int) -> nn.Module:
    inner = channels // 4
    return nn.Sequential(
        *_unit(channels, inner),
        *_unit(inner, inner, (1, 7), (1, stride)),
        *_unit(inner, inner, (7, 1), (stride, 1)),
        *_unit(inner, channels),
    )


@dataclass(frozen=True)
class Genotype:
    """The operations of one kind of cell.

    Attributes:
        operations: pairs (index of the input state, operation). State 2 + k is the sum of
            operations 2 k and 2 k + 1.
        outputs: states that are concatenated to the output.
        stride: stride of the operations on states 0 and 1.
    """

    operations: tuple[tuple[int, Operation], ...]
    outputs: tuple[int, ...]
    stride: int


NORMAL: Final = Genotype(
    operations=(
        *((1, _conv_1x1), (1, _max_3x3)),
        *((1, _none), (0, _conv_1x7_7x1)),
        *((0, _conv_1x1), (0, _conv_1x7_7x1)),
        *((2, _max_3x3), (2, _none)),
        *((1, _average_3x3), (5, _conv_1x1)),
    ),
    # As in the TensorFlow code; the paper's (4, 5, 6) does not reproduce the published sizes.
    outputs=(0, 3, 4, 6),
    stride=1,
)
REDUCTION: Final = Genotype(
    operations=(
        *((0, _max_2x2), (0, _max_3x3)),
        *((2, _none), (1, _conv_3x3)),
        *((2, _conv_1x7_7x1), (2, _max_3x3)),
        *((3, _none), (1, _max_2x2)),
        *((2, _average_3x3), (3, _conv_1x1)),
    ),
    outputs=(4, 5, 6),
    stride=2,
)

States = tuple[Tensor, Tensor]


class Cell(nn.Module):
    """One cell: maps (last output, output before it) to (the cell's output, last output).

    The first cell takes one tensor for both inputs.

    Args:
        genotype: the operations of the cell.
        num_before: channels of the output before the last one.
        num_last: channels of the last output.
        channels: channels of each state.
        halved: whether the previous cell was a reduction, so that `before` has twice the height and
            width of `last`.
    """

    def __init__(
        self, genotype: Genotype, num_before: int, num_last: int, channels: int, halved: bool
    ) -> None:
        super().__init__()
        self.genotype = genotype
        self.squeeze_last = relu_conv_norm(num_last, channels)
        self.squeeze_before: nn.Module = nn.Identity()
        if halved:
            self.squeeze_before = FactorizedReduce(num_before, channels)
        elif num_before != channels:
            self.squeeze_before = relu_conv_norm(num_before, channels)
        self.operations = nn.ModuleList(
            operation(channels, genotype.stride if state < 2 else 1)
            for state, operation in genotype.operations
        )

    def forward(self, inputs: Tensor | States) -> States:
        """Return this cell's output and its last input, both of which the next cell needs."""
        last, before = inputs if isinstance(inputs, tuple) else (inputs, inputs)
        states = [self.squeeze_last(last), self.squeeze_before(before)]
        sources = [state for state, _ in self.genotype.operations]
        for first in range(0, len(sources), 2):
            one, other = (self.operations[k](states[sources[k]]) for k in (first, first + 1))
            states.append(one + other)
        return torch.cat([states[state] for state in self.genotype.outputs], dim=1), last


class NormalCell(Cell):
    """A cell that keeps the height and width of its input."""

    def __init__(self, num_before: int, num_last: int, channels: int, halved: bool) -> None:
        super().__init__(NORMAL, num_before, num_last, channels, halved)


class ReductionCell(Cell):
    """A cell that halves the height and width of its input, which must be even."""

    def __init__(self, num_before: int, num_last: int, channels: int, halved: bool) -> None:
        super().__init__(REDUCTION, num_before, num_last, channels, halved)
