"""Count what layers cost without running them: shapes alone, on the meta device.

FLOPs are those of matrix products, convolutions and attention, 2 for a multiplication with its
addition; what is done element by element costs bandwidth, not FLOPs. Activation bytes are those of
the storages that autograd keeps in eager mode, parameters and buffers left out.
"""

import copy
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from gpipe_hpc.errors import ModelError
from gpipe_hpc.models import Layer, LayerSpec, Tie, build_layer, find_ties, layer_name
from gpipe_hpc.planning.attention import FLOP_FORMULAS, FusedKernels

META: Final = torch.device("meta")


class Weight(NamedTuple):
    """A parameter of a layer, by its name within."""

    name: str
    num_elements: int
    nbytes: int
    is_trained: bool


class Crossing(NamedTuple):
    """What a boundary carries for one micro-batch, tensor by tensor, in bytes.

    `gradients`: those of the tensors that a gradient comes back for, 0 for the others.
    """

    tensors: tuple[int, ...]
    gradients: tuple[int, ...]


class Kept(NamedTuple):
    """Which storages of a layer live on until its backward.

    Slots number storages: first one for each tensor of the input, then the new ones of the output.
    `outputs` has the slot of each tensor of the output, `sizes` the bytes of every slot, `slots`
    those that are kept; `inside` is the bytes of all else that is.
    """

    inside: int
    slots: frozenset[int]
    sizes: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class LayerCount:
    """What one layer costs for one micro-batch, alone.

    `input_flops` is the part of `backward_flops` that the gradient of the input takes.
    """

    name: str
    weights: tuple[Weight, ...]
    forward_flops: int
    backward_flops: int
    input_flops: int
    kept: Kept
    output: Crossing

    @property
    def parameters(self) -> int:
        """Return the number of parameters of the layer, tied ones too."""
        return sum(weight.num_elements for weight in self.weights)

    @property
    def flops(self) -> int:
        """Return the FLOPs of forward plus backward."""
        return self.forward_flops + self.backward_flops

    @property
    def activation_bytes(self) -> int:
        """Return what the forward keeps for the backward, of input and output too."""
        return self.kept.inside + sum(self.kept.sizes[slot] for slot in self.kept.slots)

    @property
    def output_bytes(self) -> int:
        """Return what would cross a boundary behind the layer."""
        return sum(self.output.tensors)


@dataclass(frozen=True)
class ModelCount:
    """The layers of a model, the loss behind them if it was counted, and what they share."""

    inputs: Crossing
    layers: tuple[LayerCount, ...]
    loss: LayerCount | None
    ties: tuple[Tie, ...]

    def weights(self, layers: Iterable[int]) -> list[Weight]:
        """Return the parameters of some layers, those tied among them once."""
        tied = {place: tie.name for tie in self.ties for place in tie.places}
        found = {
            tied.get((index, weight.name), (index, weight.name)): weight
            for index in layers
            for weight in self.layers[index].weights
        }
        return list(found.values())

    @property
    def parameters(self) -> int:
        """Return the number of parameters of the model, tied ones once."""
        return sum(weight.num_elements for weight in self.weights(range(len(self.layers))))


def count_model(
    layers: Sequence[Layer],
    inputs: Any,
    targets: Any = None,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    *,
    device_type: str = "cpu",
) -> ModelCount:
    """Count every layer, and the loss, for a micro-batch of the structure of `inputs`.

    `inputs` and `targets` are nests of tensors, best on the meta device: only their shapes count.
    One layer at a time is built, without allocating; equal specs on inputs of equal structure are
    counted once. `device_type`, cpu or cuda, says which kernels to expect. Modules that come
    built stay as they are. Raises `ModelError`, naming the layer, for one that does not run so.
    """
    first = value = _forgotten(inputs)
    known: dict[Hashable, list[tuple[LayerSpec, LayerCount, Any]]] = {}
    counts: list[LayerCount] = []
    for index, layer in enumerate(layers):
        alike = known.setdefault(_structure(value), [])
        found = next(((cost, out) for spec, cost, out in alike if spec == layer), None)
        if found is None:
            where = f"layers.{index} ({layer_name(layer)})"
            module = _meta_layer(layer, index)
            found = _Trial(where, layer_name(layer), module, value, device_type).count()
            if isinstance(layer, LayerSpec):
                alike.append((layer, *found))
        cost, value = found
        counts.append(cost)
    loss = None
    if loss_fn is not None:
        ending = _Loss(loss_fn, _forgotten(targets))
        loss, _ = _Trial("loss", "loss", ending, value, device_type).count()
    return ModelCount(_crossing(first), tuple(counts), loss, tuple(find_ties(layers)))


class _Loss(nn.Module):
    """The loss as one more layer: what it keeps lives with the last stage."""

    def __init__(self, loss_fn: Callable[[Any, Any], Any], targets: Any) -> None:
        super().__init__()
        self.loss_fn, self.targets = loss_fn, targets

    def forward(self, output: Any) -> Any:
        value = self.loss_fn(output, self.targets)
        return value[0] if isinstance(value, tuple) else value


@dataclass(frozen=True)
class _Trial:
    """One layer on the meta device and the micro-batch it is counted for."""

    where: str
    name: str
    module: nn.Module
    value: Any
    device_type: str

    def count(self) -> tuple[LayerCount, Any]:
        """Return the layer's cost, and its output for the layer behind it."""
        leaves = pytree.tree_map(_fresh, self.value)
        # Clones, for a layer may work in place: on a leaf that is forbidden.
        given = pytree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, leaves)
        try:
            given_tensors = _tensors(given)
            output, saved, flops = self._run(given, _trained(leaves))
        except Exception as error:
            shown = str(error).strip().splitlines() or [""]
            raise ModelError(
                f"{self.where}: cannot be counted, expected it to run on the meta device, where "
                f"tensors have shapes but no values, on {_describe(self.value)}, got "
                f"{type(error).__name__}: {shown[0]}; make the layer take what the one before it "
                f"gives, without reading values of tensors"
            ) from error
        for own in (*self.module.parameters(), *self.module.buffers()):
            saved.pop(_storage(own), None)
        weights = tuple(
            Weight(name, p.numel(), p.nbytes, p.requires_grad)
            for name, p in self.module.named_parameters()
        )
        forward, of_input, backward = flops
        kept = _kept(saved, given_tensors, _tensors(output))
        found = LayerCount(self.name, weights, forward, backward, of_input, kept, _crossing(output))
        return found, _forgotten(output)

    def _run(
        self, given: Any, wanted: list[Tensor]
    ) -> tuple[Any, dict[int, int], tuple[int, int, int]]:
        """Return the output, the bytes of saved storages, and the FLOPs of F, I and B."""
        saved: dict[int, Tensor] = {}

        def keep(tensor: Tensor) -> Tensor:
            saved[_storage(tensor)] = tensor  # held, so that no other storage takes its place
            return tensor

        counter = FlopCounterMode(display=False, custom_mapping=dict(FLOP_FORMULAS))
        with counter, FusedKernels(self.device_type):
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                output = self.module(given)
            forward = counter.get_total_flops()
            ends = _trained(output)
            seeds = [torch.ones_like(end) for end in ends]
            if ends and wanted:
                torch.autograd.grad(ends, wanted, seeds, retain_graph=True, allow_unused=True)
            of_input = counter.get_total_flops() - forward
            if ends:
                torch.autograd.backward(ends, seeds)
            backward = counter.get_total_flops() - forward - of_input
        sizes = {key: tensor.untyped_storage().nbytes() for key, tensor in saved.items()}
        return output, sizes, (forward, of_input, backward)


def _meta_layer(layer: Layer, index: int) -> nn.Module:
    """Return a layer on the meta device; one that comes built is copied, without its values."""
    if isinstance(layer, LayerSpec):
        try:
            return build_layer(layer, index=index, seed=0, device=META)
        except ModelError:
            # Some factories read values of tensors. One real layer is still far from the model,
            # and a true fault is raised again.
            layer = build_layer(layer, index=index, seed=0)
    memo: dict[int, Any] = {id(buffer): buffer.to(META) for buffer in layer.buffers()}
    for parameter in layer.parameters():
        empty = nn.Parameter(torch.empty_like(parameter, device=META), parameter.requires_grad)
        memo[id(parameter)] = empty
    try:
        return copy.deepcopy(layer, memo)
    except Exception as error:
        raise ModelError(
            f"layers.{index}: cannot be counted, expected a module that copy.deepcopy copies, got "
            f"{type(error).__name__}: {error}; give a LayerSpec"
        ) from error


def _kept(saved: Mapping[int, int], inputs: list[Tensor], outputs: list[Tensor]) -> Kept:
    slot_of: dict[int, int] = {}
    sizes: list[int] = []
    for tensor in inputs:
        slot_of[_storage(tensor)] = len(sizes)
        sizes.append(tensor.untyped_storage().nbytes())
    for tensor in outputs:
        if slot_of.setdefault(_storage(tensor), len(sizes)) == len(sizes):
            sizes.append(tensor.untyped_storage().nbytes())
    return Kept(
        inside=sum(nbytes for key, nbytes in saved.items() if key not in slot_of),
        slots=frozenset(slot_of[key] for key in saved if key in slot_of),
        sizes=tuple(sizes),
        outputs=tuple(slot_of[_storage(tensor)] for tensor in outputs),
    )


def _crossing(nest: Any) -> Crossing:
    tensors = _tensors(nest)
    return Crossing(
        tuple(tensor.nbytes for tensor in tensors),
        tuple(tensor.nbytes * tensor.requires_grad for tensor in tensors),
    )


def _structure(value: Any) -> Hashable:
    """Return what decides the cost of running on `value`: its structure, not its numbers."""
    leaves, tree = pytree.tree_flatten(value)
    described = tuple(
        (tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad)
        if isinstance(leaf, Tensor)
        else (type(leaf), repr(leaf))
        for leaf in leaves
    )
    return str(tree), described


def _describe(value: Any) -> str:
    shown = (f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in _tensors(value))
    return ", ".join(shown) or "no tensors"


def _storage(tensor: Tensor) -> int:
    # On the meta device no storage has an address; its object has one.
    return int(tensor.untyped_storage()._cdata)


def _tensors(nest: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(nest) if isinstance(leaf, Tensor)]


def _trained(nest: Any) -> list[Tensor]:
    return [tensor for tensor in _tensors(nest) if tensor.requires_grad]


def _forgotten(nest: Any) -> Any:
    return pytree.tree_map(_fresh, nest)


def _fresh(leaf: Any) -> Any:
    """Return a tensor of the same shape in a storage of its own, a leaf of its own graph."""
    if not isinstance(leaf, Tensor):
        return leaf
    empty = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=META)
    return empty.requires_grad_(leaf.requires_grad)
