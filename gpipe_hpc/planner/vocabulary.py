"""Whether the model has a row for each token that the data may hold."""

from collections.abc import Sequence

from torch import nn

from gpipe_hpc.errors import ConfigError, ModelError
from gpipe_hpc.models import Layer, LayerSpec
from gpipe_hpc.planner.costs.meta import meta_layer


def check_vocabulary(
    layers: Sequence[Layer], vocab_size: int, *, holds_bytes: bool = False
) -> None:
    """Raise ConfigError if the data's vocabulary is larger than the model's, or another.

    The model's is the largest table of `nn.Embedding` in the first layer, which is built without
    values; where there is none, nothing is said. `holds_bytes`: the data's tokens are bytes. A
    model with a vocabulary of its own says so by a `check_bytes` of what its first layer is made
    with.
    """
    made_with = layers[0].args if isinstance(layers[0], LayerSpec) else ()
    for check in (getattr(each, "check_bytes", None) for each in made_with):
        if holds_bytes and check is not None:
            check()
    try:
        first = meta_layer(layers[0], 0)
    except ModelError:
        return  # who builds the layer in earnest tells of it
    rows = [part.num_embeddings for part in first.modules() if isinstance(part, nn.Embedding)]
    if rows and vocab_size > max(rows):
        raise ConfigError(
            f"config: bad data.vocab_size, expected at most {max(rows)}, the tokens that the "
            f"model's first layer has embeddings for, got {vocab_size}; lower data.vocab_size, or "
            f"take a model with a larger vocabulary"
        )
