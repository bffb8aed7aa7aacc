"""Load a config of transformers and create its model on the meta device."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from gpipe_hpc import small_files
from gpipe_hpc.errors import ConfigError, ModelError, os_remedy
from gpipe_hpc.models.huggingface.library import transformers
from gpipe_hpc.models.randomness import GENERATOR_LOCK

CONFIG_FILE: Final = "config.json"
ATTENTIONS: Final = ("eager", "sdpa")
_DTYPES: Final = ("float64", "float32", "bfloat16", "float16")
_SPECIAL: Final = ("Infinity", "-Infinity", "NaN")
# If one of these is set, a forward returns more than the last hidden state and the logits.
_EXTRAS: Final = (
    "output_hidden_states",
    "output_attentions",
    "output_router_logits",
    "add_cross_attention",
    "quantization_config",
)


def read_config(source: Any) -> Any:
    """Return the config object of a folder, config.json or dictionary; config objects are copied.

    Nothing is downloaded, and no code that comes with a model is run.

    Raises:
        ModelError: the config is missing, damaged or of an unknown model type.
        ConfigError: `source` is None.
    """
    if isinstance(source, transformers().PreTrainedConfig):
        return copy.deepcopy(source)
    if source is None:
        raise ConfigError(
            f"huggingface: no model is given; set model.path to a model folder or its {CONFIG_FILE}"
        )
    if isinstance(source, str | Path):
        source = read_json(Path(source))
    if not isinstance(source, Mapping):
        raise ModelError(
            f"huggingface: expected a folder, a {CONFIG_FILE}, its content as a dictionary or a "
            f"config object of transformers, got {type(source).__name__}; set model.path=/folder"
        )
    known = transformers().CONFIG_MAPPING
    kind = source.get("model_type")
    if kind not in known:
        raise ModelError(
            f"huggingface: transformers {transformers().__version__} does not know the model_type "
            f"{kind!r}, and code that comes with a model is not run; use a newer transformers, or "
            f"correct the model_type"
        )
    try:
        return known[kind].from_dict(_with_floats(dict(source)))
    except Exception as error:
        raise ModelError(
            f"huggingface: transformers rejects the config of a {kind}: {type(error).__name__}: "
            f"{error}; correct the config"
        ) from error


def _with_floats(entry: Any) -> Any:
    """Convert values that transformers writes as {"__float__": "Infinity"} to floats."""
    if isinstance(entry, Mapping):
        if entry.keys() == {"__float__"} and entry["__float__"] in _SPECIAL:
            return float(entry["__float__"])
        return {name: _with_floats(value) for name, value in entry.items()}
    if isinstance(entry, list):
        return [_with_floats(value) for value in entry]
    return entry


def read_json(path: Path) -> Any:
    """Parse a config.json, given its path or its folder; raise `ModelError` if that fails."""
    if not path.exists():
        raise ModelError(
            f"huggingface: {str(path)!r} does not exist, expected a local folder or its "
            f"{CONFIG_FILE}; nothing is downloaded: for a model of the hub run "
            f"`hf download NAME --local-dir FOLDER` first, and pass FOLDER"
        )
    file = path / CONFIG_FILE if path.is_dir() else path
    try:
        return small_files.read_json(file)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"huggingface: cannot read {file}: {type(error).__name__}: {error}; "
            f"{os_remedy(error) or 'pass a folder written by save_pretrained'}"
        ) from error


def empty_model(config: Any, attention: str | None, dtype: str) -> Any:
    """Return the model of a config on the meta device, without values.

    The model is a causal language model or an image classifier, as the config says.

    Raises:
        ModelError: the config is of another kind of model, or transformers rejects it.
        ConfigError: `attention` or `dtype` is unknown.
    """
    if attention is not None and attention not in ATTENTIONS:
        raise ConfigError(
            f"huggingface: bad attention, expected {', '.join(ATTENTIONS)} or null for the default "
            f"of transformers, got {attention!r}; choose one of them"
        )
    if dtype not in _DTYPES:
        raise ConfigError(
            f"huggingface: bad dtype, expected one of {', '.join(_DTYPES)}, got {dtype!r}; train "
            f"in 16 bits by train.precision, with weights in float32"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(
            f"huggingface: {config.model_type} is an encoder-decoder model, which cannot be split "
            f"into one sequence of layers, because the encoder feeds every layer of the decoder; "
            f"use a causal language model or an image classifier"
        )
    extras = [name for name in _EXTRAS if getattr(config, name, None)]
    if extras:
        raise ModelError(
            f"huggingface: a model with {extras[0]}={getattr(config, extras[0])!r} cannot be split "
            f"into layers; remove it from the config"
        )
    auto = _task(config)
    options: dict[str, Any] = {} if attention is None else {"attn_implementation": attention}
    if dtype == "float64":  # the default experts implementation has no float64 kernel
        options["experts_implementation"] = "batched_mm"
    # transformers sets torch's default dtype meanwhile, and replaces its initialisers.
    with GENERATOR_LOCK, torch.device("meta"):
        try:
            return auto.from_config(config, dtype=getattr(torch, dtype), **options)
        except Exception as error:
            raise ModelError(
                f"huggingface: transformers cannot build a {config.model_type} from the config: "
                f"{type(error).__name__}: {error}; correct the config"
            ) from error


def _task(config: Any) -> Any:
    """Return the auto class of transformers that builds the model of a config."""
    library = transformers()
    named = getattr(config, "architectures", None)
    for auto in (library.AutoModelForCausalLM, library.AutoModelForImageClassification):
        mapping = auto._model_mapping
        if type(config) not in mapping:
            continue
        made = mapping[type(config)]
        if not named or getattr(made, "__name__", None) in named:
            return auto
    raise ModelError(
        f"huggingface: expected a causal language model or an image classifier, got a "
        f"{config.model_type} with architectures {named}; models of other tasks are not supported"
    )
