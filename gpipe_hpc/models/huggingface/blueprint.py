"""A transformers model on the meta device, from which each rank copies and fills its layers."""

import copy
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from gpipe_hpc.errors import ConfigError, ModelError
from gpipe_hpc.models.huggingface.companion_files import (
    GENERATION_FILE,
    Companion,
    companion_files_of,
    config_text,
    stored_config,
    tokenizer_file,
)
from gpipe_hpc.models.huggingface.configs import CONFIG_FILE, empty_model
from gpipe_hpc.models.huggingface.library import transformers, transformers_part
from gpipe_hpc.models.huggingface.stand_ins import StandIn
from gpipe_hpc.models.huggingface.structure import find_structure
from gpipe_hpc.models.huggingface.weights import WeightFolder
from gpipe_hpc.models.randomness import GENERATOR_LOCK
from gpipe_hpc.models.ties import first_names

_INITIALISED = "_is_hf_initialized"
_MOST_BYTES: Final = 512  # largest byte vocabulary: 256 bytes, special tokens and padding


class Blueprint:
    """A transformers model on the meta device, with its structure and the location of its weights.

    All layers of a model share one object. Pickling stores the config instead of the model.

    Args:
        config: config object of transformers.
        attention: ``eager``, ``sdpa`` or None for the default of transformers.
        dtype: name of the weights' dtype.
        weights: folder with the weights; None to initialise them.
        source: folder, file or dictionary that the config came from; its other files are exported
            with the weights.
    """

    def __init__(
        self,
        config: Any,
        attention: str | None,
        dtype: str,
        weights: WeightFolder | None = None,
        source: Any = None,
    ) -> None:
        self._made_of = (config, attention, dtype)
        self.source = source
        self.model = _quiet(empty_model(config, attention, dtype))
        self.kind = type(self.model).__name__
        # Use a copy, because some modules store state in a forward, such as rotary frequencies.
        self.structure = find_structure(self.copied(self.model))
        self.weights = weights

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the constructor and its arguments for pickling."""
        return Blueprint, (*self._made_of, self.weights, self.source)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Blueprint":
        """Return this object, which is immutable."""
        return self

    def __repr__(self) -> str:
        return f"<{self.kind}>"

    @property
    def sees_ahead(self) -> bool:
        """Return whether attention includes later positions, as in an encoder."""
        blocks = self.model.get_submodule(self.structure.blocks)
        return any(getattr(part, "is_causal", None) is False for part in blocks.modules())

    @property
    def looks_back(self) -> bool:
        """Return whether the model is a causal language model."""
        return self.structure.main_input == "input_ids" and not self.sees_ahead

    def check_bytes(self) -> None:
        """Raise ConfigError if the model's tokens are not bytes, as byte data sets need."""
        found = tokenizer_file(self.source)
        vocabulary = self.model.config.get_text_config().vocab_size
        if found is None and vocabulary <= _MOST_BYTES:
            return
        got = f"a vocabulary of {vocabulary:,}" if found is None else f"its tokenizer, {found}"
        raise ConfigError(
            f"config: bad data: the samples are bytes of text, but a {self.kind} with {got} "
            f"expects tokens of its own tokenizer; encode the texts with it and use "
            f"data=tokens, or train new weights for a config.json with a vocab_size of at most "
            f"{_MOST_BYTES}"
        )

    @property
    def most_positions(self) -> int | None:
        """Return the maximum sequence length, or None if there is no limit."""
        found = [value for _, _, value in dynamic_rotary_embeddings(self.model)]
        return min(found, default=None)

    def check_positions(self, num_positions: int) -> None:
        """Raise ModelError if a sequence of `num_positions` is too long."""
        most = self.most_positions
        if most is not None and num_positions > most:
            raise too_long(most, num_positions)

    def ties(self) -> dict[str, str]:
        """Map each name of a tied parameter to the first of its names."""
        first: dict[int, str] = {}
        names: dict[str, str] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            names[name] = first.setdefault(id(parameter), name)
        shared = {label for name, label in names.items() if name != label}
        return {name: label for name, label in names.items() if label in shared}

    def copied(self, module: nn.Module, instead: Mapping[int, nn.Module] | None = None) -> Any:
        """Return a deep copy of a module; `instead` maps ids of submodules to replacements."""
        config = self.model.config
        # deepcopy uses objects in its memo instead of copying.
        return copy.deepcopy(module, {id(config): config, **(instead or {})})

    def fill(self, layer: nn.Module, path: str, part: nn.Module | None = None) -> None:
        """Set a layer's weights, loaded from the folder or initialised as transformers does.

        Uses torch's generator, which the caller has seeded. Does nothing on the meta device.

        Args:
            layer: the layer, allocated here.
            path: path of the layer's part in the model, and in the layer unless `part` is given.
            part: the module to initialise.
        """
        part = layer.get_submodule(path) if part is None else part
        for module in part.modules():
            module.__dict__.pop(_INITIALISED, None)
        if torch.empty(0).is_meta:
            return
        names = first_names(layer)
        layer.to_empty(device="cpu")
        for name, first in names.items():
            if name != first:  # to_empty creates separate parameters for tied names
                owner, _, leaf = name.rpartition(".")
                setattr(layer.get_submodule(owner), leaf, layer.get_parameter(first))
        with torch.no_grad(), GENERATOR_LOCK, _default_dtype(self.model.dtype):
            loaded = self._load(layer) if self.weights is not None else []
            unset = _filled_with_nan(layer)
            with transformers_part("initialization").guard_torch_init_functions():
                self._initialise(part, self._model_around(path, part))
            for tensor in loaded:
                tensor.__dict__.pop(_INITIALISED, None)
            self._check_set(unset)
        for module in part.modules():
            module.__dict__.pop(_INITIALISED, None)

    def possibly_unset(self) -> list[str]:
        """Return the names of tensors that are not in the folder and may not be initialised either.

        This is an estimate on the meta device: it observes only in-place writes, not those of all
        torch functions, and checks only the first of equal blocks. `fill` checks the actual values.
        """
        first: dict[str, nn.Module] = {}
        blocks = self.model.get_submodule(self.structure.blocks).children()
        others = [each for each in blocks if first.setdefault(str(each), each) is not each]
        whole = self.copied(self.model, {id(each): StandIn(each) for each in others})
        versions = {name: tensor._version for name, tensor in _numbers(whole).items()}
        with suppress(Exception), torch.device("meta"), torch.no_grad():  # some read values
            self._initialise(whole, whole)
        return [
            name
            for name, tensor in _numbers(whole).items()
            if tensor._version == versions.get(name) and not self._is_stored(name)
        ]

    def _is_stored(self, name: str) -> bool:
        ties = self.ties()
        names = {name, *(other for other in ties if ties[other] == ties.get(name))}
        return self.weights is not None and any(each in self.weights for each in names)

    def _check_set(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if torch.isnan(tensor).any():
                raise ModelError(
                    f"huggingface: transformers {transformers().__version__} leaves some values of "
                    f"{name} of a {self.kind} uninitialised; use another version, or a folder that "
                    f"contains the tensor"
                )

    def _load(self, layer: nn.Module) -> list[Tensor]:
        assert self.weights is not None
        ties = self.ties()
        loaded = []
        for name, tensor in layer.state_dict(keep_vars=True).items():
            names = [name, *(other for other in ties if ties[other] == ties.get(name))]
            found = [each for each in dict.fromkeys(names) if each in self.weights]
            if not found:
                continue
            values = self.weights.read(found[0])
            for other in found[1:]:
                if not torch.equal(values, self.weights.read(other)):
                    raise ModelError(
                        f"huggingface: the config ties {found[0]} and {other}, but their stored "
                        f"values differ; set tie_word_embeddings to false"
                    )
            tensor.copy_(values)
            setattr(tensor, _INITIALISED, True)
            loaded.append(tensor)
        return loaded

    def _model_around(self, path: str, part: nn.Module) -> Any:
        """Return a copy of the model with `part` at `path`, and with stand-ins for the blocks."""
        if not path:
            return part
        model = self.model
        blocks = model.get_submodule(self.structure.blocks).children()
        instead: dict[int, nn.Module] = {id(block): StandIn(block) for block in blocks}
        whole = self.copied(model, instead | {id(model.get_submodule(path)): part})
        for module in whole.modules():
            module.__dict__.pop(_INITIALISED, None)
        return whole

    def _initialise(self, part: nn.Module, whole: Any) -> None:
        """Initialise the tensors of a part that are not loaded, in the same order as transformers.

        Submodules come before the module that contains them. The outer model may initialise
        parameters of the part a second time.
        """

        def go(module: nn.Module, responsible: Any, within: bool) -> None:
            within = within or module is part
            if isinstance(module, transformers().PreTrainedModel):
                responsible = module
            for child in module.children():
                go(child, responsible, within)
            if within or module is responsible:
                responsible._initialize_weights(module)

        go(whole, whole, False)

    def stored_names(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Rename tensors from the model's names to those that weight files use."""
        loading = transformers_part("core_model_loading")
        ignored = self.model._keys_to_ignore_on_save or ()
        kept = {name: tensor for name, tensor in tensors.items() if name not in ignored}
        stored: dict[str, Tensor] = loading.revert_weight_conversion(self.model, kept)
        return stored

    def companion_files(self, dtype: torch.dtype) -> dict[str, Companion]:
        """Return the files that accompany the weights: contents, or paths to copy, by file name."""
        entries = stored_config(self.source)
        if entries is None:
            entries = json.loads(self.model.config.to_json_string())
        files: dict[str, Companion] = {CONFIG_FILE: config_text(entries, self.kind, dtype)}
        if self.model.can_generate():
            files[GENERATION_FILE] = self.model.generation_config.to_json_string()
        if isinstance(self.source, Path):
            files |= companion_files_of(self.source)
        return files


def _numbers(module: nn.Module) -> dict[str, Tensor]:
    """Return the floating-point parameters and buffers by name."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor for name, tensor in named if tensor.is_floating_point()}


def _filled_with_nan(layer: nn.Module) -> dict[str, Tensor]:
    """Fill tensors that are not loaded with NaN, to detect values that are never initialised."""
    unset = {n: t for n, t in _numbers(layer).items() if not hasattr(t, _INITIALISED)}
    for tensor in unset.values():
        tensor.fill_(torch.nan)
    return unset


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Context that sets torch's default dtype, so that constants equal those of transformers."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _quiet(model: Any) -> Any:
    """Disable a warning of transformers that reads token values in every forward."""
    for module in model.modules():
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):
            module.warn_if_padding_and_no_attention_mask = _say_nothing
    return model


def _say_nothing(*args: Any, **kwargs: Any) -> None:
    return None


def dynamic_rotary_embeddings(model: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """Return (module, attribute, limit) of rotary embeddings with rope_type ``dynamic``.

    They change their angles permanently when a sequence is longer than the limit.
    """
    return [
        (module, name, value)
        for module in model.modules()
        if "dynamic" in str(getattr(module, "rope_type", ""))
        for name, value in vars(module).items()
        if name.endswith("max_seq_len_cached")
    ]


def too_long(most: int, num_positions: int) -> ModelError:
    """Return the error for a sequence that would change the rotary angles of later sequences."""
    return ModelError(
        f"huggingface: expected at most {most} positions (max_position_embeddings), got "
        f"{num_positions}: with rope_type 'dynamic' a longer sequence changes the rotary angles "
        f"of later sequences, so results would depend on the order of micro-batches; use shorter "
        f"sequences, or set another rope_type in the config"
    )
