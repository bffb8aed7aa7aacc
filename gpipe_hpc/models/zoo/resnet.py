"""Residual networks as a sequence of layers, in torchvision's form.

He et al., Deep residual learning for image recognition, 2016, with the stride in the 3 x 3
convolution. Every convolution, norm and ReLU is a separate layer, and the shortcut of a block is a
skip from its first layer to the one that adds, so that a stage boundary may be anywhere::

    stem | stash, (conv, norm, relu) x 2, conv, norm, add, relu | ... | average, flatten, linear

A bottleneck block has 11 layers, a basic one 8; ResNet-101 has 370 layers, as in torchgpipe.
Shapes: images [B, C, H, W], logits [B, classes].
"""

from collections.abc import Iterator, Sequence

from torch import nn

from gpipe_hpc.errors import ModelError
from gpipe_hpc.models.layers import LayerSpec
from gpipe_hpc.models.zoo.checks import check_sizes
from gpipe_hpc.models.zoo.residual import Add, ProjectedAdd, Stash

_EXPANSION = 4  # output channels of a bottleneck block per channel of its 3 x 3 convolution


class ResNetConv(nn.Conv2d):
    """A padded convolution without bias: [B, C, H, W] -> [B, C', H / stride, W / stride]."""

    def __init__(
        self, num_inputs: int, num_outputs: int, kernel_size: int, stride: int = 1
    ) -> None:
        super().__init__(
            num_inputs, num_outputs, kernel_size, stride, padding=kernel_size // 2, bias=False
        )
        nn.init.kaiming_normal_(self.weight, mode="fan_out", nonlinearity="relu")


class ResNetProjection(ProjectedAdd):
    """Layer that adds a shortcut after a convolution has matched its channels and image size."""

    def __init__(self, num_inputs: int, num_outputs: int, stride: int) -> None:
        conv = ResNetConv(num_inputs, num_outputs, 1, stride)
        super().__init__(nn.Sequential(conv, nn.BatchNorm2d(num_outputs)))


def zeroed_norm(num_channels: int) -> nn.BatchNorm2d:
    """Return a BatchNorm with zero weights, so that its residual block starts as the identity."""
    norm = nn.BatchNorm2d(num_channels)
    nn.init.zeros_(norm.weight)
    return norm


def build_resnet(
    num_blocks: Sequence[int],
    num_classes: int = 1000,
    in_channels: int = 3,
    width: int = 64,
    zero_init_residual: bool = False,
) -> list[LayerSpec]:
    """Return a ResNet of bottleneck blocks, ``num_blocks`` in each group.

    (3, 4, 6, 3) is ResNet-50, (3, 4, 23, 3) ResNet-101, (3, 8, 36, 3) ResNet-152. ``width`` is the
    number of channels of the stem and of the first group's 3 x 3 convolutions; each further group
    has twice as many channels on images of half the size. With ``zero_init_residual``, blocks start
    as the identity. The model has 11 layers per block and 7 more.

    Raises:
        ModelError: a size is invalid.
    """
    _check("resnet", num_blocks, num_classes, in_channels, width)
    layers = [*_unit(in_channels, width, 7, 2), LayerSpec(nn.MaxPool2d, 3, stride=2, padding=1)]
    last_norm = zeroed_norm if zero_init_residual else nn.BatchNorm2d
    num_inputs = width
    for group, name, stride in _blocks(num_blocks):
        inner = width * 2**group
        num_outputs = _EXPANSION * inner
        layers += [
            LayerSpec(Stash).stashing(name),
            *_unit(num_inputs, inner, 1),
            *_unit(inner, inner, 3, stride),
            LayerSpec(ResNetConv, inner, num_outputs, 1),
            LayerSpec(last_norm, num_outputs),
            _shortcut(num_inputs, num_outputs, stride).popping(name),
            LayerSpec(nn.ReLU),
        ]
        num_inputs = num_outputs
    return [*layers, *_head(num_inputs, num_classes)]


def build_small_resnet(
    num_blocks: Sequence[int] = (1, 1, 1),
    num_classes: int = 10,
    in_channels: int = 1,
    width: int = 32,
) -> list[LayerSpec]:
    """Return a ResNet of basic blocks for small images of 8 to 32 pixels a side.

    As in ResNets for CIFAR-10: a 3 x 3 stem of ``width`` channels that keeps the size, then groups
    of ``num_blocks`` blocks, each further group with twice the channels on images of half the size.
    The model has 8 layers per block and 6 more.

    Raises:
        ModelError: a size is invalid.
    """
    _check("resnet_small", num_blocks, num_classes, in_channels, width)
    layers = _unit(in_channels, width, 3)
    num_inputs = width
    for group, name, stride in _blocks(num_blocks):
        num_outputs = width * 2**group
        layers += [
            LayerSpec(Stash).stashing(name),
            *_unit(num_inputs, num_outputs, 3, stride),
            LayerSpec(ResNetConv, num_outputs, num_outputs, 3),
            LayerSpec(nn.BatchNorm2d, num_outputs),
            _shortcut(num_inputs, num_outputs, stride).popping(name),
            LayerSpec(nn.ReLU),
        ]
        num_inputs = num_outputs
    return [*layers, *_head(num_inputs, num_classes)]


def _check(
    model: str, num_blocks: Sequence[int], num_classes: int, in_channels: int, width: int
) -> None:
    if not num_blocks:
        raise ModelError(
            f"{model}: num_blocks is empty; give the number of blocks of each group, such as "
            f"[3, 4, 6, 3]"
        )
    check_sizes(model, num_classes=num_classes, in_channels=in_channels, width=width)
    check_sizes(
        model, **{f"num_blocks[{group}]": number for group, number in enumerate(num_blocks)}
    )


def _blocks(num_blocks: Sequence[int]) -> Iterator[tuple[int, str, int]]:
    """Yield (group index, name of the shortcut, stride) of every block."""
    for group, number in enumerate(num_blocks):
        for block in range(number):
            yield group, f"shortcut{group}.{block}", 2 if group > 0 and block == 0 else 1


def _unit(num_inputs: int, num_outputs: int, kernel_size: int, stride: int = 1) -> list[LayerSpec]:
    return [
        LayerSpec(ResNetConv, num_inputs, num_outputs, kernel_size, stride),
        LayerSpec(nn.BatchNorm2d, num_outputs),
        LayerSpec(nn.ReLU),
    ]


def _shortcut(num_inputs: int, num_outputs: int, stride: int) -> LayerSpec:
    if stride == 1 and num_inputs == num_outputs:
        return LayerSpec(Add)
    return LayerSpec(ResNetProjection, num_inputs, num_outputs, stride)


def _head(num_inputs: int, num_classes: int) -> list[LayerSpec]:
    return [
        LayerSpec(nn.AdaptiveAvgPool2d, 1),
        LayerSpec(nn.Flatten),
        LayerSpec(nn.Linear, num_inputs, num_classes),
    ]
