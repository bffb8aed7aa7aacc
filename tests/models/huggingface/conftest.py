"""Tiny transformers models; tests are skipped if transformers is not installed."""

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest
import torch

VOCABULARY, LENGTH, NUM_SAMPLES, SIDE, NUM_CLASSES = 13, 6, 5, 8, 3

CONFIGS = MappingProxyType(
    {
        "gpt2": {
            "model_type": "gpt2",
            "vocab_size": VOCABULARY,
            "n_positions": 16,
            "n_embd": 8,
            "n_layer": 3,
            "n_head": 2,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        "llama": {
            "model_type": "llama",
            "vocab_size": VOCABULARY,
            "hidden_size": 16,
            "intermediate_size": 12,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 16,
        },
        # Two kinds of attention with different rotary angles; embeddings are scaled and tied.
        "gemma3_text": {
            "model_type": "gemma3_text",
            "vocab_size": VOCABULARY,
            "hidden_size": 16,
            "intermediate_size": 12,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 4,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "max_position_embeddings": 16,
        },
        "vit": {
            "model_type": "vit",
            "hidden_size": 8,
            "intermediate_size": 12,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "image_size": SIDE,
            "patch_size": 4,
            "id2label": {i: str(i) for i in range(NUM_CLASSES)},
            "label2id": {str(i): i for i in range(NUM_CLASSES)},
        },
    }
)


@pytest.fixture(scope="session")
def library() -> Any:
    """Return the module transformers, with its warnings disabled."""
    found = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    found.logging.set_verbosity_error()
    return found


@pytest.fixture
def configs(library: Any) -> Any:
    """Return the contents of a config.json for each model family."""
    return CONFIGS


@pytest.fixture
def plain_model(library: Any) -> Callable[..., Any]:
    """Return a function that creates the plain model of a family with seeded random weights."""

    def make(family: str, attention: str = "sdpa", dtype: torch.dtype = torch.float64) -> Any:
        auto = (
            library.AutoModelForImageClassification
            if family == "vit"
            else library.AutoModelForCausalLM
        )
        config = library.CONFIG_MAPPING[family].from_dict(dict(CONFIGS[family]))
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = auto.from_config(config, dtype=dtype, attn_implementation=attention)
        return model.train()

    return make


@pytest.fixture(scope="session")
def batch_of() -> Callable[..., tuple[Any, torch.Tensor]]:
    """Return a function that creates inputs and targets for a family, optionally with a mask."""

    def make(family: str, masked: bool = False) -> tuple[Any, torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        if family == "vit":
            images = torch.randn(
                NUM_SAMPLES, 3, SIDE, SIDE, dtype=torch.float64, generator=generator
            )
            return images, torch.arange(NUM_SAMPLES) % NUM_CLASSES
        tokens = torch.randint(VOCABULARY, (NUM_SAMPLES, LENGTH), generator=generator)
        if not masked:
            return tokens, tokens
        mask = torch.ones_like(tokens)
        mask[1, 3:] = mask[3, 5:] = 0
        return {"input_ids": tokens, "attention_mask": mask}, tokens.where(mask == 1, -100)

    return make
