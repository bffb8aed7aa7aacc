"""What one run of a table works on, and how the caller's batch comes to the device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from gpipe_hpc.batches import Pieces, Whole
from gpipe_hpc.comm.net.pickling import register_boundary_type
from gpipe_hpc.comm.transport.base import Message
from gpipe_hpc.device.device import Device, Stream
from gpipe_hpc.engine.inputs import refuse_astray
from gpipe_hpc.engine.layer_runner import LayerKey
from gpipe_hpc.errors import DataError
from gpipe_hpc.models import LossFunction, microbatch_keys
from gpipe_hpc.pytree import Nest, map_tensors

register_boundary_type(Whole)

_ASTRAY: Final = "leave a batch on the host, or bring it to that device"


class Intake:
    """Brings micro-batches to a device, beside what it computes.

    Each is first copied into pinned memory of our own. So the host does not wait for the device, as
    it would with memory that is not pinned, and what the caller's memory held is safe when `bring`
    returns: that of a pinned batch may be written again as soon as the step has returned.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stream: Stream | None = None  # once there is something to bring

    def bring(self, nest: Nest) -> Nest:
        """Return a nest whose tensors lie on the device and belong to no graph.

        Raises DataError for a tensor of another accelerator.
        """
        if not self._device.is_accelerator:
            if isinstance(nest, torch.Tensor) and nest.device == self._device.torch:
                return nest.clone() if nest.is_inference() else nest.detach()
            return map_tensors(lambda tensor: self._device.bring(_apart(tensor)), nest)
        refuse_astray(nest, self._device, "batch", _ASTRAY, DataError)
        arriving: list[Tensor] = []

        def brought(tensor: Tensor) -> Tensor:
            if self._device.holds(tensor):
                return _apart(tensor)
            if tensor.layout is not torch.strided:
                return self._device.bring(_apart(tensor))
            own = self._copied(tensor)
            arriving.append(own)
            return own

        there = map_tensors(brought, nest)
        if arriving:
            assert self._stream is not None, "something was copied on it"
            current = self._device.current_stream()
            current.wait_event(self._stream.record_event())
            for tensor in arriving:
                self._device.lend(tensor, current)
        return there

    def _copied(self, tensor: Tensor) -> Tensor:
        """Return a copy on the device, of the strides that torch would give it, on its way."""
        strides = torch.empty_like(tensor, device="meta").stride()
        staged = self._device.pinned((tensor.numel(),), tensor.dtype)
        staged.as_strided(tensor.shape, strides).copy_(tensor.detach())
        if self._stream is None:
            self._stream = self._device.stream()
        with self._device.on(self._stream):
            own = self._device.empty((tensor.numel(),), tensor.dtype)
            self._device.bring_into(own, staged)
            return own.as_strided(tensor.shape, strides)


@dataclass(frozen=True)
class Run:
    """What a run works on; None where this rank needs none.

    `lane` keeps apart what training and evaluation expect of a channel. `keys` gives, for a
    micro-batch of this replica, the key of each layer. `inputs`, `targets`: by micro-batch.
    `num_layers`: of the whole model; behind them the loss has a key, too. `loss_fn`: None if the
    outputs themselves are wanted. `seed`: the gradient that backward starts from, a scalar; None
    for 1. `step`: how many were done before. `digests`: of what the caller has given, if due.
    `is_cut`: a batch is trained on in several pieces.
    """

    lane: str
    keys: Callable[[int], LayerKey]
    num_layers: int
    inputs: Pieces | None = None
    targets: Pieces | None = None
    loss_fn: LossFunction | None = None
    seed: torch.Tensor | None = None
    step: int = 0
    digests: Sequence[torch.Tensor | float] = ()
    is_cut: bool = False

    def input(self, microbatch: int, intake: Intake) -> Message:
        """Return what the first stage is given of a micro-batch."""
        assert self.inputs is not None, "checked before the run"
        nests, sizes = self.inputs
        return Message(intake.bring(nests[microbatch]), sizes[microbatch])

    def target(self, microbatch: int, num_samples: int, intake: Intake) -> Nest:
        """Return what the loss of a micro-batch is given; DataError if it is of another size."""
        if self.targets is None:
            return None
        nests, sizes = self.targets
        if sizes[microbatch] != num_samples:
            known = f" ({sum(self.inputs[1])} inputs against {sum(sizes)})" if self.inputs else ""
            raise DataError(
                f"targets: expected {num_samples} samples in micro-batch {microbatch}, as its "
                f"inputs have, got {sizes[microbatch]}{known}; give as many targets as inputs, of "
                f"the same slice of the batch on every rank (a list of tensors counts as several "
                f"of all samples: stack them, or mark each of them, [gpipe_hpc.whole(x) for ...])"
            )
        return intake.bring(nests[microbatch])

    def gradient_of(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the gradient that a backward starts from at a loss.

        A new one each time: a loss of the user's may write into what its backward is given.
        """
        if self.seed is None:
            return torch.ones_like(loss)
        return self.seed.to(loss.dtype, copy=True)


def random_keys(
    seed: int, step: int, microbatches: range, layers: Sequence[int]
) -> Callable[[int], LayerKey]:
    """Return the published keys of a step: of `layers`, for `microbatches` of the global batch."""
    keys = microbatch_keys(seed, step, microbatches, layers)
    return [of_layer.__getitem__ for of_layer in keys].__getitem__


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone() if tensor.is_inference() else tensor.detach()
