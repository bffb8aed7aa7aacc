"""Whether the model has a row for each token that the data may hold."""

from collections.abc import Sequence

from torch import nn

from gpipe_hpc.errors import ConfigError, ModelError
from gpipe_hpc.models import Layer
from gpipe_hpc.planning.costs.meta import meta_layer


def check_vocabulary(layers: Sequence[Layer], vocab_size: int) -> None:
    """Raise ConfigError if the data's vocabulary is larger than the model's.

    The model's is the largest table of `nn.Embedding` in the first layer, which is built without
    values; where there is none, nothing is said.
    """
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
