import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpipe_hpc.errors import ModelError
from gpipe_hpc.models import build_bert, build_layer, build_model, count_parameters

WIDTH, HEADS, VOCAB = 12, 3, 17


def test_counts_are_chimeras():
    assert count_parameters(build_model("bert48")) == 669_790_012
    assert count_parameters(build_model("gpt2_64")) == 1_389_327_360


def test_count_does_not_depend_on_what_takes_part():
    assert count_parameters(build_model("bert48", next_sentence=True)) == 669_790_012


def built(next_sentence: bool, dropout: float = 0.0) -> list[nn.Module]:
    layers = build_bert(VOCAB, 9, 2, HEADS, WIDTH, dropout, next_sentence)
    layers = [build_layer(layer, index=i, seed=0).double() for i, layer in enumerate(layers)]
    for parameter in nn.ModuleList(layers).parameters():
        # Randomize biases and norms, since their initial zeros and ones would hide errors.
        torch.manual_seed(parameter.numel())
        nn.init.normal_(parameter)
    return layers


def plain_forward(layers: list[nn.Module], tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Compute BERT without fused functions: explicit softmax and GELU, heads in a loop."""
    embedding, *blocks, sentence, transform, decoder = layers
    x = embedding.token.weight[tokens] + embedding.segment.weight[0]
    x = normed(x + embedding.position.weight[torch.arange(tokens.shape[1])], embedding.norm)
    size = WIDTH // HEADS
    for attention, mlp in zip(blocks[::2], blocks[1::2], strict=True):
        q, k, v = attention.qkv(x).split(WIDTH, dim=-1)
        heads = []
        for h in range(HEADS):
            s = slice(size * h, size * h + size)
            scores = q[..., s] @ k[..., s].transpose(1, 2) / math.sqrt(size)
            heads.append(scores.softmax(-1) @ v[..., s])
        x = normed(x + attention.out(torch.cat(heads, -1)), attention.norm)
        x = normed(x + mlp.down(exact_gelu(mlp.up(x))), mlp.norm)
    pooled = torch.tanh(sentence.pooler(x[:, 0, :]))
    tokens_out = decoder.linear(normed(exact_gelu(transform.linear(x)), transform.norm))
    return tokens_out, sentence.classifier(pooled)


def normed(x: torch.Tensor, norm: nn.LayerNorm) -> torch.Tensor:
    centred = x - x.mean(-1, keepdim=True)
    scale = (centred.square().mean(-1, keepdim=True) + 1e-12).sqrt()
    return centred / scale * norm.weight + norm.bias


def exact_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def test_equals_bert_written_out():
    tokens = torch.randint(VOCAB, (4, 7), generator=torch.Generator().manual_seed(0))
    layers = built(next_sentence=True)
    outputs = nn.Sequential(*layers)(tokens)
    expected = plain_forward(layers, tokens)
    assert [each.shape for each in outputs] == [(4, 7, VOCAB), (4, 2)]
    for output, each in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output, each, rtol=1e-10, atol=1e-10)
    alone = nn.Sequential(*built(next_sentence=False))(tokens)
    assert torch.equal(alone, outputs[0])


def test_every_position_sees_every_other():
    model = nn.Sequential(*built(next_sentence=False))
    tokens = torch.zeros(1, 8, dtype=torch.long)
    changed = tokens.clone()
    changed[0, 5] = 7
    assert (model(tokens) - model(changed)).abs().amax(-1).min() > 0


def test_pooler_has_gradients_only_where_it_takes_part():
    tokens = torch.zeros(2, 5, dtype=torch.long)
    for takes_part in (True, False):
        layers = built(takes_part)
        outputs = nn.Sequential(*layers)(tokens)
        sum(out.sum() for out in (outputs if takes_part else (outputs,))).backward()
        idle = [p for layer in layers for p in layer.parameters() if p.grad is None]
        assert idle == ([] if takes_part else list(layers[-3].parameters()))


def test_dropout_is_drawn_in_training_only():
    model = nn.Sequential(*built(next_sentence=False, dropout=0.5))
    tokens = torch.zeros(1, 8, dtype=torch.long)
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_initialisation_is_berts():
    layers = build_bert(1000, 64, 1, num_heads=4, width=256)
    for index, layer in enumerate(layers):
        for name, parameter in build_layer(layer, index=index, seed=0).named_parameters():
            if name.endswith("bias"):
                assert not parameter.any()
            elif "norm" in name:
                assert torch.equal(parameter, torch.ones(256))
            elif parameter.numel() > 10_000:
                assert parameter.std().item() == pytest.approx(0.02, rel=0.03), name


def test_too_long_a_sequence_is_refused():
    with pytest.raises(ModelError, match=r"at most 9 positions, got 10"):
        built(next_sentence=False)[0](torch.zeros(1, 10, dtype=torch.long))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 5}, r"bert: width must be a multiple of num_heads=5, got width=24"),
        ({"vocab_size": 0}, r"bert: vocab_size too small"),
        ({"dropout": 1.0}, r"bert: dropout out of range"),
    ],
)
def test_impossible_sizes_are_refused(change: dict, message: str):
    sizes = {"vocab_size": 9, "block_size": 4, "num_layers": 1, "num_heads": 2, "width": 24}
    with pytest.raises(ModelError, match=message):
        build_bert(**{**sizes, **change})


def test_norms_use_berts_epsilon():
    tiny = torch.full((1, 2, WIDTH), 1e-5, dtype=torch.float64)
    tiny[..., 0] = 2e-5
    mlp = built(next_sentence=False)[2]
    nn.init.zeros_(mlp.down.weight)
    nn.init.zeros_(mlp.down.bias)
    expected = F.layer_norm(tiny, (WIDTH,), mlp.norm.weight, mlp.norm.bias, eps=1e-12)
    torch.testing.assert_close(mlp(tiny), expected)
