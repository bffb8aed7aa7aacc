"""Whether an MPI takes pointers into a device's memory."""

import ctypes
from types import SimpleNamespace

import pytest

from gpipe_hpc.comm.world.mpi.device_pointers import loaded_by, takes_device_pointers

CAN = SimpleNamespace(MPIX_Query_cuda_support=lambda: 1)
CANNOT = SimpleNamespace(MPIX_Query_cuda_support=lambda: 0, MPIX_Query_rocm_support=lambda: 0)
NOTHING = SimpleNamespace()


@pytest.mark.parametrize(
    "library, environ, takes",
    [
        (CAN, {}, True),
        (CANNOT, {}, False),
        (NOTHING, {}, False),
        (SimpleNamespace(MPIX_Query_rocm_support=lambda: 1), {}, True),
        (NOTHING, {"MV2_USE_CUDA": "1"}, True),
        (CAN, {"MPICH_GPU_SUPPORT_ENABLED": "0"}, False),
        (CANNOT, {"I_MPI_OFFLOAD": "1"}, True),
    ],
)
def test_libraries_are_asked_and_variables_count(library, environ, takes):
    assert takes_device_pointers(library, environ) is takes


def test_the_library_of_the_wheel_is_asked():
    """It is not among the names of the whole process: mpi4py keeps it to itself."""
    mpi4py = pytest.importorskip("mpi4py")
    assert mpi4py.__version__
    import _ctypes

    assert not takes_device_pointers(loaded_by(_ctypes.__file__), {})
    assert isinstance(loaded_by(_ctypes.__file__), ctypes.CDLL)
