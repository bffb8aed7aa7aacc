"""AmoebaNet-D(L, D) as a sequence of layers: GPipe's model for images, in torchgpipe's form.

Real et al., 2019; Huang et al., GPipe, 2019. Each cell is a layer and passes on a pair, its own
output and its input, since the cell behind it needs both::

    stem, reduction x 2, (normal x L/3, reduction) x 2, normal x L/3, classify

Shapes: images [B, C, H, W] with sides that divide by 32, logits [B, classes].
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

_REDUCED = 16  # the reductions divide a side that leaves the stem by this


class AmoebaNetStem(nn.Module):
    """ReLU, convolution and norm, halving the image: [B, C, H, W] -> [B, C', H/2, W/2]."""

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.conv = nn.Conv2d(in_channels, channels, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, images: Tensor) -> Tensor:
        """Return the features; raise `ModelError` for images whose sides do not halve five times.

        The cells would fail on them, on odd sizes that their branches round differently.
        """
        features: Tensor = self.conv(self.relu(images))
        if any(side % _REDUCED for side in features.shape[-2:]):
            raise ModelError(
                f"amoebanet_d: images of a size that does not halve five times, expected height "
                f"and width to divide by {2 * _REDUCED}, got {list(images.shape)}; resize or pad "
                f"the images"
            )
        normed: Tensor = self.norm(features)
        return normed


class AmoebaNetClassifier(nn.Module):
    """Average over the image and map to logits: the last pair of states -> [B, classes]."""

    def __init__(self, num_inputs: int, num_classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(num_inputs, num_classes)

    def forward(self, states: States) -> Tensor:
        """Return logits of the last cell's output."""
        logits: Tensor = self.linear(states[0].mean((-2, -1)))
        return logits


def build_amoebanet_d(
    num_layers: int = 18, num_filters: int = 256, num_classes: int = 1000, in_channels: int = 3
) -> list[LayerSpec]:
    """Return AmoebaNet-D(``num_layers``, ``num_filters``) as ``num_layers`` + 6 layers.

    ``num_layers`` is the number of normal cells, a third of them between any two reductions;
    ``num_filters`` is four times the channels of the stem, and each of the four reductions
    doubles the channels. Published: (18, 256), 122,470,120 parameters. Raises `ModelError` for
    sizes that cannot work.
    """
    check_sizes("amoebanet_d", num_classes=num_classes, in_channels=in_channels)
    if num_layers < 3 or num_layers % 3:
        raise ModelError(
            f"amoebanet_d: impossible num_layers, expected a multiple of 3, for the normal cells "
            f"stand in three groups, got {num_layers}; take {3 * max(1, round(num_layers / 3))}"
        )
    if num_filters < 8 or num_filters % 4:
        raise ModelError(
            f"amoebanet_d: impossible num_filters, expected a multiple of 4 from 8 up, got "
            f"{num_filters}; take {4 * max(2, round(num_filters / 4))}"
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
