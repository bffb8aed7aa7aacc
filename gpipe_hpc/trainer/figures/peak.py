"""Meaning of the reported peak memory."""

from gpipe_hpc.device.device import Device


def peak_meaning(device: Device) -> str:
    """Return a description of the peak: tensors on an accelerator, the whole process on a CPU."""
    if device.is_accelerator:
        return "peak memory of the rank's tensors on its device"
    return "peak resident memory of the rank's process, including interpreter and libraries"
