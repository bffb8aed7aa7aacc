"""What train.sbatch does as each start ends, with Slurm's commands played: no controller, no ranks.

A line of shell for each start says what its ranks do, and how they end. Under a real Slurm the same
script runs in test_slurm.py.
"""

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.cluster.conftest import Edited
from tests.conftest import marked, wait_until

COMMANDS = ("srun", "scontrol", "sbatch", "scancel", "sinfo", "sleep")
SETTINGS = ("pipeline.stages=2",)
CHECKPOINT = "mkdir -p run/checkpoints/step_000000{step}"


class Played:
    """A job under way on nodes that files describe.

    In `play`: `starts` has a line of shell for each start of ranks, in turn; `lost` and `idle` have
    nodes; `job` what the controller says of the job; `calls` gets each call.
    """

    def __init__(self, folder: Path, script: Path) -> None:
        self.folder, self.play = folder, folder / "play"
        self.play.mkdir()
        (folder / "bin").mkdir()
        for name in COMMANDS:
            (folder / "bin" / name).symlink_to(Path(__file__).with_name("played_slurm.sh"))
        for name in ("calls", "lost", "idle"):
            (self.play / name).write_text("")
        (self.play / "started").write_text("0\n")
        self.tell()
        self._script = script
        self._process: subprocess.Popen[bytes] | None = None

    def tell(self, **values: object) -> None:
        """Let the controller say this of the job, and else that it runs for the first time."""
        known = {"JobState": "RUNNING", "Reason": "None", "Restarts": 0, "NumTasks": 4}
        known |= {"NodeList": "n1,n2"} | values
        (self.play / "job").write_text("".join(f"{k}={v}\n" for k, v in known.items()))

    def start(self, *starts: str, nodes: str = "n1,n2", restarts: int = 0) -> None:
        """Start the script as Slurm does on the first of `nodes`."""
        (self.play / "starts").write_text("".join(f"{line}\n" for line in starts))
        env = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")}
        env |= {
            "PATH": f"{self.folder / 'bin'}{os.pathsep}{env['PATH']}",
            "PLAY": str(self.play),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": nodes,
            "SLURM_JOB_PARTITION": "low",
            "SLURM_NTASKS_PER_NODE": "2",
            "SLURM_CPUS_PER_TASK": "3",
            "SLURM_RESTART_COUNT": str(restarts),
            "SLURMD_NODENAME": nodes.partition(",")[0],
        }
        with (self.folder / "said.txt").open("ab") as said:
            self._process = subprocess.Popen(
                ["bash", self._script],
                cwd=self.folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
            )

    def code(self) -> int:
        """Return the exit code of the script, once it has ended."""
        assert self._process is not None
        return self._process.wait(60)

    def run(self, *starts: str, nodes: str = "n1,n2", restarts: int = 0) -> int:
        """Start the script; return its exit code."""
        self.start(*starts, nodes=nodes, restarts=restarts)
        return self.code()

    def stop(self) -> None:
        """End what the script has left, as Slurm does."""
        for pid in marked("PLAY", str(self.play)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self._process is not None:
            self._process.wait()

    @property
    def said(self) -> str:
        """Return what came out so far."""
        return (self.folder / "said.txt").read_text()

    def calls(self, *words: str) -> list[str]:
        """Return the calls so far that begin with these words."""
        start = " ".join(words)
        lines = (self.play / "calls").read_text().splitlines()
        return [line.strip() for line in lines if line.startswith(start)]

    @property
    def started(self) -> list[Sequence[str]]:
        """Return what was started on all ranks: the module, the nodes."""
        form = re.compile(r"--nodelist=(\S+).* -m gpipe_hpc\.(\w+) ")
        found = (form.search(line) for line in self.calls("srun"))
        return [(each[2], each[1]) for each in found if each]


Plays = Callable[..., Played]


@pytest.fixture
def job(edited: Edited, tmp_path: Path) -> Iterator[Plays]:
    """Return a function that makes a job of the script, edited with these values."""
    made: list[Played] = []

    def make(**values: object) -> Played:
        values = {"RUN_DIR": "run"} | values
        made.append(Played(tmp_path, edited(SETTINGS, **values)))
        return made[-1]

    yield make
    for each in made:
        each.stop()


def asks(played: Played) -> list[tuple[str, str]]:
    """Return when each small job begins, and what it asks for."""
    begins = [re.search(r"--begin=now\+(\d+)", line) for line in played.calls("sbatch")]
    jobs = [(played.play / f"small_{i}").read_text() for i in range(len(begins))]
    return [
        (begin[1], text.splitlines()[-1])
        for begin, text in zip(begins, jobs, strict=True)
        if begin is not None
    ]


def test_a_run_that_is_done_ends_the_job(job):
    played = job()
    guarded = "until grep -q 'bash -c' $PLAY/calls; do /bin/sleep 0.02; done"
    assert played.run(f"{guarded}; exit 0") == 0
    assert "done" in played.said and played.started == [("train", "n1,n2")]
    assert not played.calls("scontrol requeue")
    assert len(played.calls("srun")) == 2, "the ranks, and a guard on the other node"


@pytest.mark.parametrize("code", [2, 4])
def test_what_would_fail_again_is_started_once(job, code):
    """A loss that is NaN was: three times, from the same checkpoint, to the same NaN."""
    played = job()
    assert played.run(f"exit {code}") == code
    assert "see run/starts/7.0.0.rank0.txt" in played.said
    assert len(played.started) == 1 and not played.calls("scontrol requeue")
    assert (played.folder / "run/starts/starts.txt").read_text().splitlines()[-1] == "stop"
    assert "MIN_NODES" not in played.said


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("exit 75", "stopped by a signal at step 20"),
        ("touch -d '+1 second' run/REQUEUE; exit 1", "stopped by a signal at step 20"),
        ("exit 143", "asked to stop while it ended with code 143"),
        ("kill -TERM $SCRIPT; exit 1", "asked to stop while it ended with code 1"),
    ],
    ids=["code", "mark", "before ranks met", "script told"],
)
def test_a_stopped_start_queues_the_job_again(job, line, why):
    played = job()
    assert played.run(f"{CHECKPOINT.format(step='20')}; {line}") == 0
    assert f"{why}: queued again" in played.said
    assert played.calls("scontrol requeue") == ["scontrol requeue 7"]
    assert (played.folder / "run/starts/starts.txt").read_text().splitlines()[-1] == "stop"


@pytest.mark.parametrize("task", ["task 0: Exited with exit code 1", "task 0: Killed"])
def test_a_rank_that_ends_by_a_signal_beside_a_crash_is_no_request_to_stop(job, task):
    """Code 143 alone was taken for one: the job was queued again MAX_STARTS times."""
    played = job(MAX_CRASHES=2)
    messages = (f"srun: error: n1: {task}", "srun: error: n2: task 3: Terminated")
    crash = "; ".join(f"echo '{line}' >&2" for line in messages) + "; exit 143"
    assert played.run(crash, crash) == 1
    assert len(played.started) == 2 and not played.calls("scontrol requeue")
    assert "stops: 2 starts in a row ended" in played.said
    assert all(line in played.said for line in messages)


@pytest.mark.parametrize("module", ["preflight", "train"])
def test_ranks_that_slurm_ends_by_a_signal_are_a_request_to_stop(job, module):
    played = job(PREFLIGHT="true" if module == "preflight" else "false")
    line = "srun: error: n1: tasks 0-3: User defined signal 1"
    assert played.run(f"echo '{line}' >&2; exit 138") == 0
    assert len(played.started) == 1 and played.calls("scontrol requeue")


def test_ranks_that_had_met_end_with_75_and_others_by_the_signal(job):
    """srun's code is the highest, 138: it was a crash, as some had ended otherwise."""
    played = job()
    lines = ("tasks 0-1: Exited with exit code 75", "tasks 2-3: User defined signal 1")
    told = "; ".join(f"echo 'srun: error: n1: {line}' >&2" for line in lines)
    assert played.run(f"{told}; exit 138") == 0
    assert len(played.started) == 1 and played.calls("scontrol requeue")


def test_a_mark_of_an_earlier_stop_does_not_hide_a_crash(job):
    """It was taken for a stop, each time: the job was queued again up to MAX_STARTS times."""
    played = job()
    (played.folder / "run").mkdir()
    (played.folder / "run" / "REQUEUE").touch()
    os.utime(played.folder / "run" / "REQUEUE", (1, 1))
    assert played.run("exit 1", "exit 1", "exit 1") == 1
    assert len(played.started) == 3 and not played.calls("scontrol requeue")
    assert "stops: 3 starts in a row ended without a checkpoint past step 0" in played.said


@pytest.mark.parametrize(
    ("told", "code", "words", "requeues"),
    [
        ({"JobState": "COMPLETING"}, 1, "cancelled, so not queued again", 0),
        ({"JobState": "COMPLETING", "Reason": "TimeLimit"}, 0, "queued again", 1),
        ({"JobState": "COMPLETING", "Restarts": 1}, 0, "Slurm has queued it again", 0),
        ({"JobState": "PENDING", "Restarts": 1}, 0, "Slurm has queued it again", 0),
        ({"JobState": "RUNNING"}, 0, "queued again", 1),
    ],
    ids=["scancel", "time limit", "preempted", "preempted and pending", "asked to stop"],
)
def test_who_has_stopped_it_says_whether_it_is_queued_again(job, told, code, words, requeues):
    played = job()
    played.tell(**told)
    assert played.run("exit 75") == code
    assert words in played.said
    assert len(played.calls("scontrol requeue")) == requeues


def test_a_refused_requeue_says_how_to_go_on(job):
    played = job()
    (played.play / "no_requeue").touch()
    assert played.run("exit 75") == 1
    assert "presently disabled" in played.said
    assert "submit this script again with RUN_DIR=run" in played.said


def test_crashes_are_counted_from_the_newest_checkpoint_and_between_stops(job):
    """Each crash past a newer checkpoint is the first; so is one after an orderly stop."""
    played = job(MAX_CRASHES=2)
    lines = (f"{CHECKPOINT.format(step=10 * i)}; exit 137" for i in (1, 2))
    assert played.run(*lines, "exit 75") == 0
    played.tell(Restarts=1)
    assert played.run(*[""] * 3, "exit 1", "exit 1", restarts=1) == 1
    assert len(played.started) == 5
    assert "stops: 2 starts in a row ended without a checkpoint past step 20" in played.said


def test_a_run_is_started_only_so_often_over_all_its_jobs(job):
    played = job(MAX_STARTS=2)
    crash = f"{CHECKPOINT.format(step='1$RANDOM')}; exit 1"
    assert played.run(crash, crash) == 1
    assert "stops: started 2 times, expected 2 at most" in played.said


@pytest.mark.parametrize("nodes", ["n1,n2", "n10,n9"], ids=["in order", "out of order"])
@pytest.mark.parametrize("code", [1, 2, 3])
def test_unfit_ranks_stop_the_job(job, code, nodes):
    played = job(PREFLIGHT="true")
    assert played.run(f"exit {code}", nodes=nodes) == code
    assert f"preflight ended with code {code}, see run/starts/7.0.0.preflight" in played.said
    assert "stops: these ranks are not fit" in played.said
    assert played.started == [("preflight", nodes)]
    assert not played.calls("scontrol requeue")


def test_a_preflight_that_lost_a_node_does_not_stop_the_job(job):
    played = job(PREFLIGHT="true")
    assert played.run("echo n2 >$PLAY/lost; exit 1", "exit 1", "exit 0") == 0
    assert played.started == [("preflight", "n1,n2"), ("train", "n1,n2"), ("train", "n1")]


def test_fit_ranks_are_looked_at_once_a_job(job):
    played = job(PREFLIGHT="true")
    assert played.run("exit 0", "exit 1", "exit 75") == 0
    played.tell(Restarts=1)
    assert played.run(*[""] * 3, "exit 0", restarts=1) == 0
    assert [module for module, _ in played.started] == ["preflight", *["train"] * 3]
    looked = next(line for line in played.calls("srun") if "gpipe_hpc.preflight" in line)
    assert "preflight.out=run/links.yaml run.dir=run" in looked


@pytest.mark.parametrize(
    "line",
    ["exit 138", "exit 143", "kill -USR1 $SCRIPT; exit 0", "kill -TERM $SCRIPT; exit 1"],
)
def test_a_signal_in_the_preflight_is_heeded(job, line):
    """It was lost: training began, and had no time left for a checkpoint."""
    played = job(PREFLIGHT="true")
    assert played.run(line) == 0
    assert "asked to stop while the preflight ran: queued again" in played.said
    assert played.started == [("preflight", "n1,n2")]
    played.tell(Restarts=1)
    assert played.run("", "exit 0", "exit 0", restarts=1) == 0
    assert [module for module, _ in played.started] == ["preflight", "preflight", "train"]


def test_a_signal_between_two_starts_is_heeded(job):
    """Nodes are asked whether they answer: that may take a minute, in which no rank listens."""
    played = job()
    line = "(until grep -q 'overlap.* true' $PLAY/calls; do /bin/sleep 0.02; done;"
    assert played.run(f"{line} kill -TERM $SCRIPT) & exit 1") == 0
    assert "asked to stop while no rank trained: queued again" in played.said
    assert len(played.started) == 1


def test_it_goes_on_with_the_nodes_that_answer_in_their_order(job):
    played = job()
    assert played.run("echo n9 >$PLAY/lost; exit 1", "exit 0", nodes="n9,n10,n8") == 0
    assert [nodes for _, nodes in played.started] == ["n9,n10,n8", "n8,n10"]
    second = [line for line in played.calls("srun") if "gpipe_hpc.train" in line][1]
    assert "--nodes=2 --ntasks=4 --ntasks-per-node=2" in second
    assert (played.folder / "run/starts/7.SHORT").read_text() == "3\n"


def test_settings_that_fewer_ranks_cannot_run_are_not_tried_again(job):
    """The message was that of settings that never work."""
    played = job(MIN_NODES=1)
    assert played.run("echo n2 >$PLAY/lost; exit 1", "exit 2") == 2
    assert len(played.started) == 2 and not played.calls("scontrol requeue")
    assert "this start had 1 nodes, the job 2: if its 2 ranks were too few" in played.said
    assert "raise MIN_NODES and submit this script again with RUN_DIR=run" in played.said


def test_with_too_few_nodes_left_it_asks_for_all_and_later_for_fewer(job):
    played = job(MIN_NODES=2, WAIT_FOR_NODES=50)
    lose = "echo n2 >$PLAY/lost; echo n3 >>$PLAY/lost; exit 1"
    assert played.run(lose, nodes="n1,n2,n3") == 0
    assert "of its nodes only 'n1' answer, expected 2: queued again" in played.said
    assert asks(played) == [("0", "ask_for 0 3 3 6 18"), ("50", "ask_for 0 2 3 4 12")]
    first, second = played.calls("sbatch")
    assert "--partition=low" in first and "--dependency" not in first
    assert "--dependency=afterany:100 " in second


def test_what_slurm_says_of_a_refused_small_job_is_told(job):
    """The second one asked for all nodes, too, and so did the message."""
    played = job(MIN_NODES=2, WAIT_FOR_NODES=50)
    (played.play / "no_sbatch").touch()
    lose = "echo n2 >$PLAY/lost; echo n3 >>$PLAY/lost; exit 1"
    assert played.run(lose, nodes="n1,n2,n3") == 0
    assert played.said.count("invalid partition specified: low") == 2
    for words in ("NumNodes=3-3 NumTasks=6 NumCPUs=18", "NumNodes=2-3 NumTasks=4 NumCPUs=12"):
        assert f"scontrol update JobId=7 {words}" in played.said
    assert [line for _, line in asks(played)] == ["ask_for 0 3 3 6 18", "ask_for 0 2 3 4 12"]
    assert played.calls("scontrol requeue"), "it waits for all its nodes then"


def test_a_small_job_asks_until_it_is_heard(job):
    """Slurm ignores what a job is asked that is still being ended."""
    played = job(MIN_NODES=2)
    assert played.run("echo n2 >$PLAY/lost; exit 1") == 0
    small = played.play / "small_1"
    (played.play / "deaf").touch()
    played.tell(JobState="PENDING", Restarts=1, NumTasks=8)
    env = {"PATH": f"{played.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    env["PLAY"] = str(played.play)
    done = subprocess.run(["bash", small], env=env, capture_output=True, text=True, check=True)
    assert "job 7: asks for 2 to 2 nodes" in done.stdout
    update = "scontrol update JobId=7 NumNodes=2-2 NumTasks=4 NumCPUs=12"
    assert played.calls("scontrol update") == [update] * 2


@pytest.mark.parametrize("told", [{"JobState": "CANCELLED"}, {"Restarts": 1}, {"Restarts": 2}])
def test_a_small_job_leaves_alone_what_is_not_that_start(job, told):
    played = job(MIN_NODES=2)
    assert played.run("echo n2 >$PLAY/lost; exit 1") == 0
    played.tell(**told)
    env = {"PATH": f"{played.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    env["PLAY"] = str(played.play)
    subprocess.run(["bash", played.play / "small_0"], env=env, check=True)
    assert not played.calls("scontrol update")


WAITS = "until [[ -e $PLAY/asked ]]; do /bin/sleep 0.02; done; exit 75"


@pytest.mark.parametrize(
    ("now", "back"),
    [("n1", "n2,n3"), ("n1,n4", "n2"), ("n1,n4", "n3"), ("n1,n4", "n2,n3")],
)
def test_it_grows_once_as_many_nodes_are_back_as_it_lacks(job, now, back):
    """It waited for each node that it had, by name, though another had come for one of them."""
    played = job(GROW_AFTER=0)
    starts = played.folder / "run" / "starts"
    starts.mkdir(parents=True)
    (starts / "starts.txt").write_text("start 0 7.0.0 then n1,n2,n3\nstop\n")
    (starts / "7.SHORT").write_text("3\n")
    played.tell(Restarts=1, NodeList=now)
    (played.play / "idle").write_text("n9\n")
    played.start(WAITS, nodes=now, restarts=1)
    wait_until(lambda: len(played.calls("sinfo")) > 1, 20, "it looked for idle nodes")
    assert not played.calls("scancel")
    assert "--nodes=n2,n3 --partition=low --states=idle" in played.calls("sinfo")[0]
    (played.play / "idle").write_text(back.replace(",", "\n") + "\n")
    assert played.code() == 0
    assert f"nodes {back} are back: asks the ranks to stop" in played.said
    assert played.calls("scancel") == ["scancel --signal=USR1 7"]
    assert played.calls("scontrol requeue")
    assert [line for _, line in asks(played)] == ["ask_for 1 3 3 6 18", "ask_for 1 1 3 2 6"]


def test_with_all_its_nodes_again_it_does_not_look_for_more(job):
    played = job(GROW_AFTER=0)
    starts = played.folder / "run" / "starts"
    starts.mkdir(parents=True)
    (starts / "starts.txt").write_text("start 0 7.0.0 then n1,n2\nstop\n")
    (starts / "7.SHORT").write_text("2\n")
    assert played.run("exit 0", nodes="n1,n4", restarts=1) == 0
    assert not (starts / "7.SHORT").exists() and not played.calls("sinfo")


def test_no_guard_outlives_the_script(job):
    """The srun of one, still about to start it, ended a step of the job's next start."""
    played = job()
    (played.play / "guards").touch()
    looked = "until grep -q 'sleep 15' $PLAY/calls; do /bin/sleep 0.02; done"
    assert played.run(f"{looked}; exit 75") == 0
    wait_until(lambda: not marked("PLAY", str(played.play)), 10, "its guard was gone")
    assert played.calls("scontrol requeue")


def test_a_guard_queues_the_job_again_once_its_first_node_is_lost(job):
    """It runs the script; with it lost the job did nothing until its time limit."""
    played = job(WAIT_FOR_NODES=50)
    (played.play / "guards").touch()
    played.start("exec /bin/sleep 60")
    wait_until(lambda: played.calls("srun --no-kill"), 20, "it trained")
    wait_until(lambda: len(played.calls("sleep 15")) > 2, 20, "the guard looked")
    assert not played.calls("scontrol requeue")
    played.tell(NodeList="n2")
    wait_until(lambda: played.calls("scontrol requeue"), 20, "the guard queued it again")
    played.tell(JobState="PENDING", Restarts=1, NodeList="(null)")
    said = (played.folder / "run/starts/7.0.guard_n2.txt").read_text()
    assert "job 7: lost its first node n1: queued again" in said
    assert asks(played) == [("0", "ask_for 0 2 2 4 12"), ("50", "ask_for 0 1 2 2 6")]


@pytest.mark.parametrize("code", [2, 4])
def test_what_the_user_changes_is_no_crash(job, code):
    """After three such starts a fourth one, with other settings, was not even tried."""
    played = job()
    starts = [*[f"exit {code}"] * 3, CHECKPOINT.format(step="05") + "; exit 0"]
    assert [played.run(*starts) for _ in range(4)] == [code] * 3 + [0]
