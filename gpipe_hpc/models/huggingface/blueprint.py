"""A model without values, of which every layer is a copy of a part, filled on its rank."""

import copy
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from gpipe_hpc.errors import ConfigError, ModelError
from gpipe_hpc.models.huggingface.companions import (
    GENERATION_FILE,
    Companion,
    config_text,
    files_beside,
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
_MOST_BYTES: Final = 512  # tokens of a vocabulary of bytes: those, some special ones, and padding


class Blueprint:
    """A model of transformers on the meta device, its structure, and where its weights are.

    One object serves all layers of a model; it is picklable, without the model itself. `source`:
    the folder, file or dictionary that it came from, for what goes with exported weights.
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
        # Of a copy: some modules keep what they last computed, such as rotary frequencies.
        self.structure = find_structure(self.copied(self.model))
        self.weights = weights

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle what the model is made of."""
        return Blueprint, (*self._made_of, self.weights, self.source)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Blueprint":
        """Return this one: nobody changes it."""
        return self

    def __repr__(self) -> str:
        return f"<{self.kind}>"

    @property
    def sees_ahead(self) -> bool:
        """Say whether blocks attend to later positions, as those of an encoder do."""
        blocks = self.model.get_submodule(self.structure.blocks)
        return any(getattr(part, "is_causal", None) is False for part in blocks.modules())

    @property
    def looks_back(self) -> bool:
        """Say whether it is a causal language model."""
        return self.structure.main_input == "input_ids" and not self.sees_ahead

    def check_bytes(self) -> None:
        """Raise ConfigError if the model's tokens are not the bytes of a text."""
        found = tokenizer_file(self.source)
        vocabulary = self.model.config.get_text_config().vocab_size
        if found is None and vocabulary <= _MOST_BYTES:
            return
        got = f"a vocabulary of {vocabulary:,}" if found is None else f"its tokenizer, {found}"
        raise ConfigError(
            f"config: bad data, expected tokens of the model's own tokenizer for a {self.kind} "
            f"with {got}, got the bytes of texts, which are other tokens; encode the texts with "
            f"the tokenizer and give data=tokens, or train a config.json with a vocab_size of at "
            f"most {_MOST_BYTES} from new weights"
        )

    @property
    def most_positions(self) -> int | None:
        """Return how long a sequence may be, None for any length."""
        found = [value for _, _, value in stretched(self.model)]
        return min(found, default=None)

    def check_positions(self, num_positions: int) -> None:
        """Raise ModelError if a sequence is too long."""
        most = self.most_positions
        if most is not None and num_positions > most:
            raise too_long(most, num_positions)

    def ties(self) -> dict[str, str]:
        """Return, for each name of a tied parameter, the first of its names."""
        first: dict[int, str] = {}
        names: dict[str, str] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            names[name] = first.setdefault(id(parameter), name)
        shared = {label for name, label in names.items() if name != label}
        return {name: label for name, label in names.items() if label in shared}

    def copied(self, module: nn.Module, instead: Mapping[int, nn.Module] | None = None) -> Any:
        """Return a copy of a part; `instead`: what stands in for modules, by their id."""
        config = self.model.config
        # deepcopy takes what it finds in its memo for copies already made.
        return copy.deepcopy(module, {id(config): config, **(instead or {})})

    def fill(self, layer: nn.Module, path: str, part: nn.Module | None = None) -> None:
        """Give a layer its values: those of the folder, or transformers' own start.

        `path`: where the model has the layer's part, and the layer too, unless it is `part`.
        Draws from torch's generator, as its caller seeded it. On the meta device nothing happens.
        """
        part = layer.get_submodule(path) if part is None else part
        for module in part.modules():
            module.__dict__.pop(_INITIALISED, None)
        if torch.empty(0).is_meta:
            return
        names = first_names(layer)
        layer.to_empty(device="cpu")
        for name, first in names.items():
            if name != first:  # to_empty makes a parameter of its own for each name
                owner, _, leaf = name.rpartition(".")
                setattr(layer.get_submodule(owner), leaf, layer.get_parameter(first))
        with torch.no_grad(), GENERATOR_LOCK, _default_dtype(self.model.dtype):
            loaded = self._load(layer) if self.weights is not None else []
            unset = _poisoned(layer)
            with transformers_part("initialization").guard_torch_init_functions():
                self._initialise(part, self._whole_around(path, part))
            for tensor in loaded:
                tensor.__dict__.pop(_INITIALISED, None)
            self._check_set(unset)
        for module in part.modules():
            module.__dict__.pop(_INITIALISED, None)

    def perhaps_unset(self) -> list[str]:
        """Return names of tensors that perhaps neither the folder nor transformers' start sets.

        Without values it is only seen what is written to, and not by all of torch's functions;
        of blocks that are alike the first counts. `fill` knows.
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
                    f"huggingface: transformers {transformers().__version__} does not initialise "
                    f"{name} of a {self.kind} made without weights, expected all numbers set, got "
                    f"some not; use another version, or a folder that has it"
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
                        f"huggingface: {found[0]} and {other} differ, expected one tensor, as the "
                        f"config ties them, got two; set tie_word_embeddings to false"
                    )
            tensor.copy_(values)
            setattr(tensor, _INITIALISED, True)
            loaded.append(tensor)
        return loaded

    def _whole_around(self, path: str, part: nn.Module) -> Any:
        """Return the model without values except for one part; what others hold is left out."""
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
        """Let the models that a part belongs to set what is not loaded, as transformers does.

        Children come first; a model may go over the parameters of all its parts once more.
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
        """Return tensors, given by the model's names, under the names that files have."""
        loading = transformers_part("core_model_loading")
        ignored = self.model._keys_to_ignore_on_save or ()
        kept = {name: tensor for name, tensor in tensors.items() if name not in ignored}
        stored: dict[str, Tensor] = loading.revert_weight_conversion(self.model, kept)
        return stored

    def companion_files(self, dtype: torch.dtype) -> dict[str, Companion]:
        """Return what goes with weights of `dtype`: texts, and files to copy as they are."""
        entries = stored_config(self.source)
        if entries is None:
            entries = json.loads(self.model.config.to_json_string())
        files: dict[str, Companion] = {CONFIG_FILE: config_text(entries, self.kind, dtype)}
        if self.model.can_generate():
            files[GENERATION_FILE] = self.model.generation_config.to_json_string()
        if isinstance(self.source, Path):
            files |= files_beside(self.source)
        return files


def _numbers(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of floating point."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor for name, tensor in named if tensor.is_floating_point()}


def _poisoned(layer: nn.Module) -> dict[str, Tensor]:
    """Fill the numbers that are not loaded with NaN, so that none can stay unset unnoticed."""
    unset = {n: t for n, t in _numbers(layer).items() if not hasattr(t, _INITIALISED)}
    for tensor in unset.values():
        tensor.fill_(torch.nan)
    return unset


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Compute constants in the dtype in which transformers computes them at construction."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _quiet(model: Any) -> Any:
    """Return the model without a warning that it reads values of tokens for, at every forward."""
    for module in model.modules():
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):
            module.warn_if_padding_and_no_attention_mask = _say_nothing
    return model


def _say_nothing(*args: Any, **kwargs: Any) -> None:
    return None


def stretched(model: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """Return rotary embeddings whose angles longer sequences change, and how long these may be."""
    return [
        (module, name, value)
        for module in model.modules()
        if "dynamic" in str(getattr(module, "rope_type", ""))
        for name, value in vars(module).items()
        if name.endswith("max_seq_len_cached")
    ]


def too_long(most: int, num_positions: int) -> ModelError:
    """Return the error for a sequence that changes the angles of later ones."""
    return ModelError(
        f"huggingface: with rope_type 'dynamic' a sequence that is longer than all before it "
        f"changes the angles of later ones, so training would depend on the order of "
        f"micro-batches; expected at most {most} positions (max_position_embeddings), got "
        f"{num_positions}; give shorter sequences, or set another rope_type in the config"
    )
