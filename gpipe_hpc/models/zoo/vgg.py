"""The VGG family as a sequence of layers, without batch normalisation.

Simonyan and Zisserman, Very deep convolutional networks for large-scale image recognition, 2015, in
torchvision's form. Every convolution, ReLU and pooling is a separate layer::

    (conv, relu) x n, pool | ... | average, flatten | linear, relu, dropout, ... | linear

Shapes: images [B, C, H, W], logits [B, classes]. Pooling averages to 7 x 7 before the classifier,
so images may have any size that leaves a pixel after all poolings: at least 32 a side for five.
"""

from collections.abc import Sequence

from torch import nn

from gpipe_hpc.errors import ModelError
from gpipe_hpc.models.layers import LayerSpec
from gpipe_hpc.models.zoo.checks import check_dropout, check_sizes

_POOLED = 7  # side length in pixels of the classifier's input
_WIDEST = 8  # largest number of channels, as a multiple of the first group's


class VGGConv(nn.Conv2d):
    """A 3 x 3 convolution that keeps the size: [B, C, H, W] -> [B, C', H, W]."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__(num_inputs, num_outputs, kernel_size=3, padding=1)
        nn.init.kaiming_normal_(self.weight, mode="fan_out", nonlinearity="relu")
        assert self.bias is not None, "a VGG convolution has a bias"
        nn.init.zeros_(self.bias)


class VGGLinear(nn.Linear):
    """A linear layer of the classifier, initialised with small normal weights."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__(num_inputs, num_outputs)
        nn.init.normal_(self.weight, std=0.01)
        nn.init.zeros_(self.bias)


def build_vgg(
    num_convs: Sequence[int],
    num_classes: int = 1000,
    in_channels: int = 3,
    width: int = 64,
    hidden: int = 4096,
    dropout: float = 0.5,
) -> list[LayerSpec]:
    """Return a VGG with ``num_convs`` convolutions in each group; a pooling ends each group.

    (2, 2, 3, 3, 3) is VGG-16, (2, 2, 4, 4, 4) is VGG-19. The first group has ``width`` channels,
    each further one twice as many, up to eight times ``width``; ``hidden`` is the width of the
    classifier. Weights are initialised as torchvision's.

    Raises:
        ModelError: a size is invalid.
    """
    if not num_convs:
        raise ModelError(
            "vgg: num_convs is empty; give the number of convolutions of each group, such as "
            "[2, 2, 3, 3, 3]"
        )
    check_sizes("vgg", num_classes=num_classes, in_channels=in_channels, width=width, hidden=hidden)
    check_sizes("vgg", **{f"num_convs[{group}]": number for group, number in enumerate(num_convs)})
    check_dropout("vgg", dropout)
    layers: list[LayerSpec] = []
    channels = in_channels
    for group, number in enumerate(num_convs):
        for _ in range(number):
            wider = width * min(2**group, _WIDEST)
            layers += [LayerSpec(VGGConv, channels, wider), LayerSpec(nn.ReLU)]
            channels = wider
        layers.append(LayerSpec(nn.MaxPool2d, 2))
    layers += [LayerSpec(nn.AdaptiveAvgPool2d, _POOLED), LayerSpec(nn.Flatten)]
    for num_inputs in (channels * _POOLED**2, hidden):
        layers += [
            LayerSpec(VGGLinear, num_inputs, hidden),
            LayerSpec(nn.ReLU),
            LayerSpec(nn.Dropout, dropout),
        ]
    return [*layers, LayerSpec(VGGLinear, hidden, num_classes)]
