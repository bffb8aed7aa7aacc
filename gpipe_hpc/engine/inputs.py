"""The inputs of a stage: copied to its device, and never written to.

An input may be needed for a recomputation, and its storage may belong to the user or to another
rank, so layers that write in place get copies. The first run of layers always gets copies, which
show whether the layers write.
"""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from gpipe_hpc.comm.transport.aliases import cloned, is_buffer, is_plain, mark_buffer, shared_blocks
from gpipe_hpc.device.device import Device, Stream
from gpipe_hpc.errors import DataError, GpipeError, ModelError
from gpipe_hpc.pytree import Nest, flatten, map_tensors, tensors_of, unflatten

_ASTRAY_BATCH: Final = "leave the batch on the host, or move it to that device"


class State(NamedTuple):
    """The value that a layer gets, and the skip values stashed for later layers, by name."""

    nest: Nest
    stashed: dict[str, Nest]

    def tensors(self) -> list[torch.Tensor]:
        """Return all its tensors, each once."""
        nest, stashed = self
        if stashed:
            return tensors_of((nest, stashed))
        return [nest] if isinstance(nest, torch.Tensor) else tensors_of(nest)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "State":
        """Return a copy, in new containers, in which `function` has replaced each tensor."""
        nest, stashed = self
        if stashed:
            nest, stashed = map_tensors(function, (nest, stashed))
            return State(nest, stashed)
        if isinstance(nest, torch.Tensor):
            return State(function(nest), {})
        return State(map_tensors(function, nest), {})


class Intake:
    """Copies micro-batches to a device, in parallel with its computation.

    Each is first copied into pinned memory. So the host does not wait for the device, and the
    caller may write to a batch as soon as the step returns.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stream: Stream | None = None  # once there is something to copy

    def to_device(self, nest: Nest) -> Nest:
        """Return a nest with all tensors detached and on the device.

        Raises DataError for a tensor of another accelerator.
        """
        if not self._device.is_accelerator:
            if isinstance(nest, torch.Tensor) and nest.device == self._device.torch:
                return nest.clone() if nest.is_inference() else nest.detach()
            return map_tensors(lambda tensor: self._device.to_device(_apart(tensor)), nest)
        refuse_astray(nest, self._device, "batch", _ASTRAY_BATCH, DataError)
        arriving: list[Tensor] = []

        def brought(tensor: Tensor) -> Tensor:
            if self._device.holds(tensor):
                return _apart(tensor)
            if tensor.layout is not torch.strided:
                return self._device.to_device(_apart(tensor))
            own = self._copied(tensor)
            arriving.append(own)
            return own

        there = map_tensors(brought, nest)
        if arriving:
            assert self._stream is not None, "something was copied on it"
            current = self._device.current_stream()
            current.wait_event(self._stream.record_event())
            for tensor in arriving:
                self._device.keep_for_stream(tensor, current)
        return there

    def _copied(self, tensor: Tensor) -> Tensor:
        """Start a copy to the device and return it, with the strides that `Tensor.to` gives."""
        strides = torch.empty_like(tensor, device="meta").stride()
        staged = self._device.pinned((tensor.numel(),), tensor.dtype)
        staged.as_strided(tensor.shape, strides).copy_(tensor.detach())
        if self._stream is None:
            self._stream = self._device.stream()
        with self._device.on(self._stream):
            own = self._device.empty((tensor.numel(),), tensor.dtype)
            self._device.copy_to_device(own, staged)
            return own.as_strided(tensor.shape, strides)


class InputGuard:
    """Prevents or detects writes of consecutive layers into their input, one run at a time.

    `protect` begins a run, `refuse_writes` checks it, and `forget` ends it, also if it failed.

    Args:
        where: The name of the layers in messages.
        first: The index of the first layer.
    """

    def __init__(self, where: str, first: int) -> None:
        self._where, self._first = where, first
        # By training mode (dropout writes in place in one only): whether the layers left their
        # input unchanged in their first run.
        self._leaves_alone: dict[bool, bool] = {}
        self._is_training = self._is_copy = False
        self.forget()

    def forget(self) -> None:
        """Release the tensors of a run."""
        self._tensors: Sequence[Tensor] = ()  # the layers' input, or the bases of its views
        self._versions: Sequence[int] = ()
        self._originals: Sequence[Tensor] = ()  # of copies
        self._buffers: Sequence[int] = ()  # positions of tensors in a buffer of another layer
        self.shares_memory = False
        """Whether tensors are in such a buffer, or overlap."""

    def protect(
        self, given: State, *, has_graph: bool, is_training: bool
    ) -> tuple[Nest, dict[str, Nest]]:
        """Return an input for the layers instead of `given`, and store its versions.

        `given` stays unchanged: its tensors are copied if layers write into them, which the first
        run detects. Its containers are always copied, as a layer may change a dict or list.
        """
        self._is_training, nest = is_training, given.nest
        is_known = self._leaves_alone.get(is_training)
        self._is_copy = not is_known
        if is_known and isinstance(nest, Tensor) and not given.stashed:
            self._tensors, self._versions = (nest,), (nest._version,)
            is_leaf = has_graph and nest.requires_grad and nest.is_leaf
            if is_leaf and nest.layout is torch.strided and not nest.is_nested:
                nest = nest.view_as(nest)  # as `_with_node` does
            return nest, {}
        leaves, tree = flatten(given)
        tensors = given.tensors()
        if is_known:
            # A `grad_fn` for each that requires a gradient: layers register hooks on it.
            own = {id(t): _with_node(t) if has_graph else t for t in tensors}
            self._tensors = tensors
        else:
            copies = cloned(tensors)
            own = {id(tensor): copy for tensor, copy in zip(tensors, copies, strict=True)}
            self._buffers = [place for place, tensor in enumerate(tensors) if is_buffer(tensor)]
            for place in self._buffers:
                mark_buffer(copies[place])  # layers may pass it on
            self._tensors, self._originals = copies, tensors
            self.shares_memory = bool(self._buffers) or (
                len(copies) > 1 and bool(shared_blocks(copies))
            )
        self._versions = [tensor._version for tensor in self._tensors]
        state = unflatten([own.get(id(leaf), leaf) for leaf in leaves], tree)
        return state.nest, state.stashed

    def refuse_writes(self) -> None:
        """Raise ModelError if the layers wrote into an input that was not copied.

        After their first run, store whether they wrote.
        """
        if self._is_copy and self._tensors:
            if self._is_training not in self._leaves_alone:
                writes = bool(self._written()) or self._has_other_values()
                self._leaves_alone[self._is_training] = not writes
            return
        for tensor, version in zip(self._tensors, self._versions, strict=True):
            if tensor._version != version:
                raise ModelError(
                    f"{self._where}: a layer wrote in place into the "
                    f"stage's input in this micro-batch, but not in the first; use inplace=False "
                    f"there, or write in place always"
                )

    def refuse_shared(self, layer: str) -> None:
        """Raise ModelError if `layer` has written into memory that another tensor shares.

        The other tensor is another view in the input, or the buffer of an earlier layer.
        """
        first, written = self._first, self._written()
        source = f"output of layers.{first - 1}" if first else "batch"
        for place in self._buffers:
            if place in written:
                raise ModelError(
                    f"{layer}: wrote in place into tensor {place} of the {source}, which "
                    f"shares memory with a buffer or a frozen parameter of an earlier layer; that "
                    f"layer would not see the write if it were on another stage. Use inplace=False "
                    f"here, or let the earlier layer return a copy (clone)"
                )
        for block in shared_blocks(self._tensors):
            for place in written & block.views.keys():
                others = ", ".join(str(other) for other in block.views if other != place)
                raise ModelError(
                    f"{layer}: wrote in place into tensor {place} of the {source}, which shares "
                    f"memory with tensor {others} of it; if the layer before were on another "
                    f"stage, the write would change only one of them. Use inplace=False here, or "
                    f"let the layer before return separate tensors (clone)"
                )

    def _written(self) -> set[int]:
        """Return the positions of the tensors that were written to."""
        pairs = zip(self._tensors, self._versions, strict=True)
        return {place for place, (tensor, v) in enumerate(pairs) if tensor._version != v}

    def _has_other_values(self) -> bool:
        """Return whether the copies differ from their originals.

        Writes through `.data` or NumPy change no version, so values are compared.
        """
        with torch.no_grad():
            return any(
                type(copy) is Tensor and is_plain(copy) and not _are_equal(copy, original)
                for copy, original in zip(self._tensors, self._originals, strict=True)
            )


def refuse_astray(
    nest: Nest, device: Device, where: str, remedy: str, error: type[GpipeError]
) -> None:
    """Raise `error` for a tensor that is neither on a rank's device nor on the host.

    Work on one device is not ordered with streams of another, and its kernels cannot read the
    other's memory: torch would raise an unclear error later, or copy silently.
    """
    for tensor in tensors_of(nest):
        if device.is_astray(tensor):
            raise error(
                f"{where}: expected tensors on {device.torch}, the device of this rank, or on the "
                f"host, got one of shape {_shape(tensor)} on {tensor.device}; {remedy}"
            )


def _shape(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone() if tensor.is_inference() else tensor.detach()


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one, other) or torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def _with_node(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a leaf that requires a gradient: layers register hooks on its `grad_fn`."""
    has_none = tensor.requires_grad and tensor.is_leaf and is_plain(tensor)
    return tensor.view_as(tensor) if has_none else tensor
