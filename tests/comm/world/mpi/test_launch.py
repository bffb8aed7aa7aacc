"""Which rank a process is, by its launcher and by MPI."""

import pytest

from gpipe_hpc.comm.world.mpi.launch import launch_by, own_address
from gpipe_hpc.comm.world.mpi.library import HostRanks
from gpipe_hpc.errors import LaunchError

HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
APART = HYDRA | {"MPI_LOCALNRANKS": "2"}
TORCHRUN = {
    **{"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"},
    **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
}
SRUN = {
    **{"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_NODEID": "0"},
    **{"SLURM_STEP_ID": "0", "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_JOB_ID": "7"},
}


class Library:
    name = "MPICH 5"

    def __init__(self, rank=1, size=4, local=(1, 4), told=None):
        self.rank, self.size, self._local = rank, size, local
        self.told = told or {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "4321"}

    def neighbours(self):
        return HostRanks(*self._local)

    def broadcast_from_first(self, value):
        self.told = value or self.told
        return self.told


def test_the_meeting_place_is_told_by_mpi():
    """Without it, ranks on several machines had to be given a MASTER_ADDR."""
    launch = launch_by(Library(local=(1, 2)), APART)
    assert (launch.rank, launch.world_size, launch.local_size) == (1, 4, 2)
    assert (launch.master_addr, launch.master_port) == ("10.0.0.7", 4321)
    assert launch.launcher == "mpich"


def test_what_is_set_counts():
    launch = launch_by(Library(), APART | {"MASTER_ADDR": "node0", "MASTER_PORT": "5"})
    assert (launch.master_addr, launch.master_port) == ("node0", 5)


def test_rank_0_tells_what_reaches_it():
    library = Library(rank=0, local=(0, 2))
    launch_by(library, APART | {"PMI_RANK": "0", "MPI_LOCALRANKID": "0"})
    assert library.told["MASTER_ADDR"] == own_address() != "127.0.0.1"
    assert int(library.told["MASTER_PORT"]) > 1023
    launch_by(together := Library(rank=0, local=(0, 4)), HYDRA | {"PMI_RANK": "0"})
    assert together.told["MASTER_ADDR"] == "127.0.0.1"


def test_a_launcher_without_variables_that_we_know_leaves_it_to_mpi():
    launch = launch_by(Library(local=(1, 2)), {})
    assert (launch.rank, launch.world_size, launch.local_rank, launch.local_size) == (1, 4, 1, 2)
    assert (launch.launcher, launch.master_addr) == ("mpi", "10.0.0.7")


def test_one_process_without_a_launcher_is_alone():
    assert launch_by(Library(0, 1, (0, 1)), {}).world_size == 1


@pytest.mark.parametrize(
    "environ, remedy",
    [
        (TORCHRUN, "start the ranks with the mpiexec of this MPI"),
        (SRUN, "srun --mpi=pmi2"),
        (HYDRA, "belongs to another MPI library"),
    ],
)
def test_an_mpi_of_one_rank_under_a_launcher_of_many_is_refused(environ, remedy):
    """Each process would else have trained alone, all into one folder."""
    with pytest.raises(LaunchError, match=remedy) as refused:
        launch_by(Library(0, 1, (0, 1)), environ)
    assert "rank 1 of 4" in str(refused.value) and "rank 0 of 1 according to MPICH 5" in str(
        refused.value
    )


def test_ranks_that_are_counted_otherwise_are_refused():
    with pytest.raises(
        LaunchError, match="rank 1 of 4 according to mpich, but rank 2 of 4 according to"
    ):
        launch_by(Library(rank=2), HYDRA)
