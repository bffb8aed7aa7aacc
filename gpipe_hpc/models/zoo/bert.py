"""BERT with both of its heads as a sequence of layers.

Devlin et al., BERT: Pre-training of deep bidirectional transformers, 2019; with 48 layers of width
1024 it is Bert-48 of Li and Hoefler, Chimera, 2021. A layer of the paper is two layers here,
attention and MLP, each with its residual connection and, as in BERT, a LayerNorm after it::

    embedding | attention, mlp | ... | next sentence | transform | decoder

Shapes: B samples, S positions, H width, A heads, V vocabulary. Tokens are [B, S] integers, all of
the first segment and without padding; activations are [B, S, H], logits [B, S, V]. With
``next_sentence``, the logits of that head, [B, 2], are passed on with the activations, and the
output is the pair (token logits, next-sentence logits). Without it, pooler and classifier exist, as
in the published parameter count, but are not used: their gradients stay None.
"""

from collections.abc import Callable
from typing import Final

import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_hpc.errors import ModelError
from gpipe_hpc.models.layers import LayerSpec
from gpipe_hpc.models.zoo.checks import check_dropout, check_heads, check_sizes

_INIT_STD = 0.02
_NORM_EPS = 1e-12
_NUM_SEGMENTS = 2

Activations = Tensor | tuple[Tensor, Tensor]
"""Values passed between the heads: [B, S, H], or that and the next-sentence logits [B, 2]."""


class BertEmbedding(nn.Module):
    """Token, position and segment embedding, LayerNorm, dropout: [B, S] -> [B, S, H]."""

    def __init__(self, vocab_size: int, block_size: int, width: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab_size, width)
        self.position = nn.Embedding(block_size, width)
        self.segment = nn.Embedding(_NUM_SEGMENTS, width)
        self.norm = nn.LayerNorm(width, eps=_NORM_EPS)
        self.dropout = nn.Dropout(dropout)
        for embedding in (self.token, self.position, self.segment):
            nn.init.normal_(embedding.weight, std=_INIT_STD)

    def forward(self, tokens: Tensor) -> Tensor:
        """Embed token ids [B, S]; raise `ModelError` if S is greater than ``block_size``."""
        length, block_size = tokens.shape[-1], self.position.num_embeddings
        if length > block_size:
            raise ModelError(
                f"BERT embedding: the sequence is too long, expected at most {block_size} "
                f"positions, got {length}; shorten the samples or raise block_size"
            )
        summed = self.token(tokens) + self.position.weight[:length] + self.segment.weight[0]
        embedded: Tensor = self.dropout(self.norm(summed))
        return embedded


class BertAttention(nn.Module):
    """Bidirectional self-attention, residual, LayerNorm: [B, S, H] -> [B, S, H]."""

    sees_ahead: Final = True

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = _linear(width, 3 * width)
        self.out = _linear(width, width)
        self.dropout = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(width, eps=_NORM_EPS)

    def forward(self, x: Tensor) -> Tensor:
        """Apply attention over all positions, add the residual and normalise."""
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each [B, A, S, H / A]
        attended = F.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout.p if self.training else 0.0
        )
        residual = self.dropout(self.out(attended.transpose(1, 2).flatten(2)))
        normed: Tensor = self.norm(x + residual)
        return normed


class BertMLP(nn.Module):
    """Two linear layers with an exact GELU, residual, LayerNorm: [B, S, H] -> [B, S, H]."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.up = _linear(width, 4 * width)
        self.down = _linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(width, eps=_NORM_EPS)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the position-wise network, add the residual and normalise."""
        normed: Tensor = self.norm(x + self.dropout(self.down(F.gelu(self.up(x)))))
        return normed


class BertNextSentence(nn.Module):
    """Pooler and next-sentence classifier on the first position."""

    def __init__(self, width: int, takes_part: bool) -> None:
        super().__init__()
        self.takes_part = takes_part
        self.pooler = _linear(width, width)
        self.classifier = _linear(width, 2)

    def forward(self, x: Tensor) -> Activations:
        """Return the activations, with the logits [B, 2] if this head is used."""
        if not self.takes_part:
            return x
        return x, self.classifier(self.pooler(x[:, 0]).tanh())


class BertTransform(nn.Module):
    """Linear layer, exact GELU and LayerNorm of the token head: [B, S, H] -> [B, S, H]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = _linear(width, width)
        self.norm = nn.LayerNorm(width, eps=_NORM_EPS)

    def forward(self, activations: Activations) -> Activations:
        """Transform the activations; next-sentence logits are passed through."""
        return _beside(lambda x: self.norm(F.gelu(self.linear(x))), activations)


class BertDecoder(nn.Module):
    """Linear map to logits over the vocabulary, with its own matrix: [B, S, H] -> [B, S, V]."""

    def __init__(self, width: int, vocab_size: int) -> None:
        super().__init__()
        self.linear = _linear(width, vocab_size)

    def forward(self, activations: Activations) -> Activations:
        """Return the token logits; next-sentence logits are passed through."""
        return _beside(self.linear, activations)


def _beside(function: Callable[[Tensor], Tensor], activations: Activations) -> Activations:
    if isinstance(activations, tuple):
        return function(activations[0]), activations[1]
    return function(activations)


def _linear(num_inputs: int, num_outputs: int) -> nn.Linear:
    linear = nn.Linear(num_inputs, num_outputs)
    nn.init.normal_(linear.weight, std=_INIT_STD)
    nn.init.zeros_(linear.bias)
    return linear


def build_bert(
    vocab_size: int,
    block_size: int,
    num_layers: int,
    num_heads: int,
    width: int,
    dropout: float = 0.1,
    next_sentence: bool = False,
) -> list[LayerSpec]:
    """Return a BERT as 2 ``num_layers`` + 4 layers; decoder and embedding are not tied.

    ``block_size`` is the longest sequence. With ``next_sentence``, the output is the pair (token
    logits, next-sentence logits), for the loss `bert_pretraining`, instead of the token logits
    alone. Parameters: embedding (V + S + 4) H, layers 12 H^2 + 13 H each, next sentence H^2 + 3 H +
    2, transform H^2 + 3 H, decoder V H + V.

    Raises:
        ModelError: a size is invalid.
    """
    sizes = {"vocab_size": vocab_size, "block_size": block_size, "num_layers": num_layers}
    check_sizes("bert", **sizes, num_heads=num_heads, width=width)
    check_heads("bert", width, num_heads)
    check_dropout("bert", dropout)
    layer = [
        LayerSpec(BertAttention, width, num_heads, dropout),
        LayerSpec(BertMLP, width, dropout),
    ]
    return [
        LayerSpec(BertEmbedding, vocab_size, block_size, width, dropout),
        *layer * num_layers,
        LayerSpec(BertNextSentence, width, next_sentence),
        LayerSpec(BertTransform, width),
        LayerSpec(BertDecoder, width, vocab_size),
    ]
