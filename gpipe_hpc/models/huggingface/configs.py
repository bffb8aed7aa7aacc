"""From what a user gives (folder, file, dictionary, config object) to a config and its model."""

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
# With these a model's forward returns more than the last hidden state and the logits.
_EXTRAS: Final = (
    "output_hidden_states",
    "output_attentions",
    "output_router_logits",
    "add_cross_attention",
    "quantization_config",
)


def read_config(source: Any) -> Any:
    """Return the config object of a folder or a config.json, of a dictionary, or a copy of one.

    Nothing is downloaded, and no code that comes with a model is run. Raises `ModelError`, and
    `ConfigError` for None.
    """
    if isinstance(source, transformers().PreTrainedConfig):
        return copy.deepcopy(source)
    if source is None:
        raise ConfigError(
            f"huggingface: no model, expected path to be a folder of transformers or its "
            f"{CONFIG_FILE}, got null; set model.path=/folder"
        )
    if isinstance(source, str | Path):
        source = read_json(Path(source))
    if not isinstance(source, Mapping):
        raise ModelError(
            f"huggingface: expected a folder, a {CONFIG_FILE}, a dictionary as in one or a config "
            f"object of transformers, got {type(source).__name__}; set model.path=/folder"
        )
    known = transformers().CONFIG_MAPPING
    kind = source.get("model_type")
    if kind not in known:
        raise ModelError(
            f"huggingface: unknown model_type, expected one that transformers "
            f"{transformers().__version__} knows, got {kind!r}; code that comes with a model is "
            f"not run: use a newer transformers, or correct it"
        )
    try:
        return known[kind].from_dict(_with_floats(dict(source)))
    except Exception as error:
        raise ModelError(
            f"huggingface: transformers refuses the config, expected one of a {kind}, got "
            f"{type(error).__name__}: {error}; correct it"
        ) from error


def _with_floats(entry: Any) -> Any:
    """Return what transformers writes as {"__float__": "Infinity"} as the number."""
    if isinstance(entry, Mapping):
        if entry.keys() == {"__float__"} and entry["__float__"] in _SPECIAL:
            return float(entry["__float__"])
        return {name: _with_floats(value) for name, value in entry.items()}
    if isinstance(entry, list):
        return [_with_floats(value) for value in entry]
    return entry


def read_json(path: Path) -> Any:
    """Return what a config.json holds, by its path or that of its folder; or `ModelError`."""
    if not path.exists():
        raise ModelError(
            f"huggingface: expected a local folder or its {CONFIG_FILE}, got {str(path)!r}, which "
            f"is not there; nothing is downloaded: for a model of the hub run "
            f"`hf download NAME --local-dir FOLDER` first, and give FOLDER"
        )
    file = path / CONFIG_FILE if path.is_dir() else path
    try:
        return small_files.read_json(file)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"huggingface: expected a {CONFIG_FILE} at {file}, got {type(error).__name__}: "
            f"{error}; {os_remedy(error) or 'give a folder written by save_pretrained'}"
        ) from error


def empty_model(config: Any, attention: str | None, dtype: str) -> Any:
    """Return the model of a config on the meta device: its modules, without any number in them.

    A causal language model or an image classifier, as the config says; raises `ModelError` for
    what is neither, and `ConfigError` for an unknown attention or dtype.
    """
    if attention is not None and attention not in ATTENTIONS:
        raise ConfigError(
            f"huggingface: bad attention, expected {', '.join(ATTENTIONS)} or null for what "
            f"transformers prefers, got {attention!r}; choose one of them"
        )
    if dtype not in _DTYPES:
        raise ConfigError(
            f"huggingface: bad dtype, expected one of {', '.join(_DTYPES)}, got {dtype!r}; train "
            f"in 16 bits by train.precision, with weights in float32"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(
            f"huggingface: {config.model_type} is an encoder with a decoder, which cannot be cut "
            f"into one sequence of layers: both feed every layer of the decoder; take a causal "
            f"language model or an image classifier"
        )
    extras = [name for name in _EXTRAS if getattr(config, name, None)]
    if extras:
        raise ModelError(
            f"huggingface: cannot be cut into layers with {extras[0]}, expected it unset, got "
            f"{getattr(config, extras[0])!r}; remove it from the config"
        )
    auto = _task(config)
    options: dict[str, Any] = {} if attention is None else {"attn_implementation": attention}
    if dtype == "float64":  # of which transformers' first choice for experts has no kernel
        options["experts_implementation"] = "batched_mm"
    # transformers sets torch's default dtype meanwhile, and replaces its initialisers.
    with GENERATOR_LOCK, torch.device("meta"):
        try:
            return auto.from_config(config, dtype=getattr(torch, dtype), **options)
        except Exception as error:
            raise ModelError(
                f"huggingface: transformers cannot make a {config.model_type} of the config, got "
                f"{type(error).__name__}: {error}; correct the config"
            ) from error


def _task(config: Any) -> Any:
    """Return the auto class that makes the model: the one its config names."""
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
        f"{config.model_type} with architectures {named}; models of other tasks are not cut"
    )
