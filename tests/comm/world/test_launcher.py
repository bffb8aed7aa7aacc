import os
from pathlib import Path

import pytest

from gpipe_hpc.comm.world import launcher
from gpipe_hpc.comm.world.launcher import (
    Launch,
    detect_launch,
    expand_hosts,
    expand_tasks,
    hydra_of,
)
from gpipe_hpc.errors import LaunchError

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
# As Slurm 22.05 sets them for the last task of `srun -N2 -n3`.
SRUN = {
    "SLURM_JOB_ID": "1",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "3",
    "SLURM_PROCID": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_TASKS_PER_NODE": "2,1",
}
# As it sets them for the batch script of `sbatch -N2 -n3`, which is one process.
SBATCH = {
    "SLURM_JOB_ID": "2",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "3",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "2,1",
}
ALONE = Launch(0, 1, 0, 1, "none", "127.0.0.1", 0)


def known(host: str) -> bool:
    return True


def unknown(host: str) -> bool:
    return False


def detect(env: dict[str, str], **changes: str | None) -> Launch:
    changed = {**env, **changes}
    return detect_launch({k: v for k, v in changed.items() if v is not None}, known)


def test_nothing_set_is_one_process():
    assert detect({}) == ALONE
    assert ALONE.one_machine


def test_torchrun():
    launch = detect(TORCHRUN)
    assert launch == Launch(3, 8, 1, 2, "torchrun", "node7", 29500, 0, True)
    assert not launch.one_machine
    assert not detect(TORCHRUN, TORCHELASTIC_USE_AGENT_STORE="False").agent_store


def test_rank_set_by_hand_or_by_an_operator():
    env = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "5"}
    assert detect(env) == Launch(1, 2, 0, 1, "environment", "a", 5, local_known=False)
    assert detect({"RANK": "0", "WORLD_SIZE": "1"}).world_size == 1


def test_openmpi_on_one_machine():
    launch = detect(OPENMPI)
    assert launch.launcher == "openmpi"
    assert (launch.rank, launch.world_size, launch.local_rank, launch.local_size) == (1, 4, 1, 4)
    assert launch.master_addr == "127.0.0.1"
    assert launch.one_machine


def test_mvapich2():
    env = {k.replace("OMPI_", "MV2_"): v for k, v in OPENMPI.items()}
    launch = detect(env, MASTER_ADDR="head", MASTER_PORT="77")
    assert launch == Launch(1, 4, 1, 4, "mvapich2", "head", 77)


def test_mpich():
    launch = detect(HYDRA)
    assert (launch.launcher, launch.rank, launch.local_rank) == ("mpich", 1, 1)
    assert launch.master_addr == "127.0.0.1"


def test_srun():
    launch = detect(SRUN)
    assert launch.launcher == "srun"
    assert (launch.rank, launch.world_size, launch.local_rank, launch.local_size) == (2, 3, 0, 1)
    assert launch.master_addr == "n1"
    first = detect(SRUN, SLURM_PROCID="1", SLURM_LOCALID="1", SLURM_NODEID="0")
    assert first.local_size == 2


def test_srun_on_one_node_meets_on_loopback():
    launch = detect(SRUN, SLURM_STEP_TASKS_PER_NODE="3", SLURM_NODEID="0", SLURM_LOCALID="2")
    assert launch.one_machine
    assert launch.master_addr == "127.0.0.1"


def test_nodes_without_a_name_are_met_where_srun_was_called():
    assert detect_launch(SRUN, unknown).master_addr == "10.0.0.9"
    bare = {k: v for k, v in SRUN.items() if k != "SLURM_LAUNCH_NODE_IPADDR"}
    assert detect_launch(bare, unknown).master_addr == "n1"


def test_a_batch_script_alone_is_one_process():
    assert detect(SBATCH) == ALONE


def test_precedence():
    everything = {**SRUN, **HYDRA, **OPENMPI, **TORCHRUN}
    assert detect(everything).launcher == "torchrun"
    assert detect({**SRUN, **HYDRA, **OPENMPI}).launcher == "openmpi"
    assert detect({**SRUN, **HYDRA}).launcher == "mpich"
    # srun --mpi=pmi2 sets PMI_RANK too, but no local ranks.
    assert detect({**SRUN, "PMI_RANK": "2", "PMI_SIZE": "3"}).launcher == "srun"


def test_mpirun_over_several_machines_needs_an_address():
    spread = {**OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    with pytest.raises(LaunchError, match=r"MASTER_ADDR is not set.*host of rank 0"):
        detect(spread)
    assert detect(spread, MASTER_ADDR="head").master_addr == "head"
    assert detect({**spread, "SLURM_JOB_NODELIST": "c[07-09]"}).master_addr == "c07"


def test_ports_differ_between_jobs_steps_and_attempts():
    ports = {
        detect(SRUN).master_port,
        detect(SRUN, SLURM_JOB_ID="2").master_port,
        detect(SRUN, SLURM_STEP_ID="1").master_port,
        detect(SRUN, SLURM_RESTART_COUNT="1").master_port,
    }
    assert len(ports) == 4
    assert all(20_000 <= port < 32_000 for port in ports)
    assert detect(SRUN, SLURM_PROCID="0").master_port == detect(SRUN).master_port
    assert detect(SRUN, SLURM_RESTART_COUNT="1").restart_count == 1
    assert detect(SRUN, MASTER_PORT="1234").master_port == 1234


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({**TORCHRUN, "WORLD_SIZE": ""}, r"WORLD_SIZE is not set.*unset the launcher's variables"),
        ({**TORCHRUN, "RANK": "x"}, r"bad RANK, expected a non-negative integer, got 'x'"),
        ({**TORCHRUN, "RANK": "-1"}, r"bad RANK.*got '-1'"),
        ({**TORCHRUN, "RANK": "8"}, r"bad rank from torchrun, expected less than 8.*got 8"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, r"bad local rank.*less than 2"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "9"}, r"bad ranks on this machine.*got 9"),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, r"bad master port.*got 70000"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, r"MASTER_ADDR is not set"),
        (
            {**OPENMPI, "RANK": "0", "WORLD_SIZE": "4"},
            r"disagree: OMPI_COMM_WORLD_RANK=1, but RANK=0; unset RANK",
        ),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, r"MPI_LOCALNRANKS is not set"),
        ({**SRUN, "SLURM_NODEID": "2"}, r"tasks of node 2.*got '2,1'; start the step with"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2,x"}, r"got '2,x'"),
    ],
)
def test_contradictions_name_the_variable_and_the_remedy(env: dict[str, str], message: str):
    with pytest.raises(LaunchError, match=message):
        detect_launch(env, known)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", ["node1"]),
        ("a,b,c", ["a", "b", "c"]),
        ("n[1-4,7]", ["n1", "n2", "n3", "n4", "n7"]),
        ("gpu[008-010]-ib,m", ["gpu008-ib", "gpu009-ib", "gpu010-ib", "m"]),
        ("r[1-2]n[1,3]", ["r1n1", "r1n3", "r2n1", "r2n3"]),
        ("x[1,3],y[2-3]", ["x1", "x3", "y2", "y3"]),
    ],
)
def test_host_lists(text: str, hosts: list[str]):
    assert expand_hosts(text) == hosts


def test_task_lists():
    assert expand_tasks("4(x2),1") == [4, 4, 1]
    assert expand_tasks("3") == [3]
    with pytest.raises(ValueError, match="x"):
        expand_tasks("3(x)")


def test_ranks_set_by_hand_agree_on_whether_they_are_on_one_machine():
    """LOCAL_RANK without LOCAL_WORLD_SIZE: the last rank alone thought that all were here."""
    env = {"WORLD_SIZE": "2", "MASTER_PORT": "5"}
    for addr, here in [("127.0.0.1", True), ("localhost", True), ("::1", True), ("node7", False)]:
        ranks = [
            detect(env, RANK=str(rank), LOCAL_RANK=str(rank), MASTER_ADDR=addr) for rank in range(2)
        ]
        assert [launch.one_machine for launch in ranks] == [here, here]
        assert [launch.local_rank for launch in ranks] == [0, 1]
    both = detect(env, RANK="1", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2", MASTER_ADDR="node7")
    assert both.one_machine


def process(proc, pid, parent, *words):
    (proc / str(pid)).mkdir()
    (proc / str(pid) / "stat").write_text(f"{pid} (a (strange) name) S {parent} 1 1 0")
    (proc / str(pid) / "cmdline").write_bytes("".join(f"{word}\0" for word in words).encode())


def test_mpiexec_of_mpich_is_told_by_where_it_listens(tmp_path):
    """Every job of MPICH without a scheduler took port 23694."""
    process(tmp_path, 9, 8, "python", "-m", "gpipe_hpc.train")
    process(tmp_path, 8, 7, "/bin/sh", "run.sh")
    process(tmp_path, 7, 6, "/usr/bin/hydra_pmi_proxy", "--control-port", "n1:4567", "--pgid", "0")
    process(tmp_path, 6, 1, "mpiexec", "-n", "2", "--control-port", "no")
    process(tmp_path, 1, 0, "init")
    assert hydra_of(9, tmp_path) == hydra_of(8, tmp_path) == "n1:4567"
    assert hydra_of(7, tmp_path) == hydra_of(1, tmp_path) == hydra_of(12345, tmp_path) == ""


def test_two_mpiexecs_have_two_ports(monkeypatch):
    ports = set()
    for address in ("n1:4567", "n1:4568", "n2:4567"):
        monkeypatch.setattr(launcher, "hydra_of", lambda pid, address=address: address)
        ports |= {detect(HYDRA).master_port, detect(HYDRA, PMI_RANK="0").master_port}
    assert len(ports) == 3


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc")
def test_our_own_ancestors_can_be_read():
    assert hydra_of(os.getpid()) == ""
