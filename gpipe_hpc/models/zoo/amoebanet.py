"""AmoebaNet-D(L, D) as a sequence of layers: GPipe's image model, in torchgpipe's form.

Real et al., 2019; Huang et al., GPipe, 2019. Each cell is a layer and returns a pair, its output
and its input, since the next cell needs both::

    stem, reduction x 2, (normal x L/3, reduction) x 2, normal x L/3, classify

Shapes: images [B, C, H, W] with sides divisible by 32, logits [B, classes].
"""

from torch import Tensor, nn

from gpipe_hpc.errors import ModelError
from gpipe_hpc.models.layers import LayerSpec
from gpipe_hpc.models.zoo.amoebanet_cells import (
    NORMAL,
    REDUCTION,
    NormalCell,
    ReductionCell,
    States,
)
from gpipe_hpc.models.zoo.checks import check_sizes

_REDUCED = 16  # factor by which the reductions divide the side of the stem's output


class AmoebaNetStem(nn.Module):
    """ReLU, convolution and norm, halving the image: [B, C, H, W] -> [B, C', H/2, W/2]."""

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.conv = nn.Conv2d(in_channels, channels, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, images: Tensor) -> Tensor:
        """Return the features of images [B, C, H, W].

        Raises ModelError if height or width is not divisible by 32: branches of the cells would
        round odd sizes differently.
        """
        features: Tensor = self.conv(self.relu(images))
        if any(side % _REDUCED for side in features.shape[-2:]):
            raise ModelError(
                f"amoebanet_d: height and width of images must be divisible by {2 * _REDUCED}, got "
                f"{list(images.shape)}; resize or pad the images"
            )
        normed: Tensor = self.norm(features)
        return normed


class AmoebaNetClassifier(nn.Module):
    """Average pooling and a linear classifier: the last pair of states -> logits [B, classes]."""

    def __init__(self, num_inputs: int, num_classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(num_inputs, num_classes)

    def forward(self, states: States) -> Tensor:
        """Return the logits of the last cell's output."""
        logits: Tensor = self.linear(states[0].mean((-2, -1)))
        return logits


def build_amoebanet_d(
    num_layers: int = 18, num_filters: int = 256, num_classes: int = 1000, in_channels: int = 3
) -> list[LayerSpec]:
    """Return AmoebaNet-D(``num_layers``, ``num_filters``) as ``num_layers`` + 6 layers.

    ``num_layers`` is the number of normal cells, a third of them between any two reductions.
    ``num_filters`` is four times the number of channels of the stem; each of the four reductions
    doubles the channels. Published: (18, 256), 122,470,120 parameters.

    Raises:
        ModelError: a size is invalid.
    """
    check_sizes("amoebanet_d", num_classes=num_classes, in_channels=in_channels)
    if num_layers < 3 or num_layers % 3:
        raise ModelError(
            f"amoebanet_d: num_layers must be a multiple of 3, for three groups of normal cells, "
            f"got {num_layers}; use {3 * max(1, round(num_layers / 3))}"
        )
    if num_filters < 8 or num_filters % 4:
        raise ModelError(
            f"amoebanet_d: num_filters must be a multiple of 4 and at least 8, got "
            f"{num_filters}; use {4 * max(2, round(num_filters / 4))}"
        )
    group = [False] * (num_layers // 3)
    reductions = [True, True, *group, True, *group, True, *group]
    channels = num_filters // 4
    layers = [LayerSpec(AmoebaNetStem, in_channels, channels)]
    before = last = channels
    halved = False
    for reduces in reductions:
        channels *= 2 if reduces else 1
        cell = ReductionCell if reduces else NormalCell
        layers.append(LayerSpec(cell, before, last, channels, halved))
        genotype = REDUCTION if reduces else NORMAL
        before, last = last, channels * len(genotype.outputs)
        halved = reduces
    return [*layers, LayerSpec(AmoebaNetClassifier, last, num_classes)]
