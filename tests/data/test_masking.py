"""Tests of masked language modelling: which tokens are masked, and which models may see."""

import math

import numpy as np
import pytest
import torch

from gpipe_hpc import Pipeline
from gpipe_hpc.config import check_config, compose_config
from gpipe_hpc.data import open_data
from gpipe_hpc.data.synthetic import SyntheticTokensConfig
from gpipe_hpc.data.text import TokensConfig
from gpipe_hpc.errors import ConfigError
from gpipe_hpc.models import build_bert, build_gpt, sees_ahead, token_cross_entropy
from tests.support import losses, train_here

SETTINGS = {"num_samples": 400, "seq_len": 50, "vocab_size": 64, "objective": "masked"}


def opened(seed: int = 0, **settings):
    return open_data(SyntheticTokensConfig(**(SETTINGS | settings)), seed)


def plain():
    return open_data(SyntheticTokensConfig(**(SETTINGS | {"objective": "next_token"})))


def test_of_the_chosen_tokens_8_in_10_are_hidden_1_replaced_1_left():
    indices = range(400)
    tokens = plain().train.read_inputs(indices)
    data = opened().train
    inputs, targets = data.read_inputs(indices), data.read_targets(indices)
    chosen = targets != -100
    assert torch.equal(targets[chosen], tokens[chosen])
    assert torch.equal(inputs[~chosen], tokens[~chosen])
    number = int(chosen.sum())
    assert number == pytest.approx(0.15 * tokens.numel(), rel=0.05)
    seen = inputs[chosen]
    assert int((seen == 64).sum()) == pytest.approx(0.8 * number, rel=0.05)  # the mask token
    # One random token in 64 equals the original.
    assert int((seen == tokens[chosen]).sum()) == pytest.approx((0.1 + 0.1 / 64) * number, rel=0.2)
    assert set(seen.tolist()) == set(range(65))
    assert inputs.dtype == targets.dtype == torch.int64


def test_what_is_hidden_depends_on_seed_epoch_and_sample_alone():
    data = opened().train
    together = data.read_inputs([3, 8, 5], epoch=2), data.read_targets([3, 8, 5], epoch=2)
    for row, index in enumerate((3, 8, 5)):
        assert torch.equal(data.read_inputs([index], epoch=2)[0], together[0][row])
        assert torch.equal(data.read_targets([index], epoch=2)[0], together[1][row])
    assert not torch.equal(data.read_targets([3, 8, 5], epoch=1), together[1])
    assert not torch.equal(opened(seed=1).train.read_targets([3, 8, 5], epoch=2), together[1])
    assert opened(seed=1).train.digest() != data.digest() != plain().train.digest()
    # Validation masks do not depend on the seed.
    one, other = opened(seed=0).validation, opened(seed=1).validation
    assert torch.equal(one.read_inputs(range(9)), other.read_inputs(range(9)))
    assert one.digest() == other.digest()


def test_the_mask_token_and_the_share_are_settings():
    data = opened(mask_token=7, mask_fraction=1.0).train
    assert int((data.read_targets(range(40)) == -100).sum()) == 0
    inputs = data.read_inputs(range(40))
    assert int((inputs == 7).sum()) > 0.75 * inputs.numel() and int(inputs.max()) < 64


@pytest.mark.parametrize("objective", ["masked", "next_token"])
def test_a_bert_cannot_fall_below_the_entropy_of_random_tokens(objective, tmp_path):
    """Regression: the loss on random tokens fell to 0.22, as positions saw their own targets."""
    symbols = 16
    text = np.random.default_rng(0).integers(0, symbols, 200_000).astype(np.uint8)
    text.tofile(tmp_path / "random.bin")
    config = TokensConfig(
        paths=[str(tmp_path / "random.bin")],
        dtype="uint8",
        seq_len=8,
        vocab_size=symbols,
        objective=objective,
    )
    data = open_data(config).train
    layers = build_bert(symbols + 1, 8, num_layers=1, num_heads=2, width=32, dropout=0.0)
    pipe = Pipeline(layers, token_cross_entropy)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    losses = []
    for step in range(250):
        own = range(64 * step, 64 * step + 64)  # each sample once
        losses.append(float(pipe.step(data.read_inputs(own), data.read_targets(own)).loss))
        optimizer.step()
    reached = sum(losses[-20:]) / 20
    # 80 % of the targets are not visible in the input.
    floor = 0.8 * math.log(symbols)
    assert reached > floor if objective == "masked" else reached < 0.5 * floor


def test_it_is_known_which_models_see_ahead():
    sizes = {"vocab_size": 8, "block_size": 4, "num_layers": 1, "num_heads": 2, "width": 8}
    assert sees_ahead(build_bert(**sizes)) and not sees_ahead(build_gpt(**sizes))


@pytest.mark.parametrize("is_decoder", [False, True])
def test_an_encoder_of_the_library_sees_ahead(is_decoder):
    library = pytest.importorskip("transformers", reason="transformers is not installed")
    from gpipe_hpc.models.huggingface import huggingface_layers

    library.logging.set_verbosity_error()
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 20}
    config = library.BertConfig(num_hidden_layers=2, is_decoder=is_decoder, **sizes)
    assert sees_ahead(huggingface_layers(config)) != is_decoder


BERT = (
    "model=bert48",
    "model.num_layers=1",
    "model.width=8",
    "model.num_heads=2",
    "model.dropout=0",
    "data=synthetic",
    "data.seq_len=8",
    "pipeline.partition=uniform",
    "pipeline.microbatches=2",
    "train.batch_size=8",
    "train.steps=3",
    "lr.warmup_steps=0",
)


def trained(folder, ranks: int, *settings: str) -> list[float]:
    train_here(ranks, *BERT, *settings, f"run.dir={folder}")
    return losses(folder)


def test_a_bert_is_not_trained_on_the_next_token(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.objective.*next_token"):
        trained(tmp_path / "run", 1)


def test_what_is_hidden_is_the_same_on_every_layout(tmp_path):
    masked = "data.objective=masked"
    one = trained(tmp_path / "one", 1, masked, "pipeline.microbatches=4")
    four = trained(tmp_path / "four", 4, masked, "pipeline.stages=2", "pipeline.replicas=2")
    assert len(one) == 3 and one == pytest.approx(four, rel=1e-5)


def test_the_model_must_know_the_mask():
    settings = [*BERT, "model.vocab_size=256", "data.objective=masked"]
    with pytest.raises(ConfigError, match=r"data\.mask_token.*model\.vocab_size=257"):
        check_config(compose_config(settings), 1)
    check_config(compose_config([*settings, "data.mask_token=3"]), 1)
