"""A real Slurm on this machine: a controller, several nodes and its own authentication.

All files are in one folder, and all processes have the folder's name in their environment, by which
they are found and killed.
"""

import contextlib
import getpass
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.cluster.tools import tool
from tests.conftest import marked, wait_until

NODES = 4
CPUS = 8
# A requeued job appears to have ended until its old step has ended.
_STAYS_S = 3.0
_STAYS_FAILED_S = 60.0
LOST_S = 10  # time without response after which a node is down

_CONF = """\
ClusterName=gpipe
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
SlurmdSpoolDir={folder}/spool/%n
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/log/controller.log
SlurmdLogFile={folder}/log/%n.log
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=1,sched_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=30
SlurmdTimeout={lost_s}
MpiDefault=none
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=60 PreemptMode=REQUEUE
PartitionName=gone Nodes=ALL PriorityTier=1 GraceTime=60 PreemptMode=CANCEL
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF
"""
_NODE = (
    "NodeName=n{number} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} Boards=1 "
    "SocketsPerBoard=1 CoresPerSocket={cpus} ThreadsPerCore=1 RealMemory=4000\n"
)


class Slurm:
    """A Slurm controller and its nodes n1, n2, ..., all on this machine."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        # A short path, as the address of a Unix socket has at most 108 characters.
        self.folder = Path(tempfile.mkdtemp(prefix="slurm_", dir="/tmp"))
        self._conf = self.folder / "slurm.conf"
        self.environ = {**environ, "SLURM_CONF": str(self._conf)}
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._node_of: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> "Slurm":
        """Start all daemons, and wait until every node is idle."""
        for name in ("state", "log", *(f"spool/n{i}" for i in range(1, NODES + 1))):
            (self.folder / name).mkdir(parents=True)
        ports = _free_ports(NODES + 1)
        host, user = socket.gethostname().partition(".")[0], getpass.getuser()
        text = _CONF.format(
            host=host, user=user, folder=self.folder, port=ports[0], lost_s=LOST_S
        ) + "".join(
            _NODE.format(number=i, host=host, port=ports[i], cpus=CPUS) for i in range(1, NODES + 1)
        )
        self._conf.write_text(text)
        self._authenticate()
        self._daemon("controller", tool("slurmctld"), "-D", "-c")
        for i in range(1, NODES + 1):
            self.start_node(f"n{i}")
        wait_until(self._all_idle, 60, f"all nodes were idle; {self._logs()}")
        return self

    def _authenticate(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        self.folder.chmod(0o755)
        files = [
            f"--{name}={self.folder}/munge.{name}" for name in ("socket", "pid-file", "log-file")
        ]
        self._daemon(
            "munge",
            *(tool("munged"), "--foreground", "--force", f"--key-file={key}"),
            *(*files, f"--seed-file={self.folder}/munge.seed"),
        )
        wait_until((self.folder / "munge.socket").exists, 20, f"munged listened; {self._logs()}")

    def _daemon(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        log = self.folder / "log"
        with (log / f"{name}.out").open("ab") as output:
            daemon = subprocess.Popen(
                command,
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._daemons.append(daemon)
        return daemon

    def _logs(self) -> str:
        return "\n".join(
            f"{path.name}: {path.read_text(errors='replace')[-2000:]}"
            for path in sorted((self.folder / "log").iterdir())
        )

    def _all_idle(self) -> bool:
        return set(self.states().values()) == {"idle"}

    def states(self) -> dict[str, str]:
        """Return the state of each node, such as idle or down, by name."""
        said = self.run("sinfo", "-h", "-N", "-o", "%N %t", fails=True)
        return dict(line.split() for line in said.splitlines() if len(line.split()) == 2)

    def start_node(self, name: str) -> None:
        """Start the daemon of a node."""
        self._node_of[name] = self._daemon(name, tool("slurmd"), "-D", "-N", name)

    def bring_back(self, name: str) -> None:
        """Start the daemon of a lost node, after the controller has sent all its messages.

        For seconds after the loss of a node, and once more a minute later, the controller tries to
        end the steps there. A requeued job numbers its steps from 0 again, so these messages would
        end the ranks or the script of the next start. Slurm itself delays a requeued job by two
        minutes; these tests do not.
        """
        wait_until(lambda: not self._num_unsent(), 120, f"nothing was to be sent; {self._logs()}")
        self.start_node(name)

    def _num_unsent(self) -> int:
        """Return the number of messages to nodes that the controller still has to send."""
        said = self.run("sdiag")
        found = re.findall(r"^Agent (?:queue size|count): +(\d+)$", said, re.MULTILINE)
        assert len(found) == 2, f"sdiag says otherwise: {said}"
        return sum(map(int, found))

    def lose(self, name: str) -> None:
        """Simulate a power failure of a node: kill its daemon, steps and tasks at the same time."""
        doomed = [self._node_of.pop(name).pid]
        ours = marked("SLURM_CONF", str(self._conf))
        tasks = [pid for pid, env in ours.items() if env.get("SLURMD_NODENAME") == name]
        # The process of a step is the parent of its tasks; it has the daemon's environment.
        steps = {_parent_of(pid) for pid in tasks} & ours.keys()
        # Stop all before killing: a child of srun would end the step of a killed srun.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in [*doomed, *steps, *tasks]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def restore(self) -> None:
        """Cancel all jobs, and restart lost nodes."""
        self.run("scancel", "--full", "--user", getpass.getuser(), fails=True)
        wait_until(lambda: not self.run("squeue", "-h"), 60, "no job was left")
        self.reap()
        for i in range(1, NODES + 1):
            if f"n{i}" not in self._node_of:
                self.start_node(f"n{i}")
        wait_until(self._all_idle, 90, f"all nodes were idle; {self._logs()}")

    def reap(self) -> None:
        """Kill tasks that outlived their job, such as those of lost nodes."""
        for pid, env in marked("SLURM_CONF", str(self._conf)).items():
            if "SLURM_JOB_ID" in env:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def run(self, *command: str, fails: bool = False, folder: Path | None = None) -> str:
        """Run one of Slurm's commands and return its output; with `fails`, it may fail."""
        done = subprocess.run(
            [tool(command[0]) if command[0] == "srun" else command[0], *command[1:]],
            env=self.environ,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        assert fails or done.returncode == 0, (
            f"{command} ended with {done.returncode}: {done.stdout}"
        )
        return done.stdout

    def submit(self, script: Path, *options: str, folder: Path) -> "BatchJob":
        """Submit a batch script, with `folder` as working folder."""
        said = self.run("sbatch", "--parsable", *options, str(script), folder=folder)
        return BatchJob(self, said.split()[-1].partition(";")[0])

    def tasks(self, job: "BatchJob") -> dict[int, int]:
        """Return the process ids of the ranks in a job's running step, by rank."""
        found = {}
        for pid, env in marked("SLURM_CONF", str(self._conf)).items():
            if env.get("SLURM_JOB_ID") == job.number and env.get("SLURM_PROCID", "").isdigit():
                words = _command_of(pid)
                if "gpipe_hpc.train" in words and env.get("SLURM_STEP_ID", "").isdigit():
                    found[int(env["SLURM_PROCID"])] = pid
        return found

    def stop(self) -> None:
        """Kill all processes, and remove the folder."""
        for _ in range(50):
            left = marked("SLURM_CONF", str(self._conf))
            if not left:
                break
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for daemon in self._daemons:
                daemon.poll()
            time.sleep(0.1)
        shutil.rmtree(self.folder, ignore_errors=True)


class BatchJob:
    """A submitted job."""

    def __init__(self, slurm: Slurm, number: str) -> None:
        self._slurm, self.number = slurm, number
        self._held_s = 0.0  # time since which Slurm delays the job; 0 if it does not

    def told(self, name: str) -> str:
        """Return a field of the job's description by scontrol, such as JobState; "" if none."""
        said = self._slurm.run("scontrol", "-o", "show", "job", self.number, fails=True)
        match = re.search(rf"\b{name}=(\S*)", said)
        return "" if match is None else match[1]

    def await_state(self, *states: str, limit_s: float = 90.0) -> str:
        """Wait until the job has stayed in one of the states for some seconds; return the state.

        A requeued job may appear to have ended for a short time. If Slurm delays the start of the
        job, it is started immediately.
        """
        since: list[float] = []

        def reached() -> bool:
            state = self._state()
            since[:] = [*since, time.monotonic()] if state in states else []
            stays_s = _STAYS_FAILED_S if state == "FAILED" else _STAYS_S
            return state in states and since[-1] - since[0] > stays_s

        wait_until(reached, limit_s, f"job {self.number} was {' or '.join(states)}")
        return self.told("JobState")

    def _state(self) -> str:
        # Slurm delays a requeued job by about two minutes. A start within the first second would
        # fail, as the credential of the previous start has just been revoked.
        is_held = self.told("Reason") == "BeginTime"
        self._held_s = self._held_s or time.monotonic() if is_held else 0.0
        if is_held and time.monotonic() - self._held_s > _STAYS_S:
            self._slurm.run(
                "scontrol", "update", f"JobId={self.number}", "StartTime=now", fails=True
            )
        return self.told("JobState")


def _free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)
        ]
        return [server.getsockname()[1] for server in servers]


def _parent_of(pid: int) -> int:
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[1])
    return 0


def _command_of(pid: int) -> Sequence[str]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    return []
