"""AlexNet as a sequence of layers, in torchvision's form.

Krizhevsky, One weird trick for parallelizing convolutional neural networks, 2014: one tower,
no local response normalisation. Shapes: images [B, C, H, W], logits [B, classes]. Pooling
averages to 6 x 6 before the classifier, so images may have any size of at least 63 pixels a side.
"""

from torch import nn

from gpipe_hpc.models.layers import LayerSpec
from gpipe_hpc.models.zoo.checks import check_dropout, check_sizes

_POOLED = 6  # side length in pixels of the classifier's input


def build_alexnet(
    num_classes: int = 1000,
    in_channels: int = 3,
    width: int = 64,
    hidden: int = 4096,
    dropout: float = 0.5,
) -> list[LayerSpec]:
    """Return AlexNet as 22 layers; 61,100,840 parameters by default, as published.

    ``width`` is the number of channels of the first convolution; the others have 3, 6, 4 and 4
    times as many. ``hidden`` is the width of the classifier. Weights are initialized as in torch.
    Raises `ModelError` for sizes that cannot work.
    """
    sizes = {"num_classes": num_classes, "in_channels": in_channels, "width": width}
    check_sizes("alexnet", **sizes, hidden=hidden)
    check_dropout("alexnet", dropout)
    relu, pool = LayerSpec(nn.ReLU), LayerSpec(nn.MaxPool2d, 3, stride=2)
    return [
        LayerSpec(nn.Conv2d, in_channels, width, 11, stride=4, padding=2),
        relu,
        pool,
        LayerSpec(nn.Conv2d, width, 3 * width, 5, padding=2),
        relu,
        pool,
        LayerSpec(nn.Conv2d, 3 * width, 6 * width, 3, padding=1),
        relu,
        LayerSpec(nn.Conv2d, 6 * width, 4 * width, 3, padding=1),
        relu,
        LayerSpec(nn.Conv2d, 4 * width, 4 * width, 3, padding=1),
        relu,
        pool,
        LayerSpec(nn.AdaptiveAvgPool2d, _POOLED),
        LayerSpec(nn.Flatten),
        LayerSpec(nn.Dropout, dropout),
        LayerSpec(nn.Linear, 4 * width * _POOLED**2, hidden),
        relu,
        LayerSpec(nn.Dropout, dropout),
        LayerSpec(nn.Linear, hidden, hidden),
        relu,
        LayerSpec(nn.Linear, hidden, num_classes),
    ]
