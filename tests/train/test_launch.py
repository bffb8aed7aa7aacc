"""Ranks that other launchers start, and what a run opens to the network."""

import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

# What each launcher tells rank 1 of 2 on one machine; {} is the rank.
LAUNCHERS = {
    "openmpi": {
        "OMPI_COMM_WORLD_RANK": "{}",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "{}",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    },
    "mpich": {"PMI_RANK": "{}", "PMI_SIZE": "2", "MPI_LOCALRANKID": "{}", "MPI_LOCALNRANKS": "2"},
    "mvapich2": {
        "MV2_COMM_WORLD_RANK": "{}",
        "MV2_COMM_WORLD_SIZE": "2",
        "MV2_COMM_WORLD_LOCAL_RANK": "{}",
        "MV2_COMM_WORLD_LOCAL_SIZE": "2",
    },
    "srun": {
        "SLURM_JOB_ID": "7",
        "SLURM_PROCID": "{}",
        "SLURM_LOCALID": "{}",
        "SLURM_NODEID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "node1",
    },
    "srun --mpi=pmi2": {
        "PMI_RANK": "{}",
        "PMI_SIZE": "2",
        "SLURM_JOB_ID": "8",
        "SLURM_PROCID": "{}",
        "SLURM_LOCALID": "{}",
        "SLURM_NODEID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "2",
    },
    "by hand": {"RANK": "{}", "WORLD_SIZE": "2", "LOCAL_RANK": "{}", "MASTER_ADDR": "127.0.0.1"},
}


@pytest.mark.parametrize("name", LAUNCHERS)
def test_trains_under_the_environment_of(start, tiny, tmp_path, free_port, name):
    # A port of its own: other runs on this machine may have the one that follows from the job.
    port = {"MASTER_PORT": str(free_port())}
    settings = (*tiny, "train.steps=2", "run.dir=run", "comm.timeout_s=20")
    commands = []
    for rank in range(2):
        env = {key: value.format(rank) for key, value in LAUNCHERS[name].items()}
        if name == "by hand":
            env["LOCAL_WORLD_SIZE"] = "2"
        commands.append(start(*settings, env=env | port))
    assert [command.wait().code for command in commands] == [0, 0], commands[0].output
    assert {path.name for path in (tmp_path / "run" / "logs").iterdir()} == {
        "rank0.log",
        "rank1.log",
    }
    assert "rank 1 stage 1" not in commands[0].output and "step 1/2" in commands[0].output
    assert "step 1/2" not in commands[1].output


def test_one_command_without_a_launcher_opens_nothing(start, tiny, tmp_path, until):
    command = start(*tiny, "train.steps=100000", "run.dir=run")
    until((tmp_path / "run" / "metrics.jsonl").exists, 30, "it trains")
    assert listening([command.pid]) == set()


def test_all_that_we_open_listens_on_loopback(start_ranks, tiny, tmp_path, until):
    ranks = start_ranks(2, *tiny, "train.steps=100000", "run.dir=run")
    until((tmp_path / "run" / "metrics.jsonl").exists, 30, "it trains")
    found = listening([command.pid for command in ranks.commands])
    assert found and {address for address, _ in found} == {"127.0.0.1"}, found


def test_under_torchrun_only_its_agent_listens_elsewhere(
    torchrun, tiny, tmp_path, until, free_port
):
    flags = ["--nproc_per_node=2", "--master-port", str(free_port())]
    launch = torchrun(flags, *tiny, "train.steps=100000", "run.dir=run")
    until((tmp_path / "run" / "metrics.jsonl").exists, 60, "it trains")
    workers = [launch.worker(rank) for rank in range(2)]
    found = listening(workers)
    assert found and {address for address, _ in found} == {"127.0.0.1"}, found


def test_the_look_for_listeners_finds_one():
    """The tests above would pass if it saw nothing."""
    with socket.create_server(("127.0.0.1", 0)) as here, socket.create_server(("", 0)) as anywhere:
        found = listening([os.getpid()])
        assert ("127.0.0.1", here.getsockname()[1]) in found
        assert ("0.0.0.0", anywhere.getsockname()[1]) in found


def listening(pids):
    """Return (address, port) of every TCP socket on which these processes listen."""
    inodes = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            target = os.readlink(descriptor) if descriptor.is_symlink() else ""
            if target.startswith("socket:["):
                inodes.add(target.removeprefix("socket:[").removesuffix("]"))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                address, _, port = fields[1].partition(":")
                found.add((readable(address), int(port, 16)))
    return found


def readable(address):
    """Return an address of /proc/net/tcp, whose words of four bytes are in host order."""
    words = [address[i : i + 8] for i in range(0, len(address), 8)]
    raw = b"".join(struct.pack("=I", int(word, 16)) for word in words)
    if len(raw) == 16 and raw.startswith(bytes(10) + b"\xff\xff"):
        raw = raw[12:]  # an IPv4 address in IPv6 clothes
    return socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw)


def test_ranks_that_end_as_soon_as_they_have_met_end_well(environ, free_port):
    """The watching thread was in torch's store as Python went down: half of the ranks aborted."""
    code = "from gpipe_hpc.comm.world.start import start_world; start_world(timeout_s=30)"
    codes = []
    for _ in range(4):
        common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", code],
                env=environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stderr=subprocess.PIPE,
            )
            for rank in range(2)
        ]
        codes += [rank.communicate(timeout=60) and rank.returncode for rank in ranks]
    assert codes == [0] * 8


ENDINGS = {
    "done": ((), 0),
    "threads and files": (
        ("data.workers=1", "checkpoint.every=1", "checkpoint.in_background=true"),
        0,
    ),
    "refused": (("pipeline.microbatches=0",), 2),
    "not a number": (("optimizer.lr=1e30", "train.clip_norm=null"), 4),
}


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_nothing_is_in_the_way_as_interpreters_are_taken_apart(
    start_ranks, tiny, world_size, ending
):
    """Most commands of these tests leave ahead of that, as tests/process_server.py says."""
    words, code = ENDINGS[ending]
    settings = (*tiny, "train.steps=4", *words)
    ranks = start_ranks(world_size, *settings, is_whole=True).wait()
    assert ranks.codes == [code] * world_size, ranks.outputs
    for output in ranks.outputs:
        assert not any(word in output for word in ("Exception ignored", "terminate", "Fatal"))
