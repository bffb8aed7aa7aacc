"""Detect the launcher of this process and its rank from environment variables."""

import ipaddress
import os
import re
import socket
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gpipe_hpc.errors import LaunchError

Environment = Mapping[str, str]

# Below Linux's range for outgoing connections (from 32768), above the well-known ports.
_FIRST_PORT, _NUM_PORTS = 20_000, 12_000
_MAX_ANCESTORS = 32  # processes between a rank and its launcher


@dataclass(frozen=True)
class Launch:
    """Rank, world size and rendezvous address of this process, as given by its launcher.

    Args:
        rank: world rank.
        world_size: number of ranks.
        local_rank: index of this process on its machine.
        local_size: number of ranks on this machine.
        launcher: torchrun, environment, openmpi, mvapich2, mpich, srun or none.
        master_addr: host of rank 0.
        master_port: port of the store; 0 for any free port (one process only).
        restart_count: number of the attempt, if equal on all ranks; torchrun's agents each count
            their own restarts.
        agent_store: whether torchrun's agent already serves a store at the master address.
        local_known: whether ``local_size`` is exact, or only a lower bound.
    """

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    launcher: str
    master_addr: str
    master_port: int
    restart_count: int = 0
    agent_store: bool = False
    local_known: bool = True

    @property
    def one_machine(self) -> bool:
        """Return whether all ranks are known to be on this machine."""
        return self.local_known and self.local_size == self.world_size


def detect_launch(
    environ: Environment | None = None, resolves: Callable[[str], bool] | None = None
) -> Launch:
    """Return how this process was launched.

    The first that applies: ``RANK`` (torchrun, or set by hand or by Kubernetes operators), Open
    MPI, MVAPICH2, MPICH and derivatives (PMI), srun, and else a single process. MASTER_ADDR and
    MASTER_PORT are used if set. No connection is opened.

    Args:
        environ: replaces `os.environ`.
        resolves: replaces the check whether a host name can be resolved.

    Raises `LaunchError` for variables that are missing, not numbers, or contradictory.
    """
    env = os.environ if environ is None else environ
    known = _resolves if resolves is None else resolves
    if "RANK" in env:
        launch = _from_rank(env)
    elif "OMPI_COMM_WORLD_RANK" in env:
        launch = _from_mpi(env, "openmpi", "OMPI_COMM_WORLD", known)
    elif "MV2_COMM_WORLD_RANK" in env:
        launch = _from_mpi(env, "mvapich2", "MV2_COMM_WORLD", known)
    elif "PMI_RANK" in env and not _pmi_of_slurm(env):
        launch = _from_pmi(env, known)
    elif _in_slurm_step(env):
        launch = _from_slurm(env, known)
    else:
        launch = Launch(0, 1, 0, 1, "none", "127.0.0.1", 0)
    return _validated(launch)


def _from_rank(env: Environment) -> Launch:
    by_torchrun = "TORCHELASTIC_RUN_ID" in env or "LOCAL_WORLD_SIZE" in env
    rank, size = _number(env, "RANK"), _number(env, "WORLD_SIZE")
    if not by_torchrun:
        _refuse_other_rank(env, rank)
    local_rank = _number(env, "LOCAL_RANK", 0)
    # Operators that start one process per host set no local variables, and LOCAL_RANK alone would
    # give a different value on each rank. If MASTER_ADDR is loopback, all ranks are on one machine.
    at_home = _is_loopback(env.get("MASTER_ADDR", ""))
    local_size = _number(env, "LOCAL_WORLD_SIZE", size if at_home else local_rank + 1)
    if size == 1 and "MASTER_PORT" not in env:
        return Launch(0, 1, 0, 1, "environment", "127.0.0.1", 0)
    return Launch(
        rank=rank,
        world_size=size,
        local_rank=local_rank,
        local_size=local_size,
        launcher="torchrun" if by_torchrun else "environment",
        master_addr=_text(env, "MASTER_ADDR"),
        master_port=_number(env, "MASTER_PORT"),
        agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        local_known=at_home or "LOCAL_WORLD_SIZE" in env,
    )


def _is_loopback(addr: str) -> bool:
    if addr.strip() == "localhost":
        return True
    try:
        return ipaddress.ip_address(addr.strip()).is_loopback
    except ValueError:
        return False


def _refuse_other_rank(env: Environment, rank: int) -> None:
    """Raise LaunchError if RANK was exported once for all processes of an MPI or srun launch."""
    for name in ("OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"):
        if name in env and (name != "SLURM_PROCID" or _in_slurm_step(env)):
            other = _number(env, name)
            if other != rank:
                raise LaunchError(
                    f"launch: two launchers disagree: {name}={other}, but RANK={rank}; unset RANK "
                    f"and WORLD_SIZE, or launch with torchrun"
                )


def _from_mpi(env: Environment, launcher: str, prefix: str, known: Callable[[str], bool]) -> Launch:
    size = _number(env, f"{prefix}_SIZE")
    local_size = _number(env, f"{prefix}_LOCAL_SIZE")
    return Launch(
        rank=_number(env, f"{prefix}_RANK"),
        world_size=size,
        local_rank=_number(env, f"{prefix}_LOCAL_RANK"),
        local_size=local_size,
        launcher=launcher,
        master_addr=_master_addr(env, size == local_size, known),
        master_port=_master_port(env),
        restart_count=_number(env, "SLURM_RESTART_COUNT", 0),
    )


def _from_pmi(env: Environment, known: Callable[[str], bool]) -> Launch:
    size = _number(env, "PMI_SIZE")
    alone = 1 if size == 1 else None
    local_size = _number(env, "MPI_LOCALNRANKS", alone)
    return Launch(
        rank=_number(env, "PMI_RANK"),
        world_size=size,
        local_rank=_number(env, "MPI_LOCALRANKID", 0 if alone else None),
        local_size=local_size,
        launcher="mpich",
        master_addr=_master_addr(env, size == local_size, known),
        master_port=_master_port(env),
        restart_count=_number(env, "SLURM_RESTART_COUNT", 0),
    )


def _pmi_of_slurm(env: Environment) -> bool:
    # `srun --mpi=pmi2` sets both kinds of variables; then only Slurm's include local ranks.
    return "MPI_LOCALRANKID" not in env and _in_slurm_step(env)


def _in_slurm_step(env: Environment) -> bool:
    """Return whether srun started this process; a batch script alone also has SLURM_PROCID=0."""
    if "SLURM_PROCID" not in env:
        return False
    marks = ("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE")
    return any(mark in env for mark in (*marks, "SLURM_LAUNCH_NODE_IPADDR"))


def _from_slurm(env: Environment, known: Callable[[str], bool]) -> Launch:
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
    size = _number(env, size_name)
    local_size = 1 if size == 1 else _slurm_local_size(env)
    return Launch(
        rank=_number(env, "SLURM_PROCID"),
        world_size=size,
        local_rank=_number(env, "SLURM_LOCALID"),
        local_size=local_size,
        launcher="srun",
        master_addr=_master_addr(env, size == local_size, known),
        master_port=_master_port(env),
        restart_count=_number(env, "SLURM_RESTART_COUNT", 0),
    )


def _slurm_local_size(env: Environment) -> int:
    name = "SLURM_STEP_TASKS_PER_NODE"
    if name not in env:
        name = "SLURM_TASKS_PER_NODE"
    tasks, node = _text(env, name), _number(env, "SLURM_NODEID")
    try:
        return expand_tasks(tasks)[node]
    except (ValueError, IndexError):
        raise LaunchError(
            f"launch: cannot determine the tasks of node {node}, expected {name} like 4(x2),1 with "
            f"an entry for it, got {tasks!r}; start the step with srun --ntasks-per-node"
        ) from None


def expand_tasks(text: str) -> list[int]:
    """Return the tasks of each node from Slurm's short form: ``2(x3),1`` is [2, 2, 2, 1]."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ValueError(f"not a number of tasks: {part!r}")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def expand_hosts(text: str) -> list[str]:
    """Expand Slurm's short form of host names: ``n[1-3,07],m`` is n1, n2, n3, n07, m."""
    return [host for part in re.split(r",(?![^[]*\])", text) if part for host in _expand(part)]


def _expand(pattern: str) -> list[str]:
    match = re.fullmatch(r"([^[]*)\[([^\]]*)\](.*)", pattern)
    if match is None:
        return [pattern]
    head, ranges, tail = match.groups()
    numbers: list[str] = []
    for item in ranges.split(","):
        first, _, last = item.partition("-")
        span = range(int(first), int(last or first) + 1)
        numbers += [str(number).zfill(len(first)) for number in span]
    return [f"{head}{number}{rest}" for number in numbers for rest in _expand(tail)]


def _master_addr(env: Environment, one_machine: bool, known: Callable[[str], bool]) -> str:
    if "MASTER_ADDR" in env:
        return _text(env, "MASTER_ADDR")
    if one_machine:
        return "127.0.0.1"
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if env.get(name):
            # Rank 0 runs on the first node. srun may have been called from a login node, so its
            # address is only the second choice.
            first = expand_hosts(env[name])[0]
            if known(first) or not env.get("SLURM_LAUNCH_NODE_IPADDR"):
                return first
    if env.get("SLURM_LAUNCH_NODE_IPADDR"):
        return env["SLURM_LAUNCH_NODE_IPADDR"]
    raise LaunchError(
        "launch: the ranks are on several machines and MASTER_ADDR is not set; pass it with the "
        "launcher: MASTER_ADDR=<host of rank 0>"
    )


def _resolves(host: str) -> bool:
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return False
    return True


def _master_port(env: Environment) -> int:
    """Return MASTER_PORT, or a port derived from the job, step and attempt.

    Each attempt gets another port, because orphans of the previous attempt may still use its port.
    MPICH gives no job identifier without a scheduler; then the port of the mpiexec that started the
    ranks is used.
    """
    if "MASTER_PORT" in env:
        return _number(env, "MASTER_PORT")
    jobs = (
        *("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID", "FLUX_JOB_ID"),
        *("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "MPISPAWN_MPIRUN_ID"),
    )
    job = next((env[name] for name in jobs if env.get(name)), "") or hydra_of(os.getpid())
    attempt = [job, env.get("SLURM_STEP_ID", ""), env.get("SLURM_RESTART_COUNT", "0")]
    return _FIRST_PORT + zlib.crc32("/".join(attempt).encode()) % _NUM_PORTS


def hydra_of(pid: int, proc: Path = Path("/proc")) -> str:
    """Return the control port, HOST:PORT, of the MPICH mpiexec that started a process, or "".

    Its proxy on each machine, an ancestor of the ranks there, was started with ``--control-port
    HOST:PORT``, which is the same on all machines and unique to each mpiexec.
    """
    for _ in range(_MAX_ANCESTORS):
        try:
            # The parent is the second field after the process name in parentheses.
            pid = int((proc / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
            words = (proc / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except (OSError, ValueError, IndexError):
            return ""
        if "hydra" in words[0] and "--control-port" in words[:-1]:
            return words[words.index("--control-port") + 1]
    return ""


def _text(env: Environment, name: str) -> str:
    value = env.get(name, "").strip()
    if not value:
        raise LaunchError(
            f"launch: {name} is not set, although other variables of its launcher are; set "
            f"{name}, or unset the launcher's variables to run one process"
        )
    return value


def _number(env: Environment, name: str, default: int | None = None) -> int:
    if default is not None and name not in env:
        return default
    text = _text(env, name)
    if not re.fullmatch(r"\d+", text):
        raise LaunchError(
            f"launch: bad {name}, expected a non-negative integer, got {text!r}; correct or "
            f"unset it"
        )
    return int(text)


def _validated(launch: Launch) -> Launch:
    rules = [
        ("rank", launch.rank, launch.world_size, "the number of ranks"),
        ("local rank", launch.local_rank, launch.local_size, "the ranks on this machine"),
        ("ranks on this machine", launch.local_size, launch.world_size + 1, "all ranks + 1"),
        ("master port", launch.master_port, 65536, "the number of ports"),
    ]
    for what, value, bound, meaning in rules:
        if value >= bound:
            raise LaunchError(
                f"launch: bad {what} from {launch.launcher}, expected less than {bound} "
                f"({meaning}), got {value}; the environment mixes two launches: start a clean one"
            )
    return launch
