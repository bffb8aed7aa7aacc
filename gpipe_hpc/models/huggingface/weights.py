"""Lazy access to a folder of safetensors weights: each rank reads only its own tensors."""

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, NamedTuple

from torch import Tensor

from gpipe_hpc.errors import ConfigError, ModelError, os_remedy
from gpipe_hpc.models.huggingface.library import safetensors, transformers_part
from gpipe_hpc.small_files import read_json

WEIGHTS_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
_PICKLED: Final = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_SHOWN: Final = 3  # names in a message

Shape = tuple[int, ...]


class TensorLocation(NamedTuple):
    """Location of a tensor: its file and its name in the file."""

    file: Path
    name: str


class WeightFolder:
    """The tensors of a folder of safetensors files, by the model's names; read on demand."""

    def __init__(self, folder: Path, places: Mapping[str, TensorLocation]) -> None:
        self.folder = folder
        self._places = dict(places)

    def __contains__(self, name: object) -> bool:
        """Return whether the folder contains a tensor of the model."""
        return name in self._places

    def read(self, name: str) -> Tensor:
        """Read one tensor to the CPU; no other data of its file is read."""
        place = self._places[name]
        try:
            with safetensors().safe_open(place.file, framework="pt", device="cpu") as file:
                tensor: Tensor = file.get_tensor(place.name)
                return tensor
        except (OSError, safetensors().SafetensorError) as error:
            raise _unreadable(place.file, error) from error


def open_weights(folder: Path, model: Any, fresh: Iterable[str] = ()) -> WeightFolder:
    """Open the weights of `model`, which is on the meta device.

    Args:
        folder: the folder with safetensors files.
        model: the model whose tensors are expected.
        fresh: name patterns of tensors not to load.

    Raises:
        ModelError: files are missing, pickled or damaged, or the names or shapes of tensors differ
            from the model's.
        ConfigError: a pattern matches no tensor of the model.
    """
    stored = {name: place for file in _files(folder) for name, place in _header(file).items()}
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    patterns = tuple(fresh)
    _check_patterns(patterns, expected)
    places: dict[str, TensorLocation] = {}
    for name, (original, (place, shape)) in _renamed(model, stored).items():
        if _matches(name, patterns):
            continue
        if name not in expected:
            if not _ignored(model, "_keys_to_ignore_on_load_unexpected", name):
                _refuse(folder, "has a tensor that the model lacks", "none", [original])
            continue
        if shape != expected[name]:
            raise ModelError(
                f"huggingface: {folder} does not match the config, expected {name} of shape "
                f"{list(expected[name])}, got {list(shape)}; correct the config, or initialise the "
                f"tensor again with fresh=[{name}]"
            )
        places[name] = place
    tied = _tied_names(model)
    missing = [
        name
        for name in expected
        if not any(same in places for same in tied.get(name, (name,)))
        and not _matches(name, patterns)
        and not _ignored(model, "_keys_to_ignore_on_load_missing", name)
    ]
    if missing:
        _refuse(folder, "lacks tensors of the model", f"all {len(expected)}", missing)
    return WeightFolder(folder, places)


def _files(folder: Path) -> list[Path]:
    """Return the weight files of a folder: those that its index lists, or the single file."""
    index = folder / INDEX_FILE
    if index.exists():
        try:
            names = sorted(set(read_json(index)["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise _unreadable(index, error) from error
    else:
        names = [WEIGHTS_FILE]
    files = [folder / Path(str(name)).name for name in names]
    missing = [file.name for file in files if not file.is_file()]
    if not missing:
        return files
    pickled = sorted(p.name for pattern in _PICKLED for p in folder.glob(pattern))
    if pickled and not index.exists():
        raise ModelError(
            f"huggingface: {folder} has only pickled weights, expected {WEIGHTS_FILE}, got "
            f"{pickled[0]}; nothing is unpickled: if you trust the file, convert it with "
            f"from_pretrained(...).save_pretrained(FOLDER)"
        )
    raise ModelError(
        f"huggingface: {folder} lacks the file {missing[0]}; download the folder again, or pass "
        f"its config.json to start from new weights"
    )


def _header(file: Path) -> dict[str, tuple[TensorLocation, Shape]]:
    try:
        with safetensors().safe_open(file, framework="pt", device="cpu") as opened:
            names: list[str] = list(opened.keys())
            shapes = [tuple(opened.get_slice(name).get_shape()) for name in names]
    except (OSError, safetensors().SafetensorError) as error:
        raise _unreadable(file, error) from error
    return {
        name: (TensorLocation(file, name), shape) for name, shape in zip(names, shapes, strict=True)
    }


def _renamed(
    model: Any, stored: Mapping[str, tuple[TensorLocation, Shape]]
) -> dict[str, tuple[str, tuple[TensorLocation, Shape]]]:
    """Return stored tensors by the model's names; files may use older names or lack the prefix."""
    loading = transformers_part("core_model_loading")
    mapping = transformers_part("conversion_mapping").get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, loading.WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, loading.WeightConverter)]
    meta = model.state_dict()
    found = {}
    for original, entry in stored.items():
        name, converter = loading.rename_source_key(
            original, renamings, converters, model.base_model_prefix, meta
        )
        if converter is not None:
            raise ModelError(
                f"huggingface: {original} is stored in a format that transformers merges or splits "
                f"on loading, which is not supported; convert the folder with "
                f"from_pretrained(...).save_pretrained(FOLDER, save_original_format=False)"
            )
        found[name] = (original, entry)
    return found


def _tied_names(model: Any) -> dict[str, tuple[str, ...]]:
    """Map each name of a tied parameter to all of its names."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name: tuple(group) for group in names.values() for name in group}


def _check_patterns(patterns: tuple[str, ...], names: Iterable[str]) -> None:
    known = list(names)
    idle = [each for each in patterns if not any(_matches(name, (each,)) for name in known)]
    if idle:
        raise ConfigError(
            f"huggingface: the pattern {idle[0]!r} of fresh matches no tensor of the model, such "
            f"as {known[-1]}; correct or remove it"
        )


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _ignored(model: Any, what: str, name: str) -> bool:
    return any(re.search(pattern, name) for pattern in getattr(model, what, None) or ())


def _refuse(folder: Path, what: str, expected: str, names: list[str]) -> None:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    raise ModelError(
        f"huggingface: {folder} {what}, expected {expected}, got {', '.join(names[:_SHOWN])}"
        f"{more}; correct the config or the folder"
    )


def _unreadable(file: Path, error: Exception) -> ModelError:
    return ModelError(
        f"huggingface: cannot read {file}: {type(error).__name__}: {error}; "
        f"{os_remedy(error) or 'download or export it again'}"
    )
