"""Check that the model has an embedding for each token that the data may contain."""

from collections.abc import Sequence

from torch import nn

from gpipe_hpc.errors import ConfigError, ModelError
from gpipe_hpc.models import Layer, LayerSpec
from gpipe_hpc.planner.costs.meta import meta_layer


def check_vocabulary(
    layers: Sequence[Layer], vocab_size: int, *, holds_bytes: bool = False
) -> None:
    """Raise ConfigError if the data's vocabulary does not fit the model's.

    The model's vocabulary is the largest `nn.Embedding` of the first layer, which is built without
    values; nothing is checked if there is none. `holds_bytes`: the tokens of the data are bytes. A
    model with its own vocabulary can define `check_bytes` on the argument from which its first
    layer is built.
    """
    made_with = layers[0].args if isinstance(layers[0], LayerSpec) else ()
    for check in (getattr(each, "check_bytes", None) for each in made_with):
        if holds_bytes and check is not None:
            check()
    try:
        first = meta_layer(layers[0], 0)
    except ModelError:
        return  # building the layer for the run raises the error
    rows = [part.num_embeddings for part in first.modules() if isinstance(part, nn.Embedding)]
    if rows and vocab_size > max(rows):
        raise ConfigError(
            f"config: data.vocab_size={vocab_size} is too large: the model's first layer has "
            f"embeddings for {max(rows)} tokens; lower data.vocab_size, or use a model with a "
            f"larger vocabulary"
        )
