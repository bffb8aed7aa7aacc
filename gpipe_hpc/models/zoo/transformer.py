"""GPipe's Transformer-L as a sequence of layers.

Huang et al., GPipe, 2019, table 1: Vaswani et al.'s Transformer (2017) as a causal language
model, with norms before attention and MLP. Only the sizes are published: L layers of width 2048,
MLPs of 8192, 32 heads, a vocabulary of 32,000, sequences of 1024. A layer of the paper is two
layers here, attention and MLP, each with its own residual::

    embedding | attention, mlp | attention, mlp | ... | norm | head

Shapes: B samples, S positions, H width, V vocabulary. Tokens are [B, S] integers, activations
[B, S, H], logits [B, S, V]. Position encodings are Vaswani's sinusoids, without parameters.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_hpc.errors import ModelError
from gpipe_hpc.models.layers import LayerSpec
from gpipe_hpc.models.zoo.checks import check_dropout, check_heads, check_sizes
from gpipe_hpc.models.zoo.gpt import GPTAttention

_INIT_STD = 0.02


class TransformerEmbedding(nn.Module):
    """Scaled token embedding plus sinusoidal positions, then dropout: [B, S] -> [B, S, H]."""

    waves: Tensor

    def __init__(self, vocab_size: int, block_size: int, width: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab_size, width)
        self.dropout = nn.Dropout(dropout)
        nn.init.normal_(self.token.weight, std=width**-0.5)
        # Computed, not learned, so it is not part of checkpoints.
        self.register_buffer("waves", position_waves(block_size, width), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Embed token ids [B, S]; raise `ModelError` if S is greater than ``block_size``."""
        length, (block_size, width) = tokens.shape[-1], self.waves.shape
        if length > block_size:
            raise ModelError(
                f"Transformer embedding: the sequence is too long, expected at most {block_size} "
                f"positions, got {length}; shorten the samples or raise block_size"
            )
        # Scales embeddings, initialised with std 1 / sqrt(H), to the size of the sinusoids.
        scaled = self.token(tokens) * math.sqrt(width)
        embedded: Tensor = self.dropout(scaled + self.waves[:length])
        return embedded


class TransformerMLP(nn.Module):
    """Two linear layers with a ReLU, LayerNorm and residual: [B, S, H] -> [B, S, H]."""

    def __init__(self, width: int, hidden: int, dropout: float, residual_std: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.dropout = nn.Dropout(dropout)
        for linear, std in ((self.up, _INIT_STD), (self.down, residual_std)):
            nn.init.normal_(linear.weight, std=std)
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the position-wise network and add the residual."""
        residual: Tensor = self.dropout(self.down(F.relu(self.up(self.norm(x)))))
        return x + residual


class TransformerHead(nn.Linear):
    """Linear map to logits over the vocabulary, with bias: [B, S, H] -> [B, S, V]."""

    def __init__(self, width: int, vocab_size: int) -> None:
        super().__init__(width, vocab_size)
        nn.init.normal_(self.weight, std=_INIT_STD)
        nn.init.zeros_(self.bias)


def position_waves(num_positions: int, width: int) -> Tensor:
    """Return sinusoidal position encodings of shape [num_positions, width].

    Elements 2i and 2i + 1 of position p are sine and cosine of p / 10000^(2i / width), computed in
    float64 and returned in torch's default dtype (Vaswani et al., section 3.5).
    """
    positions = torch.arange(num_positions, dtype=torch.float64)[:, None]
    places = torch.arange(0, width, 2, dtype=torch.float64)
    angles = positions / 10000.0 ** (places / width)
    waves = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)[:, :width]
    return waves.to(torch.get_default_dtype())


def build_transformer(
    num_layers: int,
    vocab_size: int = 32_000,
    block_size: int = 1024,
    num_heads: int = 32,
    width: int = 2048,
    hidden: int = 8192,
    dropout: float = 0.0,
) -> list[LayerSpec]:
    """Return GPipe's Transformer-L as 2 ``num_layers`` + 3 layers, untied, with biases.

    ``block_size`` is the longest sequence, ``hidden`` the width of the MLPs. Parameters, as
    published: ``num_layers`` x 50,358,272 (4 H^2 + 2 H hidden + 9 H + hidden) + 2 x 32,000 x 2048
    for embedding and head + 36,096 for the last norm (2 H = 4,096) and the head's bias (V =
    32,000). Weights are normal with std 0.02, those of the last linear layer of each MLP divided by
    ``num_layers``, as the paper suggests for unstable deep models; biases are zero.

    Raises:
        ModelError: a size is invalid.
    """
    sizes = {"num_layers": num_layers, "vocab_size": vocab_size, "block_size": block_size}
    check_sizes("transformer", **sizes, num_heads=num_heads, width=width, hidden=hidden)
    check_heads("transformer", width, num_heads)
    check_dropout("transformer", dropout)
    layer = [
        LayerSpec(GPTAttention, width, num_heads, dropout, _INIT_STD),
        LayerSpec(TransformerMLP, width, hidden, dropout, _INIT_STD / num_layers),
    ]
    return [
        LayerSpec(TransformerEmbedding, vocab_size, block_size, width, dropout),
        *layer * num_layers,
        LayerSpec(nn.LayerNorm, width),
        LayerSpec(TransformerHead, width, vocab_size),
    ]
