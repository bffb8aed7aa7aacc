"""The device of a part, created as the package does."""

import torch

from gpipe_hpc.device.device import Accelerator, Device, HostDevice


def the_device(kind: str, index: int = 0) -> Device:
    """Return a device of a kind, ``cpu`` or an accelerator of torch, and make it current."""
    if kind == "cpu":
        return HostDevice()
    device = Accelerator(torch.device(kind, index))
    device.use()
    return device
