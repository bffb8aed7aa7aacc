import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpipe_hpc.errors import ModelError
from gpipe_hpc.models import build_gpt, build_layer, build_model, count_parameters

TIED = {
    "gpt2": (12, 768, 124_439_808),
    "gpt2_medium": (24, 1024, 354_823_168),
    "gpt2_large": (36, 1280, 774_030_080),
    "gpt2_xl": (48, 1600, 1_557_611_200),
}


@pytest.mark.parametrize("name", TIED)
def test_gpt2_counts_are_exact(name: str):
    num_layers, width, tied = TIED[name]
    vocab, block = 50257, 1024
    formula = vocab * width + block * width + num_layers * (12 * width**2 + 13 * width) + 2 * width
    assert formula == tied
    assert count_parameters(build_model(name)) == tied
    assert count_parameters(build_model(f"{name}_untied")) == tied + vocab * width


def built(dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> list[nn.Module]:
    layers = build_gpt(29, 12, num_layers=2, num_heads=3, width=24, dropout=dropout)
    return [build_layer(layer, index=i, seed=0).to(dtype) for i, layer in enumerate(layers)]


def plain_forward(layers: list[nn.Module], tokens: torch.Tensor) -> torch.Tensor:
    """Compute GPT-2 without fused functions: explicit softmax and mask, heads in a loop."""
    embedding, *blocks, norm, head = layers
    length = tokens.shape[1]
    x = embedding.token.weight[tokens] + embedding.position.weight[torch.arange(length)]
    for attention, mlp in zip(blocks[::2], blocks[1::2], strict=True):
        q, k, v = attention.qkv(attention.norm(x)).split(24, dim=-1)
        heads = []
        for h in range(3):
            s = slice(8 * h, 8 * h + 8)
            scores = q[..., s] @ k[..., s].transpose(1, 2) / math.sqrt(8)
            mask = torch.ones(length, length, dtype=torch.bool).triu(1)
            heads.append(scores.masked_fill(mask, -math.inf).softmax(-1) @ v[..., s])
        x = x + attention.out(torch.cat(heads, -1))
        h = mlp.up(mlp.norm(x))
        h = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
        x = x + mlp.down(h)
    return F.layer_norm(x, (24,), norm.weight, norm.bias) @ head.weight.T


def test_equals_gpt2_written_out():
    layers = built()
    tokens = torch.randint(29, (4, 9), generator=torch.Generator().manual_seed(0))
    out = nn.Sequential(*layers)(tokens)
    assert out.shape == (4, 9, 29)
    torch.testing.assert_close(out, plain_forward(layers, tokens), rtol=1e-10, atol=1e-10)


def test_is_causal():
    model = nn.Sequential(*built())
    tokens = torch.zeros(1, 8, dtype=torch.long)
    changed = tokens.clone()
    changed[0, 5] = 7
    difference = (model(tokens) - model(changed)).abs().amax(-1)[0]
    assert difference[:5].max() == 0
    assert difference[5:].min() > 0


def test_dropout_is_drawn_in_training_only():
    model = nn.Sequential(*built(dropout=0.5))
    tokens = torch.zeros(1, 8, dtype=torch.long)
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_initialisation_is_gpt2s():
    layers = build_gpt(1000, 64, num_layers=8, num_heads=4, width=256)
    embedding, attention, mlp = (build_layer(layers[i], index=i, seed=0) for i in range(3))
    head = build_layer(layers[-1], index=18, seed=0)
    small = 0.02 / math.sqrt(16)
    for weight, std in [
        (embedding.token.weight, 0.02),
        (embedding.position.weight, 0.02),
        (attention.qkv.weight, 0.02),
        (attention.out.weight, small),
        (mlp.up.weight, 0.02),
        (mlp.down.weight, small),
        (head.weight, 0.02),
    ]:
        assert weight.std().item() == pytest.approx(std, rel=0.03)
    assert not attention.qkv.bias.any()
    assert not mlp.down.bias.any()


def test_too_long_a_sequence_is_refused():
    with pytest.raises(ModelError, match=r"at most 12 positions, got 13"):
        built()[0](torch.zeros(1, 13, dtype=torch.long))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 5}, r"multiple of num_heads=5, got width=24"),
        ({"num_layers": 0}, r"num_layers too small"),
        ({"dropout": 1.0}, r"dropout out of range"),
    ],
)
def test_impossible_sizes_are_refused_before_anything_is_built(change: dict, message: str):
    sizes = {"vocab_size": 9, "block_size": 4, "num_layers": 1, "num_heads": 2, "width": 24}
    with pytest.raises(ModelError, match=message):
        build_gpt(**{**sizes, **change})
