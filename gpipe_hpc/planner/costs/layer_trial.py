"""Count the cost of one layer by running it on the meta device.

Operations are counted by kind, see `OperationWork`. Activation bytes are those of the
storages that autograd saves in eager mode, without parameters, buffers and the casts that autocast
caches for a whole step.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from gpipe_hpc.device.device import HostDevice
from gpipe_hpc.engine import Home, casting, keeping_casts, version_of
from gpipe_hpc.errors import GpipeError, ModelError
from gpipe_hpc.models import SkipNames, run_layer
from gpipe_hpc.models.remedies import remedy_of
from gpipe_hpc.planner.costs.attention import FusedKernels
from gpipe_hpc.planner.costs.casts import WeightCasts, storage_key
from gpipe_hpc.planner.costs.meta import META, meta_copy
from gpipe_hpc.planner.costs.walk import LayerInput, VisitResult, described
from gpipe_hpc.planner.costs.work import PassWork, WorkCounter
from gpipe_hpc.planner.memory.workspace import Workspace, run_counting
from gpipe_hpc.pytree import map_tensors, tensors_of
from gpipe_hpc.torch_compat import FakeTensor, FakeTensorMode

CPU: Final = torch.device("cpu")
_FIT_LAYER: Final = (
    "make the layer accept the output of the one before it, without reading tensor values"
)
_FIT_LOSS: Final = (
    "correct the loss, without reading tensor values, or choose model and data that match it"
)


class LayerWeight(NamedTuple):
    """A parameter of a layer; `name` is its name within the layer.

    `cast_bytes`: size of its low-precision copy that all micro-batches of a step share.
    """

    name: str
    num_elements: int
    nbytes: int
    is_trained: bool
    cast_bytes: int = 0


class BoundaryBytes(NamedTuple):
    """Bytes of each tensor that crosses a stage boundary for one micro-batch, and of its gradient.

    `gradients`: bytes of the returned gradient of each tensor, 0 if it has none.
    """

    tensors: tuple[int, ...]
    gradients: tuple[int, ...]

    def joined(self, others: Iterable["BoundaryBytes"]) -> "BoundaryBytes":
        """Return the concatenation with other transfers over the same boundary."""
        every = [self, *others]
        return BoundaryBytes(
            tuple(nbytes for each in every for nbytes in each.tensors),
            tuple(nbytes for each in every for nbytes in each.gradients),
        )


class KeptStorages(NamedTuple):
    """Storages of a layer that stay alive until its backward.

    Slots number the storages: first one for each tensor of the input and of popped values, then the
    new ones of the output and of stashed values.

    Attributes:
      inside: bytes of saved storages without a slot.
      slots: the slots of saved storages.
      sizes: bytes of every slot.
      outputs: slot of each output tensor.
      stashes: slots of each stashed value.
    """

    inside: int
    slots: frozenset[int]
    sizes: tuple[int, ...]
    outputs: tuple[int, ...]
    stashes: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class LayerCount:
    """Counted cost of one layer for one micro-batch.

    Attributes:
      weights: parameters and their casts, shared by all micro-batches.
      work: FLOPs and bytes of the forward and backward by kind of operation.
      stashed: bytes of each stashed value.
      state_bytes: bytes of buffers that a forward changes; each micro-batch has its own copy.
      workspace: temporary memory while the layer runs.
    """

    name: str
    weights: tuple[LayerWeight, ...]
    work: PassWork
    kept: KeptStorages
    output: BoundaryBytes
    stashed: tuple[BoundaryBytes, ...] = ()
    state_bytes: int = 0
    workspace: Workspace = field(default_factory=Workspace)

    @property
    def parameters(self) -> int:
        """Return the number of parameter elements of the layer, including tied ones."""
        return sum(weight.num_elements for weight in self.weights)

    @property
    def forward_flops(self) -> int:
        """Return the FLOPs of the forward."""
        return self.work.forward.flops

    @property
    def backward_flops(self) -> int:
        """Return the FLOPs of the backward."""
        return self.work.backward.flops

    @property
    def input_flops(self) -> int:
        """Return the FLOPs of the backward for the input gradient alone."""
        return self.work.of_input.flops

    @property
    def flops(self) -> int:
        """Return the FLOPs of forward plus backward."""
        return self.forward_flops + self.backward_flops

    @property
    def activation_bytes(self) -> int:
        """Return the bytes kept for the backward, including input, output and state."""
        return (
            self.state_bytes
            + self.kept.inside
            + sum(self.kept.sizes[slot] for slot in self.kept.slots)
        )

    @property
    def output_bytes(self) -> int:
        """Return the bytes of the output, which are sent if the layer ends a stage."""
        return sum(self.output.tensors)


class LossLayer(nn.Module):
    """The loss as an additional layer, so that its saved tensors count for the last stage."""

    def __init__(self, loss_fn: Callable[[Any, Any], Any], targets: Any) -> None:
        super().__init__()
        self.loss_fn: Callable[[Any, Any], Any] = (
            meta_copy(loss_fn, "loss") if isinstance(loss_fn, nn.Module) else loss_fn
        )
        self.targets = targets

    def forward(self, output: Any) -> Any:
        """Return the tensor that the backward starts from."""
        value = self.loss_fn(output, self.targets)
        return value[0] if isinstance(value, tuple) else value


@dataclass(frozen=True)
class LayerTrial:
    """One layer on the meta device, and the micro-batch on which its costs are counted.

    `shares_casts`: whether all micro-batches of a step share one copy of a weight in `precision`.
    """

    where: str
    module: nn.Module
    names: SkipNames
    given: LayerInput
    device_type: str
    precision: str = "float32"
    shares_casts: bool = True

    def count(self, name: str) -> VisitResult[LayerCount]:
        """Return the layer's cost, and its output and stashed values as meta tensors."""
        with _counting_device(self.precision, self.module, self.given) as leaves:
            # Clones, because a layer may work in place, which autograd forbids on leaves.
            first, given, again = (LayerInput(*map_tensors(torch.clone, leaves)) for _ in range(3))
            given_tensors = tensors_of(tuple(given))
            cached_casts, fresh_casts = (WeightCasts(self.module.parameters()) for _ in range(2))
            buffer_dicts = _buffer_dicts(self.module)
            buffers = _versions(buffer_dicts)
            try:
                with self._like_a_step(), FusedKernels(self.device_type):
                    if self.precision != "float32" and self.shares_casts:
                        with cached_casts:
                            self._forward(first)
                    with fresh_casts:
                        results, saved, work = self._run(given, _trained(leaves))
                    lasts = [*map(storage_key, (*self.module.parameters(), *self.module.buffers()))]
                    state_bytes = _changed_bytes(buffers, buffer_dicts)
                    # Last: a layer may replace its buffers, and storage keys may be reused.
                    workspace = run_counting(
                        partial(self._forward, again), self.module.parameters()
                    )
            except Exception as error:
                raise self._failed(error) from error
        cast_bytes = cached_casts.kept_bytes(fresh_casts)
        for own in lasts:
            saved.pop(own, None)
        for cast in cached_casts.storages:
            saved.pop(cast, None)
        count = LayerCount(
            name=name,
            weights=tuple(
                LayerWeight(name, p.numel(), p.nbytes, p.requires_grad, cast_bytes[storage_key(p)])
                for name, p in self.module.named_parameters()
            ),
            work=work,
            kept=_kept(saved, given_tensors, results),
            output=crossing(results[0]),
            stashed=tuple(map(crossing, results[1:])),
            state_bytes=state_bytes,
            workspace=workspace,
        )
        return VisitResult(count, *map(as_meta_leaves, (results[0], results[1:])))

    def _like_a_step(self) -> AbstractContextManager[object]:
        return keeping_casts(self.precision, HostDevice()) if self.shares_casts else nullcontext()

    def _forward(self, given: LayerInput) -> list[Any]:
        """Run the layer; return its output and stashed values."""
        stashed = dict(zip(self.names.pops, given.popped, strict=True))
        with casting(self.precision, HostDevice(), shared=self.shares_casts):
            output = run_layer(self.module, self.names, given.value, stashed, self.where)
        return [output, *(stashed[name] for name in self.names.stashes)]

    def _run(
        self, given: LayerInput, wanted: list[Tensor]
    ) -> tuple[list[Any], dict[int, int], PassWork]:
        """Run forward and backward; return results, saved bytes by storage, and the work."""
        saved: dict[int, Tensor] = {}

        def keep(tensor: Tensor) -> Tensor:
            saved[storage_key(tensor)] = tensor  # kept alive, so that its key is not reused
            return tensor

        with WorkCounter() as counter:
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                results = self._forward(given)
            forward = counter.so_far()
            ends = _trained(results)
            seeds = [torch.ones_like(end) for end in ends]
            ready = counter.so_far()
            can_split = not (ends and wanted) or _can_split(ends, wanted, seeds)
            before = counter.so_far()
            if ends:
                torch.autograd.backward(ends, seeds)
            backward = counter.so_far().without(before)
            of_input = before.without(ready) if can_split else backward
        sizes = {key: tensor.untyped_storage().nbytes() for key, tensor in saved.items()}
        return results, sizes, PassWork(forward, backward, of_input)

    def _failed(self, error: Exception) -> ModelError:
        if isinstance(self.module, LossLayer):
            return ModelError(
                f"loss: cannot be counted: it failed on the meta device, where tensors have shapes "
                f"but no values, with the last layer's output {described(self.given.value)} and "
                f"targets {described(self.module.targets)}: {_error_and_remedy(error, _FIT_LOSS)}"
            )
        return ModelError(
            f"{self.where}: cannot be counted: it failed on the meta device, where tensors have "
            f"shapes but no values, with input {described(self.given)}: "
            f"{_error_and_remedy(error, _FIT_LAYER)}"
        )


def _error_and_remedy(error: Exception, otherwise: str) -> str:
    """Return the first line of an error with a remedy; errors of gpipe_hpc are not changed."""
    if isinstance(error, GpipeError):
        return str(error)
    shown = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {shown[0]}; {remedy_of(error) or otherwise}"


@contextmanager
def _counting_device(precision: str, module: nn.Module, given: LayerInput) -> Iterator[Any]:
    """Yield leaves with the shapes of the inputs, on a device on which autocast works.

    Autocast ignores meta tensors, so under reduced precision the leaves and parameters are fake CPU
    tensors.
    """
    leaves = map_tensors(meta_leaf, tuple(given))
    if precision == "float32":
        yield leaves
        return
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def placed(tensor: Tensor) -> Tensor:
        fake: Tensor = FakeTensor(mode, tensor.detach(), CPU)
        return fake.requires_grad_(tensor.requires_grad)

    parameters: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, own in part.named_parameters(recurse=False, remove_duplicate=False):
            fake = nn.Parameter(placed(own), own.requires_grad)
            part._parameters[name] = parameters.setdefault(id(own), fake)
        for name, buffer in part.named_buffers(recurse=False, remove_duplicate=False):
            part._buffers[name] = placed(buffer)
    if isinstance(module, LossLayer):
        module.targets = map_tensors(placed, module.targets)
    leaves = map_tensors(
        placed, leaves
    )  # outside the mode: inside it, torch before 2.9 cannot make them
    with mode:
        yield leaves


def _buffer_dicts(module: nn.Module) -> list[Home]:
    """Return the buffer dicts of submodules that a forward may change, without BatchNorm."""
    plain = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    parts = module.modules()
    return [part._buffers for part in parts if type(part) not in plain and part._buffers]


def _versions(buffer_dicts: list[Home]) -> dict[tuple[int, str], tuple[Tensor, int]]:
    return {
        (place, name): (buffer, version_of(buffer))
        for place, home in enumerate(buffer_dicts)
        for name, buffer in home.items()
        if buffer is not None
    }


def _changed_bytes(
    before: Mapping[tuple[int, str], tuple[Tensor, int]], buffer_dicts: list[Home]
) -> int:
    """Return the bytes of the buffers that were changed or replaced, each storage once."""
    after = _versions(buffer_dicts)
    moved = [
        buffer
        for place, (buffer, version) in before.items()
        if place not in after or after[place][0] is not buffer or after[place][1] != version
    ]
    return sum({id(buffer): buffer.nbytes for buffer in moved}.values())


def _kept(saved: Mapping[int, int], inputs: list[Tensor], results: list[Any]) -> KeptStorages:
    """Number the storages of inputs and results, and return which of them stay alive."""
    slot_of: dict[int, int] = {}
    sizes: list[int] = []
    for tensor in inputs:
        slot_of[storage_key(tensor)] = len(sizes)
        sizes.append(tensor.untyped_storage().nbytes())
    for tensor in tensors_of(results):
        if slot_of.setdefault(storage_key(tensor), len(sizes)) == len(sizes):
            sizes.append(tensor.untyped_storage().nbytes())
    slots = [tuple(slot_of[storage_key(tensor)] for tensor in tensors_of(each)) for each in results]
    return KeptStorages(
        inside=sum(nbytes for key, nbytes in saved.items() if key not in slot_of),
        slots=frozenset(slot_of[key] for key in saved if key in slot_of),
        sizes=tuple(sizes),
        outputs=slots[0],
        stashes=tuple(slots[1:]),
    )


def crossing(nest: Any) -> BoundaryBytes:
    """Return the bytes of the tensors of a nested value and of their gradients."""
    tensors = tensors_of(nest)
    return BoundaryBytes(
        tuple(tensor.nbytes for tensor in tensors),
        tuple(tensor.nbytes * tensor.requires_grad for tensor in tensors),
    )


def as_meta_leaves(nest: Any) -> Any:
    """Return a nested value with each tensor replaced by a leaf on the meta device."""
    return map_tensors(meta_leaf, nest)


def meta_leaf(tensor: Tensor) -> Tensor:
    """Return a leaf of the same shape and strides on the meta device, with its own storage."""
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)
    return empty.requires_grad_(tensor.requires_grad)


def _can_split(ends: list[Tensor], wanted: list[Tensor], seeds: list[Tensor]) -> bool:
    """Return whether the layer supports a backward for the inputs alone, by running one.

    A reentrant `torch.utils.checkpoint` does not: its backward cannot be split.
    """
    try:
        torch.autograd.grad(ends, wanted, seeds, retain_graph=True, allow_unused=True)
    except RuntimeError as error:
        if "use_reentrant" not in str(error):
            raise
        return False
    return True


def _trained(nest: Any) -> list[Tensor]:
    return [tensor for tensor in tensors_of(nest) if tensor.requires_grad]
