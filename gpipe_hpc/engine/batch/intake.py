"""The caller's batch on its way to the device, micro-batch by micro-batch."""

from typing import Final

import torch
from torch import Tensor

from gpipe_hpc.comm.device import Device, Stream
from gpipe_hpc.comm.nests import Nest, map_tensors
from gpipe_hpc.engine.astray import refuse_astray
from gpipe_hpc.errors import DataError


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
            return map_tensors(self._here, nest)
        refuse_astray(nest, self._device, "batch", _REMEDY, DataError)
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

    def _here(self, tensor: Tensor) -> Tensor:
        return self._device.bring(_apart(tensor))

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


_REMEDY: Final = "leave a batch on the host, or bring it to that device"


def _apart(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.is_inference() else tensor.detach()
