"""Pre-activation residual networks of depth 9 n + 2, for CIFAR and for large images.

He et al., Identity mappings in deep residual networks, 2016. Three groups of n blocks; norm and
ReLU come before each convolution, each as a separate layer::

    stem | stash, (norm, relu, conv) x 3, add | ... | norm, relu, average, flatten, linear

Shapes: images [B, C, H, W], logits [B, classes].
"""

from torch import nn

from gpipe_hpc.errors import ModelError
from gpipe_hpc.models.layers import LayerSpec
from gpipe_hpc.models.zoo.checks import check_sizes
from gpipe_hpc.models.zoo.residual import Add, ProjectedAdd, Stash

_NUM_GROUPS = 3
_FORMS = ("keras", "he")


class PreActConv(nn.Conv2d):
    """A convolution with padding that keeps the size; a bias, if any, starts at zero."""

    def __init__(
        self, num_inputs: int, num_outputs: int, kernel_size: int, stride: int, bias: bool
    ) -> None:
        super().__init__(
            num_inputs, num_outputs, kernel_size, stride, padding=kernel_size // 2, bias=bias
        )
        nn.init.kaiming_normal_(self.weight, nonlinearity="relu")
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class PreActProjection(ProjectedAdd):
    """Layer that adds a shortcut after projecting it by a convolution without norm."""

    def __init__(self, num_inputs: int, num_outputs: int, stride: int, bias: bool) -> None:
        super().__init__(PreActConv(num_inputs, num_outputs, 1, stride, bias))


def build_resnet_v2(
    depth: int, num_classes: int = 10, in_channels: int = 3, width: int = 16, form: str = "keras"
) -> list[LayerSpec]:
    """Return a ResNet-v2 of ``depth`` = 9 n + 2 convolutional layers, n blocks in each group.

    ``width`` is the number of channels of the stem; the groups have 4, 8 and 16 times as many.
    ``form`` is ``keras``, as in Keras' example and in the measurements on large images, with
    biases, a norm in the stem and 1, 4 and 8 times ``width`` within blocks (3,302,442 parameters at
    depth 110); or ``he``, as in the paper, without biases and with 1, 2 and 4 times ``width``.
    Norms use torch's momentum and eps.

    Raises:
        ModelError: a size is invalid.
    """
    num_blocks, rest = divmod(depth - 2, 3 * _NUM_GROUPS)
    if rest or num_blocks < 1:
        nearest = 9 * max(1, round((depth - 2) / 9)) + 2
        raise ModelError(
            f"resnet_v2: depth must be 9 n + 2 for n blocks in each of 3 groups, got {depth}; use "
            f"{nearest}"
        )
    if form not in _FORMS:
        raise ModelError(
            f"resnet_v2: unknown form, expected one of {', '.join(_FORMS)}, got {form!r}; choose "
            f"one of them"
        )
    check_sizes("resnet_v2", num_classes=num_classes, in_channels=in_channels, width=width)
    layers = [LayerSpec(PreActConv, in_channels, width, 3, 1, form == "keras")]
    if form == "keras":
        layers += _activation(width)
    num_inputs = width
    for group in range(_NUM_GROUPS):
        for block in range(num_blocks):
            num_outputs = 4 * width * 2**group
            layers += _block(num_inputs, num_outputs, group, block, form)
            num_inputs = num_outputs
    return [
        *layers,
        *_activation(num_inputs),
        LayerSpec(nn.AdaptiveAvgPool2d, 1),
        LayerSpec(nn.Flatten),
        LayerSpec(nn.Linear, num_inputs, num_classes),
    ]


def _block(num_inputs: int, num_outputs: int, group: int, block: int, form: str) -> list[LayerSpec]:
    """Return one block; the first of a group projects its shortcut and may halve the image."""
    bias, projects = form == "keras", block == 0
    stride = 2 if group > 0 and projects else 1
    inner = num_outputs // 2 if form == "keras" and group > 0 else num_outputs // 4
    name = f"shortcut{group}.{block}"
    stash = LayerSpec(Stash).stashing(name)
    add = LayerSpec(Add)
    if projects:
        add = LayerSpec(PreActProjection, num_inputs, num_outputs, stride, bias)
    if not projects or (form == "keras" and group > 0):
        start = [stash, *_activation(num_inputs)]
    elif form == "keras":
        start = [stash]  # the stem has norm and ReLU already
    else:
        start = []
    if projects and form == "he":
        start = [*_activation(num_inputs), stash]  # block and shortcut share norm and ReLU
    return [
        *start,
        LayerSpec(PreActConv, num_inputs, inner, 1, stride, bias),
        *_activation(inner),
        LayerSpec(PreActConv, inner, inner, 3, 1, bias),
        *_activation(inner),
        LayerSpec(PreActConv, inner, num_outputs, 1, 1, bias),
        add.popping(name),
    ]


def _activation(num_channels: int) -> list[LayerSpec]:
    return [LayerSpec(nn.BatchNorm2d, num_channels), LayerSpec(nn.ReLU)]
