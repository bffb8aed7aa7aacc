"""What is refused at the start: no mpi4py, no MPI, one that has ended, or that has no threads."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch.distributed as dist

from gpipe_hpc.comm.world.start import start_world
from gpipe_hpc.errors import ConfigError, LaunchError

LEVELS = {"THREAD_SINGLE": 0, "THREAD_FUNNELED": 1, "THREAD_SERIALIZED": 2, "THREAD_MULTIPLE": 3}


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
        (mpi(level=1), "MPI_THREAD_MULTIPLE.* got MPI_THREAD_FUNNELED from MPICH 5"),
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
    with pytest.raises(ConfigError, match=r"backend=mpi: .* got one of gloo; .*start_world"):
        start_world(backend="mpi")
