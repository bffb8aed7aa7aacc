"""One layer run on the meta device, to count what it costs: shapes alone, no values.

What it computes is counted by kind, see `Work`. Activation bytes are those of
the storages that autograd keeps in eager mode, parameters and buffers left out, and what autocast
keeps of them for a whole step.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from gpipe_hpc.device.device import HostDevice
from gpipe_hpc.engine.buffers import Home, version_of
from gpipe_hpc.engine.precision import casting, keeping_casts
from gpipe_hpc.errors import GpipeError, ModelError
from gpipe_hpc.models import SkipNames, run_layer
from gpipe_hpc.models.remedies import remedy_of
from gpipe_hpc.planner.costs.attention import FusedKernels
from gpipe_hpc.planner.costs.casts import WeightCasts, storage_key
from gpipe_hpc.planner.costs.meta import META, meta_copy
from gpipe_hpc.planner.costs.walk import Given, Passed, described
from gpipe_hpc.planner.costs.work import Passes, WorkCounter
from gpipe_hpc.planner.memory.workspace import Workspace, run_counting
from gpipe_hpc.pytree import map_tensors, tensors_of
from gpipe_hpc.torch_compat import FakeTensor, FakeTensorMode

CPU: Final = torch.device("cpu")
_FIT_LAYER: Final = (
    "make the layer take what the one before it gives, without reading values of tensors"
)
_FIT_LOSS: Final = (
    "correct the loss, without reading values of tensors, or choose model and data that fit it"
)


class Weight(NamedTuple):
    """A parameter of a layer, by its name within.

    `cast_bytes`: of its copy in a lower precision that all micro-batches of a step share.
    """

    name: str
    num_elements: int
    nbytes: int
    is_trained: bool
    cast_bytes: int = 0


class Crossing(NamedTuple):
    """What a boundary carries for one micro-batch, tensor by tensor, in bytes.

    `gradients`: those of the tensors that a gradient comes back for, 0 for the others.
    """

    tensors: tuple[int, ...]
    gradients: tuple[int, ...]

    def joined(self, others: Iterable["Crossing"]) -> "Crossing":
        """Return this and what crosses along with it."""
        every = [self, *others]
        return Crossing(
            tuple(nbytes for each in every for nbytes in each.tensors),
            tuple(nbytes for each in every for nbytes in each.gradients),
        )


class Kept(NamedTuple):
    """Which storages of a layer live on until its backward.

    Slots number storages: first one for each tensor of the input and of what is popped, then the
    new ones of the output and of what is stashed. `outputs` has the slot of each tensor of the
    output, `stashes` of each stash, `sizes` the bytes of every slot, `slots` those that are kept;
    `inside` is the bytes of all else that is.
    """

    inside: int
    slots: frozenset[int]
    sizes: tuple[int, ...]
    outputs: tuple[int, ...]
    stashes: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class LayerCount:
    """What one layer costs for one micro-batch, alone; `weights` and their casts for all of them.

    `work`: of its passes, by kind; `input_flops` is the part of `backward_flops` that the gradient
    of the input takes. `stashed`
    is what the layer stashes, one for each of its names. `state_bytes` is of the buffers that a
    forward changes: each micro-batch has a copy of its own. `workspace` is what lives while the
    layer runs.
    """

    name: str
    weights: tuple[Weight, ...]
    work: Passes
    kept: Kept
    output: Crossing
    stashed: tuple[Crossing, ...] = ()
    state_bytes: int = 0
    workspace: Workspace = field(default_factory=Workspace)

    @property
    def parameters(self) -> int:
        """Return the number of parameters of the layer, tied ones too."""
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
        """Return the FLOPs of the gradient of the input alone."""
        return self.work.of_input.flops

    @property
    def flops(self) -> int:
        """Return the FLOPs of forward plus backward."""
        return self.forward_flops + self.backward_flops

    @property
    def activation_bytes(self) -> int:
        """Return what the forward keeps for the backward, of input, output and state too."""
        return (
            self.state_bytes
            + self.kept.inside
            + sum(self.kept.sizes[slot] for slot in self.kept.slots)
        )

    @property
    def output_bytes(self) -> int:
        """Return what would cross a boundary behind the layer, skips left out."""
        return sum(self.output.tensors)


class Loss(nn.Module):
    """The loss as one more layer: what it keeps lives with the last stage."""

    def __init__(self, loss_fn: Callable[[Any, Any], Any], targets: Any) -> None:
        super().__init__()
        self.loss_fn: Callable[[Any, Any], Any] = (
            meta_copy(loss_fn, "loss") if isinstance(loss_fn, nn.Module) else loss_fn
        )
        self.targets = targets

    def forward(self, output: Any) -> Any:
        """Return what backward starts from."""
        value = self.loss_fn(output, self.targets)
        return value[0] if isinstance(value, tuple) else value


@dataclass(frozen=True)
class Trial:
    """One layer on the meta device and the micro-batch it is counted for.

    `shares_casts`: whether all micro-batches of a step use one copy of a weight in `precision`.
    """

    where: str
    module: nn.Module
    names: SkipNames
    given: Given
    device_type: str
    precision: str = "float32"
    shares_casts: bool = True

    def count(self, name: str) -> Passed[LayerCount]:
        """Return the layer's cost, and what it gives to layers behind it: shapes without values."""
        with _counting_device(self.precision, self.module, self.given) as leaves:
            # Clones, for a layer may work in place: on a leaf that is forbidden.
            first, given, again = (Given(*map_tensors(torch.clone, leaves)) for _ in range(3))
            given_tensors = tensors_of(tuple(given))
            lasting, anew = (WeightCasts(self.module.parameters()) for _ in range(2))
            homes = _homes(self.module)
            buffers = _versions(homes)
            try:
                with self._like_a_step(), FusedKernels(self.device_type):
                    if self.precision != "float32" and self.shares_casts:
                        with lasting:
                            self._forward(first)
                    with anew:
                        results, saved, work = self._run(given, _trained(leaves))
                    lasts = [*map(storage_key, (*self.module.parameters(), *self.module.buffers()))]
                    state_bytes = _moved_bytes(buffers, homes)
                    # Last: a layer may replace its buffers, and storages have names of dead ones.
                    workspace = run_counting(
                        partial(self._forward, again), self.module.parameters()
                    )
            except Exception as error:
                raise self._failed(error) from error
        cast_bytes = lasting.kept_bytes(anew)
        for own in lasts:
            saved.pop(own, None)
        for cast in lasting.storages:
            saved.pop(cast, None)
        count = LayerCount(
            name=name,
            weights=tuple(
                Weight(name, p.numel(), p.nbytes, p.requires_grad, cast_bytes[storage_key(p)])
                for name, p in self.module.named_parameters()
            ),
            work=work,
            kept=_kept(saved, given_tensors, results),
            output=crossing(results[0]),
            stashed=tuple(map(crossing, results[1:])),
            state_bytes=state_bytes,
            workspace=workspace,
        )
        return Passed(count, *map(forgotten, (results[0], results[1:])))

    def _like_a_step(self) -> AbstractContextManager[object]:
        return keeping_casts(self.precision, HostDevice()) if self.shares_casts else nullcontext()

    def _forward(self, given: Given) -> list[Any]:
        """Return output and stashes."""
        stashed = dict(zip(self.names.pops, given.popped, strict=True))
        with casting(self.precision, HostDevice(), shared=self.shares_casts):
            output = run_layer(self.module, self.names, given.value, stashed, self.where)
        return [output, *(stashed[name] for name in self.names.stashes)]

    def _run(self, given: Given, wanted: list[Tensor]) -> tuple[list[Any], dict[int, int], Passes]:
        """Return output and stashes, the bytes of saved storages, and the work of F, B and I."""
        saved: dict[int, Tensor] = {}

        def keep(tensor: Tensor) -> Tensor:
            saved[storage_key(tensor)] = tensor  # held, so that no other storage takes its place
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
        return results, sizes, Passes(forward, backward, of_input)

    def _failed(self, error: Exception) -> ModelError:
        if isinstance(self.module, Loss):
            return ModelError(
                f"loss: cannot be counted, expected it to run on the meta device, where tensors "
                f"have shapes but no values, on the last layer's output "
                f"{described(self.given.value)} and targets {described(self.module.targets)}, got "
                f"{_said(error, _FIT_LOSS)}"
            )
        return ModelError(
            f"{self.where}: cannot be counted, expected it to run on the meta device, where "
            f"tensors have shapes but no values, on {described(self.given)}, got "
            f"{_said(error, _FIT_LAYER)}"
        )


def _said(error: Exception, otherwise: str) -> str:
    """Return the first line of an error and what to do; messages of ours are as they are."""
    if isinstance(error, GpipeError):
        return str(error)
    shown = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {shown[0]}; {remedy_of(error) or otherwise}"


@contextmanager
def _counting_device(precision: str, module: nn.Module, given: Given) -> Iterator[Any]:
    """Yield leaves like what is given, as a trial takes them; autocast passes meta tensors by.

    Under a reduced precision they, and the parameters, claim to be on the CPU.
    """
    leaves = map_tensors(fresh, tuple(given))
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
    if isinstance(module, Loss):
        module.targets = map_tensors(placed, module.targets)
    leaves = map_tensors(placed, leaves)  # before torch 2.9, within the mode they cannot be made
    with mode:
        yield leaves


def _homes(module: nn.Module) -> list[Home]:
    """Return where the buffers are that a forward may change: not those of BatchNorm layers."""
    plain = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    parts = module.modules()
    return [part._buffers for part in parts if type(part) not in plain and part._buffers]


def _versions(homes: list[Home]) -> dict[tuple[int, str], tuple[Tensor, int]]:
    return {
        (place, name): (buffer, version_of(buffer))
        for place, home in enumerate(homes)
        for name, buffer in home.items()
        if buffer is not None
    }


def _moved_bytes(before: Mapping[tuple[int, str], tuple[Tensor, int]], homes: list[Home]) -> int:
    """Return the bytes of the buffers that are others now, each storage once."""
    after = _versions(homes)
    moved = [
        buffer
        for place, (buffer, version) in before.items()
        if place not in after or after[place][0] is not buffer or after[place][1] != version
    ]
    return sum({id(buffer): buffer.nbytes for buffer in moved}.values())


def _kept(saved: Mapping[int, int], inputs: list[Tensor], results: list[Any]) -> Kept:
    """Number the storages of inputs and results, and tell which of them live on."""
    slot_of: dict[int, int] = {}
    sizes: list[int] = []
    for tensor in inputs:
        slot_of[storage_key(tensor)] = len(sizes)
        sizes.append(tensor.untyped_storage().nbytes())
    for tensor in tensors_of(results):
        if slot_of.setdefault(storage_key(tensor), len(sizes)) == len(sizes):
            sizes.append(tensor.untyped_storage().nbytes())
    slots = [tuple(slot_of[storage_key(tensor)] for tensor in tensors_of(each)) for each in results]
    return Kept(
        inside=sum(nbytes for key, nbytes in saved.items() if key not in slot_of),
        slots=frozenset(slot_of[key] for key in saved if key in slot_of),
        sizes=tuple(sizes),
        outputs=slots[0],
        stashes=tuple(slots[1:]),
    )


def crossing(nest: Any) -> Crossing:
    """Return the bytes of a nest's tensors and of their gradients."""
    tensors = tensors_of(nest)
    return Crossing(
        tuple(tensor.nbytes for tensor in tensors),
        tuple(tensor.nbytes * tensor.requires_grad for tensor in tensors),
    )


def forgotten(nest: Any) -> Any:
    """Return a nest of the same structure, each tensor a leaf without values."""
    return map_tensors(fresh, nest)


def fresh(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape in a storage of its own, a leaf of its own graph."""
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)
    return empty.requires_grad_(tensor.requires_grad)


def _can_split(ends: list[Tensor], wanted: list[Tensor], seeds: list[Tensor]) -> bool:
    """Run the backward of the input alone; say whether there is one.

    A reentrant `torch.utils.checkpoint` knows no such thing: its backward is one piece.
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
