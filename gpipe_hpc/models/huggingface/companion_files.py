"""Files that accompany a model's weights: config, tokenizer, generation settings and so on.

Exports contain unchanged copies, except that config.json receives the dtype of the weights, and the
class of the model if the original names none.
"""

import copy
import json
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

import torch

from gpipe_hpc.models.huggingface.configs import CONFIG_FILE, read_json

GENERATION_FILE: Final = "generation_config.json"
Companion = str | Path
"""The content of a file, or the path of a file to copy."""

# Weights of this and other libraries, and files that training writes next to them.
_WEIGHTS: Final = (
    "*.safetensors*",
    "*.bin",
    "*.bin.index.json",
    "*.pt",
    "*.pth",
    "*.ckpt*",
    "*.h5",
    "*.msgpack*",
    "*.onnx*",
    "*.gguf",
    "*.tflite",
    "*.pkl",
    "*.pickle",
    "*.npz",
    "*.ot",
)
# If only a config.json is given, its folder may contain other files; these belong to the model.
_OF_A_MODEL: Final = (
    GENERATION_FILE,
    "*tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    "*processor_config.json",
    "LICENSE*",
)
_OF_A_TOKENIZER: Final = ("*tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken")
_TEMPLATES: Final = "additional_chat_templates"  # the only subfolder that transformers reads


def stored_config(source: Any) -> dict[str, Any] | None:
    """Return the entries of a config.json or dictionary, or None for a config object."""
    if isinstance(source, str | Path):
        return dict(read_json(Path(source)))
    return copy.deepcopy(dict(source)) if isinstance(source, Mapping) else None


def companion_files_of(source: Path) -> dict[str, Path]:
    """Return the files that accompany a model, by name; `source` is its folder or config.json.

    Weights, config.json, hidden files, hidden folders, and links that leave the folder are omitted.
    (Links to the blobs of the hub's cache stay within it.)
    """
    folder = source if source.is_dir() else source.parent
    own = (folder.resolve(), folder.resolve().parent.parent / "blobs")
    found = {path.name: path for path in folder.iterdir() if path.is_file()}
    if (folder / _TEMPLATES).is_dir():
        templates = (folder / _TEMPLATES).iterdir()
        found |= {f"{_TEMPLATES}/{path.name}": path for path in templates if path.is_file()}
    return {
        name: path
        for name, path in sorted(found.items())
        if name != CONFIG_FILE
        and any(path.resolve().is_relative_to(place) for place in own)
        and not path.name.startswith(".")
        and not _matches(name, _WEIGHTS)
        and (source.is_dir() or path.parent.name == _TEMPLATES or _matches(name, _OF_A_MODEL))
    }


def tokenizer_file(source: Any) -> str | None:
    """Return the name of a tokenizer file of the model, or None if there is none."""
    if not isinstance(source, Path):
        return None
    found = [name for name in companion_files_of(source) if _matches(name, _OF_A_TOKENIZER)]
    return found[0] if found else None


def config_text(entries: Mapping[str, Any], kind: str, dtype: torch.dtype) -> str:
    """Return the content of a config.json for a model of class `kind` with weights of `dtype`."""
    written = _with_dtype(entries, str(dtype).removeprefix("torch."))
    written["dtype"] = str(dtype).removeprefix("torch.")
    written["architectures"] = entries.get("architectures") or [kind]
    return json.dumps(written, indent=2, sort_keys=True) + "\n"


def _with_dtype(entries: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Set the dtype under the key that transformers 5 uses, also in nested configs."""
    written: dict[str, Any] = {}
    for name, value in entries.items():
        if name in ("dtype", "torch_dtype"):
            written["dtype"] = dtype
        elif isinstance(value, Mapping) and name.endswith("_config"):
            written[name] = _with_dtype(value, dtype)
        else:
            written[name] = value
    return written


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
