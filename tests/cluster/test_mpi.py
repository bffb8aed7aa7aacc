"""Training over MPI as its launchers start it: srun --mpi=pmi2 on two nodes, and mpiexec."""

import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

MPI = ("comm.backend=mpi", "comm.shared_memory=false")


@pytest.mark.parametrize("layout", ["pipeline.stages=4", "pipeline.replicas=2"])
def test_mpi_trains_as_torchrun_does(
    slurm, torchrun, start, same_end, tiny, tmp_path, repository, layout
):
    """Five steps to the bit: under srun, mpiexec and torchrun, and one process of the same sums."""
    words = (*tiny, "train.steps=5", "model.num_layers=2", "model.dropout=0.1")
    ours = [sys.executable, "-m", "gpipe_hpc.train", *words, layout, *MPI]
    size = ("--nodes=2", "--ntasks-per-node=2", "--ntasks=4")
    slurm.run("srun", "--mpi=pmi2", *size, *ours, f"run.dir={tmp_path}/srun", folder=tmp_path)
    mpiexec = str(Path(sys.executable).with_name("mpiexec"))
    slurm.run(
        *("env", "-u", "SLURM_CONF", mpiexec, "-launcher", "fork", "-n", "4"),
        *(*ours, f"run.dir={tmp_path}/mpiexec"),
        folder=tmp_path,
    )
    env = {"PYTHONPATH": str(repository)}
    launch = ("--standalone", "--nproc_per_node=4")
    other = torchrun(launch, *words, layout, f"run.dir={tmp_path}/torchrun", env=env)
    assert other.wait(120) == 0, other.output
    for name in ("srun", "mpiexec"):
        same_end(tmp_path / name, tmp_path / "torchrun")
    if layout == "pipeline.stages=4":
        alone = start(*words, f"run.dir={tmp_path}/alone").wait(120)
        assert alone.code == 0, alone.output
        same_end(tmp_path / "mpiexec", tmp_path / "alone")
