"""The MPI library: what is refused at the start, tags, and pointers to device memory."""

import ctypes
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch.distributed as dist

from gpipe_hpc.comm.world.mpi.library import Tags, loaded_by, takes_device_pointers
from gpipe_hpc.comm.world.start import start_world
from gpipe_hpc.errors import ConfigError, LaunchError

LEVELS = {"THREAD_SINGLE": 0, "THREAD_FUNNELED": 1, "THREAD_SERIALIZED": 2, "THREAD_MULTIPLE": 3}
# Tags that the package uses: channels, transfers of bytes, late messages, exchanges, device lanes.
CALLERS = [base + queue for base in (0, 2**27, 2**28, 2**29, 2**30) for queue in range(3)]
CAN = SimpleNamespace(MPIX_Query_cuda_support=lambda: 1)
CANNOT = SimpleNamespace(MPIX_Query_cuda_support=lambda: 0, MPIX_Query_rocm_support=lambda: 0)
NOTHING = SimpleNamespace()


def mpi(*, has_ended=False, level=3):
    return SimpleNamespace(
        Is_finalized=lambda: has_ended,
        Is_initialized=lambda: True,
        Query_thread=lambda: level,
        Get_library_version=lambda: "MPICH 5",
        **LEVELS,
    )


def install(monkeypatch, library):
    """Put another mpi4py in place; without a library it is one that finds none to load."""
    package = ModuleType("mpi4py")
    package.rc = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "mpi4py", package)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    if library is not None:
        package.MPI = library
        monkeypatch.setitem(sys.modules, "mpi4py.MPI", library)


def test_a_python_without_mpi4py_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(
        LaunchError, match=r"comm.backend=mpi: mpi4py is not installed; pip install"
    ):
        start_world(backend="mpi")


@pytest.mark.parametrize(
    "library, message",
    [
        (None, "mpi4py cannot load an MPI library .*MPI4PY_MPIABI"),
        (mpi(has_ended=True), "this process has already finalized MPI; start a new process"),
        (mpi(level=1), "MPI_THREAD_MULTIPLE.* MPICH 5.* provides MPI_THREAD_FUNNELED"),
    ],
)
def test_an_mpi_that_cannot_be_used_is_refused(monkeypatch, library, message):
    install(monkeypatch, library)
    with pytest.raises(LaunchError, match=f"comm.backend=mpi: .*{message}"):
        start_world(backend="mpi")


@pytest.fixture
def group_by_gloo():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_group_that_is_there_and_goes_otherwise_is_refused(group_by_gloo):
    """Its messages would have gone by Gloo, without a word."""
    with pytest.raises(ConfigError, match=r"backend=mpi: .* uses gloo; .*start_world"):
        start_world(backend="mpi")


@pytest.mark.parametrize("highest", [32767, 2**21 - 1, 2**29 - 1, 2**31 - 1])
def test_no_two_queues_share_a_tag_and_none_is_that_of_leaving(highest):
    tags = Tags(highest)
    found = [tags.of(group, tag) for group in range(20) for tag in CALLERS]
    found += [tags.own(group) for group in range(20)]
    assert len(set(found)) == len(found)
    assert min(found) > 0 and max(found) <= highest


def test_what_does_not_fit_is_refused():
    tags = Tags(32767)
    with pytest.raises(LaunchError, match=r"allows 32 channels.* channel 32 is needed"):
        tags.of(0, 2**28 + 32)
    num_groups = next(n for n in range(1000) if refuses(tags, n))
    assert num_groups == 63
    assert not refuses(Tags(2**29 - 1), 10_000)


def refuses(tags, group):
    try:
        tags.own(group)
    except LaunchError:
        return True
    return False


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
    """Its symbols are not among those of the process, so `loaded_by` has to find them."""
    mpi4py = pytest.importorskip("mpi4py")
    assert mpi4py.__version__
    import _ctypes

    assert not takes_device_pointers(loaded_by(_ctypes.__file__), {})
    assert isinstance(loaded_by(_ctypes.__file__), ctypes.CDLL)
