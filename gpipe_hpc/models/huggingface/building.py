"""`huggingface_layers`: convert a transformers model to a list of layers."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gpipe_hpc.models.building import build_layer
from gpipe_hpc.models.huggingface.blueprint import Blueprint
from gpipe_hpc.models.huggingface.calls import unknown
from gpipe_hpc.models.huggingface.configs import read_config
from gpipe_hpc.models.huggingface.modules import (
    BlockIndex,
    HuggingFaceBlock,
    HuggingFaceEmbedding,
    HuggingFaceHead,
    HuggingFaceNorm,
)
from gpipe_hpc.models.huggingface.structure import example_inputs, run_on_meta
from gpipe_hpc.models.huggingface.weights import open_weights
from gpipe_hpc.models.layers import LayerSpec

Source = str | Path | Mapping[str, Any] | Any
"""A model folder, a path of a config.json, its content as a dictionary, or a config object."""


def huggingface_layers(
    path: Source,
    *,
    attention: str | None = None,
    dtype: str = "float32",
    fresh: Sequence[str] = (),
) -> list[LayerSpec]:
    """Return the layers of a causal language model or image classifier of transformers.

    The layers are embedding, blocks, norm and head. Each rank builds its own layers and reads only
    their tensors. Nothing is downloaded or unpickled. Parameters keep the model's names after their
    layer: ``layers.<i>.lm_head.weight``. The layers compute the same as the model with
    ``use_cache=False``; the output is its logits.

    Args:
        path: a local folder with config.json and safetensors weights, or only a config
            (config.json, dictionary, config object), for new weights as transformers initialises
            them.
        attention: ``eager`` or ``sdpa``; None means the default of transformers.
        dtype: dtype of the weights.
        fresh: name patterns (``classifier.*``) of tensors to initialise instead of loading.

    Raises:
        ModelError: the folder or the model cannot be used.
        ConfigError: a keyword is invalid.
    """
    config = read_config(path)
    source = Path(path).resolve() if isinstance(path, str | Path) else path
    blueprint = Blueprint(config, attention, dtype, source=source)
    run_on_meta(blueprint.kind, partial(_check_ends, blueprint))
    if isinstance(source, Path) and source.is_dir():
        blueprint.weights = open_weights(source, blueprint.model, fresh)
    parts = blueprint.structure
    layers = [
        (f"{parts.core}.", LayerSpec(HuggingFaceEmbedding, blueprint)),
        *(
            (f"{parts.blocks}.{i}.", LayerSpec(HuggingFaceBlock, blueprint, _index(blueprint, i)))
            for i in range(parts.num_blocks)
        ),
        *((f"{path}.", LayerSpec(HuggingFaceNorm, blueprint, path)) for path in parts.closing),
        ("", LayerSpec(HuggingFaceHead, blueprint)),
    ]
    prefixes = [prefix for prefix, _ in layers]
    doubtful = {_owner(name, prefixes) for name in blueprint.possibly_unset()}
    for index, (prefix, layer) in enumerate(layers):
        if prefix in doubtful:
            build_layer(layer, index=index, seed=0)  # raises ModelError if a tensor stays unset
    ties = _by_layer(blueprint.ties(), prefixes)
    return [layer.tied(ties[prefix]) if ties[prefix] else layer for prefix, layer in layers]


def _check_ends(blueprint: Blueprint) -> None:
    """Run all layers but the blocks on the meta device; raise if the logits' shape is wrong."""
    parts = blueprint.structure
    inputs = example_inputs(blueprint.model)
    hidden = HuggingFaceEmbedding(blueprint)(inputs).hidden
    for path in parts.closing:
        hidden = HuggingFaceNorm(blueprint, path)(hidden)
    logits = tuple(HuggingFaceHead(blueprint)(hidden).shape)
    if logits != parts.logits:
        raise unknown(
            blueprint.kind, f"returns logits of shape {parts.logits}", f"{logits} from its layers"
        )


def _index(blueprint: Blueprint, index: int) -> BlockIndex:
    """Return the index of a block, which compares equal for blocks of equal cost."""
    block = blueprint.model.get_submodule(f"{blueprint.structure.blocks}.{index}")
    kinds = getattr(blueprint.model.config, "layer_types", None) or ()
    kind = kinds[index] if index < len(kinds) else ""
    # The last block returns hidden states only.
    is_last = index == blueprint.structure.num_blocks - 1
    return BlockIndex(index, f"{kind} {block} {is_last}")


def _by_layer(ties: Mapping[str, str], prefixes: Sequence[str]) -> dict[str, dict[str, str]]:
    """Assign tied names to layers by the longest matching prefix."""
    sorted_in: dict[str, dict[str, str]] = {prefix: {} for prefix in prefixes}
    for name, label in ties.items():
        sorted_in[_owner(name, prefixes)][name] = label
    return sorted_in


def _owner(name: str, prefixes: Sequence[str]) -> str:
    return max((prefix for prefix in prefixes if name.startswith(prefix)), key=len)
