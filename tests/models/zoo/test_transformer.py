import math

import pytest
import torch
from torch import nn

from gpipe_hpc.errors import ModelError
from gpipe_hpc.models import (
    build_layer,
    build_model,
    build_transformer,
    count_parameters,
    layer_parameters,
)

LAYER, MATRIX, NORM, VOCABULARY = 50_358_272, 32_000 * 2048, 2 * 2048, 32_000


def test_where_the_parameters_are():
    sizes = layer_parameters(build_model("transformer_l", num_layers=3))
    assert sizes[0] == MATRIX
    assert sizes[1] + sizes[2] == sizes[3] + sizes[4] == LAYER
    # The remaining 36,096 parameters are those of the last norm and the head's bias.
    assert sizes[-2:] == [NORM, MATRIX + VOCABULARY]
    assert NORM + VOCABULARY == 36_096


@pytest.mark.parametrize(
    ("num_layers", "published"),
    [
        (3, 282.2e6),
        (13, 785.8e6),
        (103, 5.3e9),
        pytest.param(1663, 83.9e9, marks=pytest.mark.slow),
    ],
)
def test_counts_are_those_of_table_1(num_layers: int, published: float):
    count = count_parameters(build_model("transformer_l", num_layers=num_layers))
    assert count == num_layers * LAYER + 2 * MATRIX + 36_096
    assert count == pytest.approx(published, rel=5e-3)


WIDTH, HEADS, VOCAB = 12, 3, 17


def built() -> list[nn.Module]:
    layers = build_transformer(2, VOCAB, 9, HEADS, WIDTH, hidden=20)
    layers = [build_layer(layer, index=i, seed=0).double() for i, layer in enumerate(layers)]
    for parameter in nn.ModuleList(layers).parameters():
        # Randomize biases and norms, since their initial zeros and ones would hide errors.
        torch.manual_seed(parameter.numel())
        nn.init.normal_(parameter)
    return layers


def plain_forward(layers: list[nn.Module], tokens: torch.Tensor) -> torch.Tensor:
    """Compute the model without fused functions: explicit encodings, softmax and mask."""
    embedding, *blocks, norm, head = layers
    length = tokens.shape[1]
    waves = torch.empty(length, WIDTH, dtype=torch.float64)
    for position in range(length):
        for i in range(WIDTH // 2):
            angle = position / 10000 ** (2 * i / WIDTH)
            waves[position, 2 * i], waves[position, 2 * i + 1] = math.sin(angle), math.cos(angle)
    # The layer stores them in float32.
    x = embedding.token.weight[tokens] * WIDTH**0.5 + waves.float()
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)
    size = WIDTH // HEADS
    for attention, mlp in zip(blocks[::2], blocks[1::2], strict=True):
        q, k, v = attention.qkv(layer_norm(x, attention.norm)).split(WIDTH, dim=-1)
        heads = []
        for h in range(HEADS):
            s = slice(size * h, size * h + size)
            scores = q[..., s] @ k[..., s].transpose(1, 2) / math.sqrt(size)
            heads.append(scores.masked_fill(mask, -math.inf).softmax(-1) @ v[..., s])
        x = x + torch.cat(heads, -1) @ attention.out.weight.T + attention.out.bias
        hidden = layer_norm(x, mlp.norm) @ mlp.up.weight.T + mlp.up.bias
        x = x + hidden.clamp(min=0) @ mlp.down.weight.T + mlp.down.bias
    return layer_norm(x, norm) @ head.weight.T + head.bias


def layer_norm(x: torch.Tensor, norm: nn.LayerNorm) -> torch.Tensor:
    centred = x - x.mean(-1, keepdim=True)
    scale = (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return centred / scale * norm.weight + norm.bias


def test_equals_the_model_written_out():
    layers = built()
    tokens = torch.randint(VOCAB, (4, 7), generator=torch.Generator().manual_seed(0))
    out = nn.Sequential(*layers)(tokens)
    assert out.shape == (4, 7, VOCAB)
    torch.testing.assert_close(out, plain_forward(layers, tokens), rtol=1e-10, atol=1e-10)


def test_is_causal():
    model = nn.Sequential(*built())
    tokens = torch.zeros(1, 8, dtype=torch.long)
    changed = tokens.clone()
    changed[0, 5] = 7
    difference = (model(tokens) - model(changed)).abs().amax(-1)[0]
    assert difference[:5].max() == 0
    assert difference[5:].min() > 0


def test_initialisation():
    layers = build_transformer(4, 1000, 16, num_heads=4, width=256, hidden=512)
    embedding, attention, mlp = (build_layer(layers[i], index=i, seed=0) for i in range(3))
    head = build_layer(layers[-1], index=10, seed=0)
    for weight, std in [
        (embedding.token.weight, 1 / 16),
        (attention.qkv.weight, 0.02),
        (attention.out.weight, 0.02),
        (mlp.up.weight, 0.02),
        (mlp.down.weight, 0.02 / 4),
        (head.weight, 0.02),
    ]:
        assert weight.std().item() == pytest.approx(std, rel=0.03)
    assert not any(each.bias.any() for each in (attention.qkv, mlp.up, mlp.down, head))


def test_waves_are_in_no_checkpoint():
    embedding = built()[0]
    assert list(embedding.state_dict()) == ["token.weight"]
    assert embedding.waves.shape == (9, WIDTH)


def test_odd_widths_have_waves():
    embedding = build_layer(build_transformer(1, 5, 4, 1, width=3)[0], index=0, seed=0)
    assert torch.equal(embedding.waves[0], torch.tensor([0.0, 1.0, 0.0]))


def test_too_long_a_sequence_is_refused():
    with pytest.raises(ModelError, match=r"at most 9 positions, got 10"):
        built()[0](torch.zeros(1, 10, dtype=torch.long))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 5}, r"transformer: width must be a multiple of num_heads=5, got width=2048"),
        ({"num_layers": 0}, r"transformer: num_layers too small"),
        ({"hidden": 0}, r"transformer: hidden too small"),
        ({"dropout": 1.0}, r"transformer: dropout out of range"),
    ],
)
def test_impossible_sizes_are_refused(change: dict, message: str):
    with pytest.raises(ModelError, match=message):
        build_transformer(**{"num_layers": 1, **change})
