"""GoogLeNet (Inception v1) as a sequence of layers.

Szegedy et al., Going deeper with convolutions, 2015. An Inception module is one layer, as is each
convolution, norm, ReLU and pooling of the stem. Auxiliary heads, used in training only, stash their
logits for the last layer. Shapes: images [B, C, H, W], logits [B, classes]; with auxiliary heads,
in training, (logits, logits of head 1, logits of head 2).
"""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor, nn

from gpipe_hpc.errors import ModelError
from gpipe_hpc.models.layers import LayerSpec
from gpipe_hpc.models.zoo.checks import check_dropout, check_sizes

_FORMS = ("torchvision", "caffe")
_WIDTH = 64  # channels of the first convolution, to which all other numbers are relative
_STEP = 8  # common divisor of all numbers of channels
_HEAD_CHANNELS, _HEAD_SIDE = 128, 4
_HEAD_HIDDEN = 1024
_HEAD_DROPOUT = 0.7

# Channels of: 1x1 | 1x1 before 3x3, 3x3 | 1x1 before 5x5, 5x5 | 1x1 after the pooling.
_MODULES: Final = (
    (("3a", (64, 96, 128, 16, 32, 32)), ("3b", (128, 128, 192, 32, 96, 64))),
    (
        ("4a", (192, 96, 208, 16, 48, 64)),
        ("4b", (160, 112, 224, 24, 64, 64)),
        ("4c", (128, 128, 256, 24, 64, 64)),
        ("4d", (112, 144, 288, 32, 64, 64)),
        ("4e", (256, 160, 320, 32, 128, 128)),
    ),
    (("5a", (256, 160, 320, 32, 128, 128)), ("5b", (384, 192, 384, 48, 128, 128))),
)
_HEADS: Final = {"4a": "head1", "4d": "head2"}  # after these modules


class GoogLeNetConv(nn.Conv2d):
    """A convolution with padding that keeps the size, initialised with small weights."""

    def __init__(
        self, num_inputs: int, num_outputs: int, kernel_size: int, stride: int, bias: bool
    ) -> None:
        super().__init__(
            num_inputs, num_outputs, kernel_size, stride, padding=kernel_size // 2, bias=bias
        )
        _init_small(self.weight)


class GoogLeNetLinear(nn.Linear):
    """A linear layer initialised with small weights."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__(num_inputs, num_outputs)
        _init_small(self.weight)


class Inception(nn.Module):
    """Four parallel branches, concatenated: [B, C, H, W] -> [B, C', H, W]."""

    def __init__(self, num_inputs: int, widths: Sequence[int], form: str) -> None:
        super().__init__()
        one, three_in, three, five_in, five, pooled = widths
        # torchvision uses 3 x 3 in the branch that is 5 x 5 in the paper.
        side = 5 if form == "caffe" else 3
        pool = nn.MaxPool2d(3, stride=1, padding=1)
        self.branches = nn.ModuleList(
            [
                _built(_unit(form, num_inputs, one, 1)),
                _built(_unit(form, num_inputs, three_in, 1) + _unit(form, three_in, three, 3)),
                _built(_unit(form, num_inputs, five_in, 1) + _unit(form, five_in, five, side)),
                nn.Sequential(pool, _built(_unit(form, num_inputs, pooled, 1))),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the concatenated channels of the branches."""
        return torch.cat([branch(x) for branch in self.branches], dim=1)


class AuxiliaryHead(nn.Module):
    """Auxiliary classifier in the middle of the network: x -> (x, logits to stash)."""

    def __init__(self, num_inputs: int, width: int, num_classes: int, form: str) -> None:
        super().__init__()
        channels, hidden = (_scaled(number, width) for number in (_HEAD_CHANNELS, _HEAD_HIDDEN))
        self.classify = nn.Sequential(
            nn.AdaptiveAvgPool2d(_HEAD_SIDE),
            *_built(_unit(form, num_inputs, channels, 1)),
            nn.Flatten(),
            GoogLeNetLinear(channels * _HEAD_SIDE**2, hidden),
            nn.ReLU(),
            nn.Dropout(_HEAD_DROPOUT),
            GoogLeNetLinear(hidden, num_classes),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the input, and the head's logits (None in evaluation)."""
        return x, self.classify(x) if self.training else None


class GatheredLogits(nn.Module):
    """Last layer: combines main and auxiliary logits for `classification_with_auxiliary`."""

    def forward(
        self, logits: Tensor, head1: Tensor | None, head2: Tensor | None
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """Return (logits, head1, head2), or only the logits in evaluation."""
        if head1 is None or head2 is None:
            return logits
        return logits, head1, head2


def build_googlenet(
    num_classes: int = 1000,
    in_channels: int = 3,
    width: int = 64,
    dropout: float = 0.2,
    auxiliary: bool = False,
    form: str = "torchvision",
) -> list[LayerSpec]:
    """Return GoogLeNet; ``auxiliary`` adds heads for the loss `classification_with_auxiliary`.

    ``form`` is ``torchvision``, with norms and without biases (6,624,904 parameters, 13,004,888
    with heads), or ``caffe``, as published, with biases, local response norms and a 5 x 5 branch
    (6,998,552 and 13,378,280). ``width`` is the number of channels of the first convolution; all
    others scale with it.

    Raises:
        ModelError: a size is invalid.
    """
    _check(num_classes, in_channels, width, dropout, form)
    layers, num_inputs = _stem(in_channels, width, form), _scaled(192, width)
    pools = [LayerSpec(nn.MaxPool2d, 3, stride=2, ceil_mode=True)] * 2
    # The last pooling is 2 x 2 in torchvision, 3 x 3 in the paper.
    pools.append(LayerSpec(nn.MaxPool2d, 3 if form == "caffe" else 2, stride=2, ceil_mode=True))
    for pool, modules in zip(pools, _MODULES, strict=True):
        layers.append(pool)
        for name, widths in modules:
            scaled = [_scaled(number, width) for number in widths]
            layers.append(LayerSpec(Inception, num_inputs, scaled, form))
            num_inputs = scaled[0] + scaled[2] + scaled[4] + scaled[5]
            if auxiliary and name in _HEADS:
                head = LayerSpec(AuxiliaryHead, num_inputs, width, num_classes, form)
                layers.append(head.stashing(_HEADS[name]))
    layers += [
        LayerSpec(nn.AdaptiveAvgPool2d, 1),
        LayerSpec(nn.Flatten),
        LayerSpec(nn.Dropout, dropout),
        LayerSpec(GoogLeNetLinear, num_inputs, num_classes),
    ]
    if auxiliary:
        layers.append(LayerSpec(GatheredLogits).popping(*_HEADS.values()))
    return layers


def _stem(in_channels: int, width: int, form: str) -> list[LayerSpec]:
    """Return all layers before the second pooling."""
    response = [LayerSpec(nn.LocalResponseNorm, 5)] if form == "caffe" else []
    return [
        *_unit(form, in_channels, width, 7, stride=2),
        LayerSpec(nn.MaxPool2d, 3, stride=2, ceil_mode=True),
        *response,
        *_unit(form, width, width, 1),
        *_unit(form, width, _scaled(192, width), 3),
        *response,
    ]


def _unit(
    form: str, num_inputs: int, num_outputs: int, kernel_size: int, stride: int = 1
) -> list[LayerSpec]:
    has_norm = form == "torchvision"
    conv = LayerSpec(GoogLeNetConv, num_inputs, num_outputs, kernel_size, stride, not has_norm)
    norm = [LayerSpec(nn.BatchNorm2d, num_outputs, eps=0.001)] if has_norm else []
    return [conv, *norm, LayerSpec(nn.ReLU)]


def _built(specs: Sequence[LayerSpec]) -> nn.Sequential:
    return nn.Sequential(*(spec.build() for spec in specs))


def _init_small(weight: Tensor) -> None:
    nn.init.trunc_normal_(weight, std=0.01, a=-0.02, b=0.02)


def _scaled(number: int, width: int) -> int:
    return number * width // _WIDTH


def _check(num_classes: int, in_channels: int, width: int, dropout: float, form: str) -> None:
    check_sizes("googlenet", num_classes=num_classes, in_channels=in_channels, width=width)
    check_dropout("googlenet", dropout)
    if width % _STEP:
        raise ModelError(
            f"googlenet: width must be a multiple of {_STEP}, so that all channels scale to whole "
            f"numbers, got {width}; use {_STEP * max(1, round(width / _STEP))}"
        )
    if form not in _FORMS:
        raise ModelError(
            f"googlenet: unknown form, expected one of {', '.join(_FORMS)}, got {form!r}; choose "
            f"one of them"
        )
