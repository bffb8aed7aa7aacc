"""The loss of transformers' causal language models."""

from torch import Tensor

from gpipe_hpc.errors import ModelError
from gpipe_hpc.models.losses import token_cross_entropy


def causal_lm(logits: Tensor, labels: Tensor, ignore_index: int = -100) -> tuple[Tensor, Tensor]:
    """Return the summed cross-entropy in nats and the number of tokens that count.

    ``logits`` are [B, S, V]; ``labels`` [B, S], not shifted, as transformers takes them: position
    i is to predict label i + 1. Labels equal to ``ignore_index`` add neither loss nor weight.
    Targets that are shifted already, as our data gives them, go to `token_cross_entropy`.
    """
    if logits.shape[:-1] != labels.shape or labels.dim() != 2:
        raise ModelError(
            f"causal_lm: shapes do not match, expected labels of shape {list(logits.shape[:-1])} "
            f"for logits of shape {list(logits.shape)}, got {list(labels.shape)}; give the tokens "
            f"themselves as labels"
        )
    return token_cross_entropy(logits[:, :-1], labels[:, 1:], ignore_index)
