"""What the peak of memory means that a rank tells."""

from gpipe_hpc.device.device import Device


def peak_meaning(device: Device) -> str:
    """Return what is counted: tensors on an accelerator, the whole process on a CPU."""
    if device.is_accelerator:
        return "memory of the rank's tensors on its device at the fullest"
    return "resident memory of the rank's process at its fullest, interpreter and libraries in it"
