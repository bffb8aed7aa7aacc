"""Checks of whether a sequence model uses later positions of its input."""

from collections.abc import Sequence

from gpipe_hpc.models.layers import Layer, LayerSpec


def sees_ahead(layers: Sequence[Layer]) -> bool:
    """Return whether a layer is known to use later positions, as in bidirectional attention.

    Such a model sees the next token, so it cannot be trained to predict the next token. A layer
    declares this by an attribute `sees_ahead` = True of its class or of one of its arguments.
    """
    return _declares(layers, "sees_ahead")


def looks_back(layers: Sequence[Layer]) -> bool:
    """Return whether the model is known to be a causal language model.

    A layer declares this by an attribute `looks_back` = True, in the same way as `sees_ahead`.
    """
    return _declares(layers, "looks_back") and not sees_ahead(layers)


def _declares(layers: Sequence[Layer], name: str) -> bool:
    for layer in layers:
        told = (layer.factory, *layer.args) if isinstance(layer, LayerSpec) else (layer,)
        if any(getattr(each, name, False) is True for each in told):
            return True
    return False
