"""The layers a model becomes: each runs a part of the model's own code, with the model's names.

Between them travel the hidden states and what the core calls its blocks with (masks, positions,
rotary angles), each tensor once: `Boundary`.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from gpipe_hpc.errors import ModelError
from gpipe_hpc.models.huggingface.blueprint import Blueprint, stretched, too_long
from gpipe_hpc.models.huggingface.calls import Call
from gpipe_hpc.models.huggingface.companions import Companion
from gpipe_hpc.models.huggingface.stand_ins import Given, Listener
from gpipe_hpc.models.huggingface.valueless import is_valueless, run_as_with_values

_TENSOR_INPUTS: Final = frozenset(
    {"input_ids", "attention_mask", "position_ids", "token_type_ids", "pixel_values"}
)


class Boundary(NamedTuple):
    """What goes from layer to layer ahead of the last block.

    Block i is called with ``[values[k] for k in slots[kinds[i]]]``: most models have one kind of
    call, those with sliding windows two.
    """

    hidden: Tensor
    values: tuple[Any, ...]
    slots: tuple[tuple[int, ...], ...]
    kinds: bytes


class HuggingFaceLayer(nn.Module):
    """A part of a model; its parameters have the names they have in the model."""

    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__()
        self.blueprint = blueprint

    def _fill(self, path: str, part: nn.Module | None = None) -> None:
        """Give this layer its values, see `Blueprint.fill`."""
        self.blueprint.fill(self, path, part)
        self._built = frozenset(self.state_dict())

    @property
    def num_layers(self) -> int:
        """Return how many layers the model has."""
        parts = self.blueprint.structure
        return 2 + parts.num_blocks + len(parts.closing)

    def exported(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors of this layer, given by name, under the names files have.

        Raises `ModelError` if they are no longer those that transformers knows.
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
                f"export: a layer was changed since it was built, expected the tensors of a "
                f"{kind}, which transformers reads, got {got}; merge adapters into the weights "
                f"(peft's merge_and_unload) and dequantize first, or save a checkpoint instead"
            )

    def companion_files(self, dtype: torch.dtype) -> dict[str, Companion]:
        """Return the files that go with exported weights, by name: their text, or their copy."""
        return self.blueprint.companion_files(dtype)

    def _place(self, path: str, module: nn.Module) -> None:
        """Put a module where the model has it, so that its parameters keep their names."""
        owner: nn.Module = self
        *folders, leaf = path.split(".")
        for folder in folders:
            if folder not in owner._modules:
                owner.add_module(folder, nn.Module())
            owner = owner.get_submodule(folder)
        owner.add_module(leaf, module)


def _change(name: str, tensor: Tensor, known: Tensor | None) -> str:
    """Say what about a tensor transformers would not read as the model's; nothing if it would."""
    if known is None:
        return f"{name}, which the model does not have"
    if tensor.shape != known.shape:
        return f"{name} of shape {list(tensor.shape)} for {list(known.shape)}"
    if tensor.is_floating_point() != known.is_floating_point():
        return f"{name} of {str(tensor.dtype).removeprefix('torch.')}"
    if not tensor.is_meta and type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
        return f"{name} as {type(tensor).__name__}"
    return ""


class HuggingFaceEmbedding(HuggingFaceLayer):
    """From inputs to the first block: the core's own forward, with listeners for blocks.

    Takes token ids [B, S] or images [B, C, H, W], or a dictionary with these and an
    attention_mask [B, S] (1 for tokens, 0 for padding) or position_ids [B, S].
    """

    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__(blueprint)
        parts = blueprint.structure
        self._calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        model = blueprint.model
        blocks = model.get_submodule(parts.blocks)
        listeners = nn.ModuleList(
            Listener(block, self._calls, parts.num_returned) for block in blocks.children()
        )
        instead: dict[int, nn.Module] = {id(blocks): listeners}
        instead |= {id(model.get_submodule(path)): nn.Identity() for path in parts.closing}
        core = blueprint.copied(model.get_submodule(parts.core), instead)
        self._place(parts.core, core)
        self._fill(parts.core)
        # Rotary embeddings whose angles change for good with the first longer sequence.
        self._stretched = stretched(core)

    def forward(self, inputs: Any) -> Boundary:
        """Embed a micro-batch and work out what each block is to be called with."""
        parts, calls = self.blueprint.structure, self._calls
        arguments = parts.inputs | self._named(inputs)
        try:
            with run_as_with_values(arguments[parts.main_input]):
                self.get_submodule(parts.core)(**arguments)
            if self._stretched and not is_valueless(arguments[parts.main_input]):
                self._refuse_stretching()
            found = [Call.of(args, kwargs, "embedding") for args, kwargs in calls]
        finally:
            calls.clear()  # or what a micro-batch made would live till the next
        if tuple(call.form for call in found) != parts.forms:
            raise ModelError(
                f"huggingface: {self.blueprint.kind} calls its blocks otherwise than without "
                f"values, expected {parts.num_blocks} calls of the same form, got {len(found)}; "
                f"give other inputs, or write the model as a sequence of layers"
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
                f"with some of {', '.join(known)}, got {got}; give labels as targets"
            )
        return dict(inputs)


def _boundary(calls: list[Call]) -> Boundary:
    """Collect what the blocks are called with: each value once."""
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
    """Block `index` of the model; the last one returns hidden states alone."""

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
        # Recomputation marks every boundary as in need of a gradient: these are not.
        values = tuple(v.detach() if isinstance(v, Tensor) else v for v in values)
        leaves = [values[slot] for slot in slots[kinds[self.index]]]
        block = self.get_submodule(self._path)
        with run_as_with_values(hidden) if is_valueless(hidden) else nullcontext():
            output = parts.forms[self.index].call(block, hidden, leaves)
        hidden = output[0] if parts.num_returned else output
        if self.index == parts.num_blocks - 1:
            return hidden
        return Boundary(hidden, values, slots, kinds)


@dataclass(frozen=True)
class BlockIndex:
    """Which block; equal to that of a block that costs the same to run, for those who measure."""

    value: int = field(compare=False)
    kind: str

    def __repr__(self) -> str:
        return str(self.value)


class HuggingFaceNorm(HuggingFaceLayer):
    """A module behind the blocks, mostly the last norm: [B, S, H] -> [B, S, H]."""

    def __init__(self, blueprint: Blueprint, path: str) -> None:
        super().__init__(blueprint)
        self._path = path
        module = blueprint.copied(blueprint.model.get_submodule(path))
        self._place(path, module)
        self._fill(path)

    def forward(self, hidden: Tensor) -> Any:
        """Run the module."""
        return self.get_submodule(self._path)(hidden)


class HuggingFaceHead(HuggingFaceLayer):
    """From hidden states to logits: the model's own forward around what its core returned."""

    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__(blueprint)
        model = blueprint.model
        core = model.get_submodule(blueprint.structure.core)
        given = Given(core, blueprint.structure.returned)
        whole = blueprint.copied(model, {id(core): given})
        # What the model has is ours, and under its own names: it is no submodule of this layer.
        self._parameters, self._buffers = whole._parameters, whole._buffers
        self._modules = whole._modules
        self._whole, self._given = (whole,), (given,)
        self._fill("", whole)

    def forward(self, hidden: Tensor) -> Any:
        """Compute logits: [B, S, V] of tokens, [B, classes] of images."""
        (whole,), (given,) = self._whole, self._given
        whole.training = self.training
        given.hidden = hidden
        try:
            return whole(**{self.blueprint.structure.main_input: None}).logits
        finally:
            given.hidden = None
