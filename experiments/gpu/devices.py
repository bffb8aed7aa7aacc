"""The device that a part runs on, by the package's own means."""

import torch

from gpipe_hpc.device.device import Accelerator, Device, HostDevice


def the_device(kind: str, index: int = 0) -> Device:
    """Return a device of a kind, ``cpu`` or what torch calls its accelerator, in use."""
    if kind == "cpu":
        return HostDevice()
    device = Accelerator(torch.device(kind, index))
    device.use()
    return device
