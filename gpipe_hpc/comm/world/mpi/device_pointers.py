"""Whether this MPI sends from a device's own memory: what its makers offer to ask for that."""

import ctypes
import os
from collections.abc import Mapping
from typing import Final

_ASK: Final = ("MPIX_Query_cuda_support", "MPIX_Query_rocm_support", "MPIX_Query_ze_support")
# Of MPIs that cannot be asked, or only tell what they were built for, not what they were told.
_SWITCHES: Final = ("MV2_USE_CUDA", "MV2_USE_ROCM", "MPICH_GPU_SUPPORT_ENABLED", "I_MPI_OFFLOAD")


def takes_device_pointers(library: object, environ: Mapping[str, str] | None = None) -> bool:
    """Say whether this process's MPI takes pointers into a device's memory.

    Open MPI, MPICH and their kin answer `MPIX_Query_cuda_support` and its like; MVAPICH2, Cray
    MPICH and Intel MPI are told by a variable, 0 or 1, which counts where it is set. `library`: has
    the functions of MPI as its attributes, as `loaded_by` finds them.
    """
    env = os.environ if environ is None else environ
    told = [env[name] for name in _SWITCHES if name in env]
    if told:
        return any(value.strip() not in ("", "0") for value in told)
    for name in _ASK:
        ask = getattr(library, name, None)
        if ask is not None and ask() == 1:
            return True
    return False


def loaded_by(module_file: str) -> ctypes.CDLL:
    """Return what an extension module finds in itself and in the libraries it was linked with."""
    return ctypes.CDLL(module_file, mode=ctypes.DEFAULT_MODE | os.RTLD_NOLOAD)
