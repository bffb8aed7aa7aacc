"""The layers of a transformers model; each runs a part of the model's code.

Parameters keep their names in the model. The layers pass on a `Boundary`: the hidden states and the
other arguments of the blocks (masks, positions, rotary angles), each tensor once.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from gpipe_hpc.errors import ModelError
from gpipe_hpc.models.huggingface.blueprint import Blueprint, dynamic_rotary_embeddings, too_long
from gpipe_hpc.models.huggingface.calls import Call
from gpipe_hpc.models.huggingface.companion_files import Companion
from gpipe_hpc.models.huggingface.meta_tensors import is_valueless, run_without_values
from gpipe_hpc.models.huggingface.stand_ins import CallRecorder, ComputedOutput

_TENSOR_INPUTS: Final = frozenset(
    {"input_ids", "attention_mask", "position_ids", "token_type_ids", "pixel_values"}
)


class Boundary(NamedTuple):
    """The tensors passed between layers before the last block.

    Block i is called with ``[values[k] for k in slots[kinds[i]]]``. Most models have one kind of
    call; those with sliding windows have two.
    """

    hidden: Tensor
    values: tuple[Any, ...]
    slots: tuple[tuple[int, ...], ...]
    kinds: bytes


class HuggingFaceLayer(nn.Module):
    """Base class of layers that run a part of a model; parameters keep their names in the model."""

    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__()
        self.blueprint = blueprint

    def _fill(self, path: str, part: nn.Module | None = None) -> None:
        """Load or initialise the weights of this layer, see `Blueprint.fill`."""
        self.blueprint.fill(self, path, part)
        self._built = frozenset(self.state_dict())

    @property
    def num_layers(self) -> int:
        """Return the number of layers of the whole model."""
        parts = self.blueprint.structure
        return 2 + parts.num_blocks + len(parts.closing)

    def exported(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Rename this layer's tensors to the names in weight files.

        Raises `ModelError` if the layer's tensors no longer match the transformers model.
        """
        self._check_unchanged(self.state_dict() | dict(tensors))
        return self.blueprint.stored_names(tensors)

    def _check_unchanged(self, tensors: Mapping[str, Tensor]) -> None:
        kind, known = self.blueprint.kind, self.blueprint.model.state_dict()
        changes = [_change(name, tensor, known.get(name)) for name, tensor in tensors.items()]
        changes += [f"no {name}" for name in sorted(self._built - tensors.keys())]
        got = next(filter(None, changes), "")
        if got:
            raise ModelError(
                f"export: the layers no longer match the tensors of a {kind}, because they were "
                f"changed after they were built: {got}; merge adapters into the weights (peft's "
                f"merge_and_unload) and dequantize first, or save a checkpoint instead"
            )

    def companion_files(self, dtype: torch.dtype) -> dict[str, Companion]:
        """Return the files that accompany the weights: contents, or paths to copy, by file name."""
        return self.blueprint.companion_files(dtype)

    def _place(self, path: str, module: nn.Module) -> None:
        """Register a module under its path in the model, so that parameters keep their names."""
        owner: nn.Module = self
        *folders, leaf = path.split(".")
        for folder in folders:
            if folder not in owner._modules:
                owner.add_module(folder, nn.Module())
            owner = owner.get_submodule(folder)
        owner.add_module(leaf, module)


def _change(name: str, tensor: Tensor, known: Tensor | None) -> str:
    """Return the difference between a tensor and the model's as text, "" if there is none."""
    if known is None:
        return f"unknown tensor {name}"
    if tensor.shape != known.shape:
        return f"{name} of shape {list(tensor.shape)} instead of {list(known.shape)}"
    if tensor.is_floating_point() != known.is_floating_point():
        return f"{name} of {str(tensor.dtype).removeprefix('torch.')}"
    if not tensor.is_meta and type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
        return f"{name} as {type(tensor).__name__}"
    return ""


class HuggingFaceEmbedding(HuggingFaceLayer):
    """First layer: runs the model's code before the blocks and records the arguments of the blocks.

    Takes token ids [B, S] or images [B, C, H, W], or a dictionary of these with an attention_mask
    [B, S] (1 for tokens, 0 for padding) or position_ids [B, S].
    """

    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__(blueprint)
        parts = blueprint.structure
        self._calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        model = blueprint.model
        blocks = model.get_submodule(parts.blocks)
        listeners = nn.ModuleList(
            CallRecorder(block, self._calls, parts.num_returned) for block in blocks.children()
        )
        instead: dict[int, nn.Module] = {id(blocks): listeners}
        instead |= {id(model.get_submodule(path)): nn.Identity() for path in parts.closing}
        core = blueprint.copied(model.get_submodule(parts.core), instead)
        self._place(parts.core, core)
        self._fill(parts.core)
        # Rotary embeddings whose angles change permanently with the first longer sequence.
        self._stretched = dynamic_rotary_embeddings(core)

    def forward(self, inputs: Any) -> Boundary:
        """Embed a micro-batch and return the arguments of all blocks."""
        parts, calls = self.blueprint.structure, self._calls
        arguments = parts.inputs | self._named(inputs)
        try:
            with run_without_values(arguments[parts.main_input]):
                self.get_submodule(parts.core)(**arguments)
            if self._stretched and not is_valueless(arguments[parts.main_input]):
                self._refuse_stretching()
            found = [Call.of(args, kwargs, "embedding") for args, kwargs in calls]
        finally:
            calls.clear()  # free the tensors of this micro-batch
        if tuple(call.form for call in found) != parts.forms:
            raise ModelError(
                f"huggingface: with these inputs, {self.blueprint.kind} does not call its blocks "
                f"as on the meta device: {len(found)} calls instead of {parts.num_blocks}, or "
                f"calls with other arguments; use other inputs, or write the model as a sequence "
                f"of layers"
            )
        return _boundary(found)

    def _refuse_stretching(self) -> None:
        for module, name, before in self._stretched:
            now = vars(module)[name]
            if isinstance(now, Tensor) or now != before:
                raise too_long(before, int(now))

    def _named(self, inputs: Any) -> dict[str, Any]:
        parts = self.blueprint.structure
        if isinstance(inputs, Tensor):
            return {parts.main_input: inputs}
        known = sorted(_TENSOR_INPUTS & parts.inputs.keys())
        if not isinstance(inputs, Mapping) or not inputs.keys() <= set(known):
            got = sorted(inputs) if isinstance(inputs, Mapping) else type(inputs).__name__
            raise ModelError(
                f"huggingface: bad inputs, expected a tensor {parts.main_input} or a dictionary "
                f"with some of {', '.join(known)}, got {got}; pass labels as targets"
            )
        return dict(inputs)


def _boundary(calls: list[Call]) -> Boundary:
    """Collect the arguments of all block calls, each value once."""
    slot_of: dict[Any, int] = {}
    values: list[Any] = []
    slots: dict[tuple[int, ...], int] = {}
    kinds = bytearray()
    for call in calls:
        row = []
        for leaf in call.leaves:
            key = id(leaf) if isinstance(leaf, Tensor) else (type(leaf), leaf)
            if key not in slot_of:
                slot_of[key] = len(values)
                values.append(leaf)
            row.append(slot_of[key])
        kinds.append(slots.setdefault(tuple(row), len(slots)))
    return Boundary(calls[0].hidden, tuple(values), tuple(slots), bytes(kinds))


class HuggingFaceBlock(HuggingFaceLayer):
    """Transformer block `index` of the model; the last one returns hidden states only."""

    def __init__(self, blueprint: Blueprint, index: "BlockIndex") -> None:
        super().__init__(blueprint)
        parts = blueprint.structure
        self.index = index.value
        self._path = f"{parts.blocks}.{self.index}"
        block = blueprint.copied(blueprint.model.get_submodule(self._path))
        self._place(self._path, block)
        self._fill(self._path)

    def forward(self, boundary: Boundary) -> Any:
        """Run the block on the hidden states."""
        hidden, values, slots, kinds = boundary
        parts = self.blueprint.structure
        # Recomputation makes all boundary tensors require gradients; these do not need them.
        values = tuple(v.detach() if isinstance(v, Tensor) else v for v in values)
        leaves = [values[slot] for slot in slots[kinds[self.index]]]
        block = self.get_submodule(self._path)
        with run_without_values(hidden) if is_valueless(hidden) else nullcontext():
            output = parts.forms[self.index].call(block, hidden, leaves)
        hidden = output[0] if parts.num_returned else output
        if self.index == parts.num_blocks - 1:
            return hidden
        return Boundary(hidden, values, slots, kinds)


@dataclass(frozen=True)
class BlockIndex:
    """Index of a block; equal for blocks of equal cost, so that only one of them is measured."""

    value: int = field(compare=False)
    kind: str

    def __repr__(self) -> str:
        return str(self.value)


class HuggingFaceNorm(HuggingFaceLayer):
    """A module after the blocks, usually the final norm: [B, S, H] -> [B, S, H]."""

    def __init__(self, blueprint: Blueprint, path: str) -> None:
        super().__init__(blueprint)
        self._path = path
        module = blueprint.copied(blueprint.model.get_submodule(path))
        self._place(path, module)
        self._fill(path)

    def forward(self, hidden: Tensor) -> Any:
        """Apply the module to the hidden states."""
        return self.get_submodule(self._path)(hidden)


class HuggingFaceHead(HuggingFaceLayer):
    """Last layer: runs the model's code after the blocks and norm, from hidden states to logits."""

    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__(blueprint)
        model = blueprint.model
        core = model.get_submodule(blueprint.structure.core)
        given = ComputedOutput(core, blueprint.structure.returned)
        whole = blueprint.copied(model, {id(core): given})
        # Share the model's parameters under their own names, without a submodule prefix.
        self._parameters, self._buffers = whole._parameters, whole._buffers
        self._modules = whole._modules
        self._whole, self._given = (whole,), (given,)
        self._fill("", whole)

    def forward(self, hidden: Tensor) -> Any:
        """Compute logits: [B, S, V] for tokens, [B, classes] for images."""
        (whole,), (given,) = self._whole, self._given
        whole.training = self.training
        given.hidden = hidden
        try:
            return whole(**{self.blueprint.structure.main_input: None}).logits
        finally:
            given.hidden = None
