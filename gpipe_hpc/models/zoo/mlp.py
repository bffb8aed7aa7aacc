"""A plain multilayer perceptron."""

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from gpipe_hpc.errors import ModelError
from gpipe_hpc.models.layers import LayerSpec


def build_mlp(widths: Sequence[int], activation: str = "relu") -> list[LayerSpec]:
    """Return linear layers of the given widths with an activation between any two.

    ``widths`` are the sizes from input to output: [8, 16, 4] gives Linear(8, 16), the activation,
    Linear(16, 4). ``activation`` is ``relu``, ``gelu``, ``silu`` or ``tanh``.

    Raises:
        ModelError: there are fewer than two widths, a width is below 1, or the activation is
            unknown.
    """
    activations = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU, "tanh": nn.Tanh}
    if activation not in activations:
        raise ModelError(
            f"mlp: unknown activation, expected one of {', '.join(activations)}, got "
            f"{activation!r}; choose one of them"
        )
    if len(widths) < 2 or min(widths) < 1:
        raise ModelError(
            f"mlp: widths must be at least two sizes of 1 or more, got {list(widths)}; "
            f"list the sizes from input to output"
        )
    layers: list[LayerSpec] = []
    for num_inputs, num_outputs in pairwise(widths):
        layers += [
            LayerSpec(nn.Linear, num_inputs, num_outputs),
            LayerSpec(activations[activation]),
        ]
    return layers[:-1]
