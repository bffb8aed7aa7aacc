"""Tensors that lie on another accelerator than the one on which their rank computes."""

from torch import Tensor

from gpipe_hpc.device.device import Device
from gpipe_hpc.errors import GpipeError
from gpipe_hpc.pytree import Nest, tensors_of


def refuse_astray(
    nest: Nest, device: Device, where: str, remedy: str, error: type[GpipeError]
) -> None:
    """Raise `error` where a tensor of a nest lies neither on a rank's device nor on the host.

    What was queued for one device knows nothing of another's streams, and its kernels do not reach
    the other's memory: torch would say so somewhere later, or copy without a word.
    """
    for tensor in tensors_of(nest):
        if device.is_astray(tensor):
            raise error(
                f"{where}: expected tensors on {device.torch}, where this rank computes, or on the "
                f"host, got one of shape {_shape(tensor)} on {tensor.device}; {remedy}"
            )


def _shape(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))
