"""Detection of MPI libraries that accept pointers to device memory."""

import ctypes
import os
from collections.abc import Mapping
from typing import Final

_ASK: Final = ("MPIX_Query_cuda_support", "MPIX_Query_rocm_support", "MPIX_Query_ze_support")
# Variables of libraries without such a function, or whose function reports only the build.
_SWITCHES: Final = ("MV2_USE_CUDA", "MV2_USE_ROCM", "MPICH_GPU_SUPPORT_ENABLED", "I_MPI_OFFLOAD")


def takes_device_pointers(library: object, environ: Mapping[str, str] | None = None) -> bool:
    """Return whether this process's MPI accepts pointers to device memory.

    Open MPI, MPICH and derivatives offer functions such as `MPIX_Query_cuda_support`. MVAPICH2,
    Cray MPICH and Intel MPI use an environment variable, which takes precedence if it is set.
    `library` has the functions of MPI as attributes; see `loaded_by`.
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
    """Return the symbols of a loaded extension module and of the libraries linked with it."""
    return ctypes.CDLL(module_file, mode=ctypes.DEFAULT_MODE | os.RTLD_NOLOAD)
