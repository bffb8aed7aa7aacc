"""The GPT-2 family as a sequence of layers.

Radford et al., Language models are unsupervised multitask learners, 2019. A block is two layers,
attention and MLP, each with its own residual, so that a stage boundary may be inside a block::

    embedding | attention, mlp | attention, mlp | ... | norm | head

Shapes: B samples, S positions, H width, A heads, V vocabulary. Tokens are [B, S] integers,
activations [B, S, H], logits [B, S, V].
"""

import math

import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_hpc.errors import ModelError
from gpipe_hpc.models.layers import LayerSpec
from gpipe_hpc.models.zoo.checks import check_dropout, check_heads, check_sizes

_INIT_STD = 0.02


class GPTEmbedding(nn.Module):
    """Token plus position embedding, then dropout: [B, S] -> [B, S, H]."""

    looks_back = True

    def __init__(self, vocab_size: int, block_size: int, width: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab_size, width)
        self.position = nn.Embedding(block_size, width)
        self.dropout = nn.Dropout(dropout)
        nn.init.normal_(self.token.weight, std=_INIT_STD)
        nn.init.normal_(self.position.weight, std=_INIT_STD)

    def forward(self, tokens: Tensor) -> Tensor:
        """Embed token ids [B, S]; raise `ModelError` if S is greater than ``block_size``."""
        length, block_size = tokens.shape[-1], self.position.num_embeddings
        if length > block_size:
            raise ModelError(
                f"GPT embedding: the sequence is too long, expected at most {block_size} "
                f"positions, got {length}; shorten the samples or raise block_size"
            )
        embedded: Tensor = self.dropout(self.token(tokens) + self.position.weight[:length])
        return embedded


class GPTAttention(nn.Module):
    """Causal self-attention with LayerNorm and residual: [B, S, H] -> [B, S, H]."""

    def __init__(self, width: int, num_heads: int, dropout: float, residual_std: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm = nn.LayerNorm(width)
        self.qkv = _linear(width, 3 * width, _INIT_STD)
        self.out = _linear(width, width, residual_std)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Apply attention to this and earlier positions, and add the residual."""
        qkv = self.qkv(self.norm(x)).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each [B, A, S, H / A]
        attended = F.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout.p if self.training else 0.0, is_causal=True
        )
        residual: Tensor = self.dropout(self.out(attended.transpose(1, 2).flatten(2)))
        return x + residual


class GPTMLP(nn.Module):
    """Two linear layers with a tanh GELU, LayerNorm and residual: [B, S, H] -> [B, S, H]."""

    def __init__(self, width: int, dropout: float, residual_std: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = _linear(width, 4 * width, _INIT_STD)
        self.down = _linear(4 * width, width, residual_std)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the position-wise network and add the residual."""
        hidden = F.gelu(self.up(self.norm(x)), approximate="tanh")
        residual: Tensor = self.dropout(self.down(hidden))
        return x + residual


class GPTHead(nn.Linear):
    """Linear map to logits over the vocabulary, without bias: [B, S, H] -> [B, S, V]."""

    def __init__(self, width: int, vocab_size: int) -> None:
        super().__init__(width, vocab_size, bias=False)
        nn.init.normal_(self.weight, std=_INIT_STD)


def _linear(num_inputs: int, num_outputs: int, std: float) -> nn.Linear:
    linear = nn.Linear(num_inputs, num_outputs)
    nn.init.normal_(linear.weight, std=std)
    nn.init.zeros_(linear.bias)
    return linear


def build_gpt(
    vocab_size: int,
    block_size: int,
    num_layers: int,
    num_heads: int,
    width: int,
    dropout: float = 0.0,
    tied: bool = False,
) -> list[LayerSpec]:
    """Return a GPT as 2 ``num_layers`` + 3 layers; ``tied`` shares embedding and head weights.

    ``block_size`` is the longest sequence. ``num_layers`` counts blocks, as in the GPT-2 paper.
    Weights are initialised as GPT-2's: normal with std 0.02, projections into the residual divided
    by sqrt(2 ``num_layers``), biases zero. Parameters: V H + S H + L (12 H^2 + 13 H) + 2 H tied, V
    H more untied.

    Raises:
        ModelError: a size is invalid.
    """
    check_sizes(
        "gpt",
        vocab_size=vocab_size,
        block_size=block_size,
        num_layers=num_layers,
        num_heads=num_heads,
        width=width,
    )
    check_heads("gpt", width, num_heads)
    check_dropout("gpt", dropout)
    residual_std = _INIT_STD / math.sqrt(2 * num_layers)
    block = [
        LayerSpec(GPTAttention, width, num_heads, dropout, residual_std),
        LayerSpec(GPTMLP, width, dropout, residual_std),
    ]
    embedding = LayerSpec(GPTEmbedding, vocab_size, block_size, width, dropout)
    head = LayerSpec(GPTHead, width, vocab_size)
    if tied:
        embedding = embedding.tied({"token.weight": "vocabulary"})
        head = head.tied({"weight": "vocabulary"})
    return [embedding, *block * num_layers, LayerSpec(nn.LayerNorm, width), head]
