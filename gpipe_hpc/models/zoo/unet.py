"""U-Net as a sequence of layers, with its long skips.

Ronneberger et al., U-Net, 2015, in the simplified form that torchgpipe measures: B convolutions
per level, each without bias, followed by dropout, instance norm and leaky ReLU::

    encoder 0 .. depth-1: (conv, dropout, norm, relu) x B, stash, pool
    bottleneck:           (conv, dropout, norm, relu) x B
    decoder depth-1 .. 0: upsample, join, (conv, dropout, norm, relu) x B
    segment

Encoder i stashes its output for decoder i. Shapes: images [B, C, H, W] of any size of at least
2^(depth+1) pixels a side, logits [B, classes, H, W].
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_hpc.errors import ModelError
from gpipe_hpc.models.layers import LayerSpec
from gpipe_hpc.models.zoo.checks import check_dropout, check_sizes
from gpipe_hpc.models.zoo.residual import Stash


class Join(nn.Module):
    """Layer that appends the encoder's channels: [B, C, h, w], [B, C', H, W] -> [B, C+C', H, W].

    The input is padded with zeros at the bottom and right, because pooling of odd sizes drops
    pixels.
    """

    def forward(self, x: Tensor, stashed: Tensor) -> Tensor:
        """Return the input's channels, followed by the stashed ones."""
        bottom, right = (stashed.shape[d] - x.shape[d] for d in (2, 3))
        return torch.cat((F.pad(x, (0, right, 0, bottom)), stashed), dim=1)


def build_unet(
    num_convs: int = 5,
    base_channels: int = 64,
    in_channels: int = 3,
    num_classes: int = 1,
    depth: int = 5,
    dropout: float = 0.1,
) -> list[LayerSpec]:
    """Return a U-Net of ``num_convs`` convolutions per level: 21 + 44 ``num_convs`` layers.

    ``base_channels`` is the number of channels of the first level; each of ``depth`` levels below
    has twice as many. (With another depth d, the model has 4 d + 1 + (8 d + 4) ``num_convs`` layers
    and d skips.) ``num_classes`` is the number of output channels, ``dropout`` the fraction of
    channels zeroed after each convolution.

    Raises:
        ModelError: a size is invalid.
    """
    check_sizes(
        "unet",
        num_convs=num_convs,
        base_channels=base_channels,
        in_channels=in_channels,
        num_classes=num_classes,
        depth=depth,
    )
    check_dropout("unet", dropout)
    if base_channels % 2:
        raise ModelError(
            f"unet: base_channels must be even (the last level has half as many), got "
            f"{base_channels}; use {base_channels + 1}"
        )
    widths = [base_channels * 2**level for level in range(depth + 1)]
    layers: list[LayerSpec] = []
    channels = in_channels
    for level, width in enumerate(widths[:-1]):
        layers += _convs(channels, width, width, num_convs, dropout)
        layers += [LayerSpec(Stash).stashing(f"level{level}"), LayerSpec(nn.MaxPool2d, 2)]
        channels = width
    layers += _convs(channels, widths[-1], channels, num_convs, dropout)
    for level in reversed(range(depth)):
        out = widths[level] // 2
        layers += [
            LayerSpec(nn.Upsample, scale_factor=2),
            LayerSpec(Join).popping(f"level{level}"),
            *_convs(2 * widths[level], out, out, num_convs, dropout),
        ]
    return [*layers, LayerSpec(nn.Conv2d, base_channels // 2, num_classes, 1, bias=False)]


def _convs(
    num_inputs: int, num_inner: int, num_outputs: int, number: int, dropout: float
) -> list[LayerSpec]:
    channels = [num_inputs, *[num_inner] * (number - 1), num_outputs]
    layers: list[LayerSpec] = []
    for before, behind in pairwise(channels):
        layers += [
            LayerSpec(nn.Conv2d, before, behind, 3, padding=1, bias=False),
            LayerSpec(nn.Dropout2d, dropout),
            LayerSpec(nn.InstanceNorm2d, behind),
            LayerSpec(nn.LeakyReLU, 0.01),
        ]
    return layers
