"""Run a generated command in this process, in a shell or by torchrun, and check how it ends."""

import contextlib
import faulthandler
import io
import json
import math
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch
import yaml

import gpipe_hpc.draw.__main__ as draw
import gpipe_hpc.export.__main__ as export
import gpipe_hpc.verify.__main__ as verify
from gpipe_hpc import plan
from gpipe_hpc.comm.world.threads import run_on_threads
from gpipe_hpc.config import CommandJob, check_config, print_error, run_jobs
from gpipe_hpc.errors import ConfigError, GpipeError
from gpipe_hpc.trainer import loop
from gpipe_hpc.trainer.command import run_command
from gpipe_hpc.trainer.loop import run_training
from gpipe_hpc.trainer.signals import StopRequest
from tests.generated.cases import Case
from tests.support import patience

LIMIT_S = 60.0  # far more than a case takes
SPARE_BYTES = 6 << 30  # address space that a case may use in addition to that of this process

# Exit codes other than 0 that are valid results of a command; plan: 3, the model does not fit.
_OTHERS = {"plan": (3,), "verify": ()}
# Exit codes of a rank after SIGTERM: killed during startup, or after its own signal handling.
_ENDED_BY_LAUNCHER = (-signal.SIGTERM, 128 + signal.SIGTERM)
# Used instead of /dev/shm itself, which other runs on this machine use.
_SHARED = Path(f"/dev/shm/generated_{os.getpid()}")


class Hang(BaseException):
    """Raised if a case exceeds its time limit; not an Exception, so that no handler catches it."""


class Ended(NamedTuple):
    """Result of a command: exit code and output; `error` is the traceback of an exception."""

    code: int | str | None
    stdout: str
    stderr: str
    error: str = ""


NOBODY = Ended(None, "", "", "no rank has ended by itself")


class Leftovers(NamedTuple):
    """Files, shared memory and threads that exist before or after a command."""

    files: frozenset[str]
    shared: frozenset[str]
    threads: frozenset[threading.Thread]

    @classmethod
    def of(cls, folder: Path) -> "Leftovers":
        files = frozenset(str(path.relative_to(folder)) for path in folder.rglob("*"))
        shared = frozenset(str(path) for path in _SHARED.rglob("*") if path.is_file())
        return cls(files, shared, frozenset(threading.enumerate()))


def make_place(folder: Path, trained: Path | None) -> None:
    """Create the files and folders that generated values name.

    `trained` is the folder of an earlier run, which is copied to ``run``.
    """
    folder.mkdir()
    _SHARED.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    np.save(folder / "inputs.npy", rng.normal(size=(24, 4)).astype(np.float32))
    np.save(folder / "targets.npy", rng.integers(0, 3, size=24))
    np.save(folder / "tokens.npy", rng.integers(0, 16, size=900).astype(np.uint16))
    np.save(folder / "data.npy", np.zeros((3, 0)))
    (folder / "text.txt").write_text("nothing here is new under the sun, but some is true; " * 12)
    lines = (json.dumps({"text": f"number {each} is like all others"}) for each in range(40))
    (folder / "text.jsonl").write_text("\n".join(lines))
    for name in ("file.txt", "empty", "a=b"):
        (folder / name).write_text("" if name == "empty" else "a file\n")
    for name in ("folder", "with space", "damaged/checkpoints/step_00000001"):
        (folder / name).mkdir(parents=True)
    (folder / "damaged/config.yaml").write_text("{")
    (folder / "damaged/checkpoints/step_00000001/manifest.json").write_text("[1]")
    (folder / "broken").symlink_to("nowhere")
    (folder / "loop").symlink_to("loop")
    (folder / "link").symlink_to("folder")
    if trained is not None:
        shutil.copytree(trained, folder / "run", symlinks=True)


def ended(case: Case, folder: Path, limit_s: float = LIMIT_S) -> Ended:
    """Run a case in `folder` in this process; return its result."""
    out, err = io.StringIO(), io.StringIO()
    code: int | str | None = None
    error = ""
    threads, cores = torch.get_num_threads(), os.sched_getaffinity(0)
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.object(sys, "argv", [f"gpipe_hpc.{case.command}", *case.words]),
        mock.patch.object(sys, "path", [*sys.path]),
        mock.patch.dict(os.environ, {"HOME": str(folder)}),
        mock.patch.object(loop, "DEFAULT_FOLDER", _SHARED),
        _little_memory(),
    ):
        try:
            with _limited(limit_s * patience()):
                _call(case)
        except SystemExit as leaving:
            code = leaving.code
        except BaseException:
            error = traceback.format_exc()
    torch.set_num_threads(threads)
    os.sched_setaffinity(0, cores)
    return Ended(code or 0, out.getvalue(), err.getvalue(), error)


def _call(case: Case) -> None:
    mains = {"plan": plan.main, "draw": draw.main, "verify": verify.main, "export": export.main}
    if case.command in mains:
        mains[case.command]()
    elif case.ranks == 1:
        run_command(StopRequest())
    else:
        task = _OnThreads(case.ranks)
        sys.exit(run_jobs(task, "train", unshared="run.dir"))


class _OnThreads:
    """A training job with its ranks as threads, which reports errors as the command does."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def __call__(self, job: CommandJob) -> int:
        try:
            doubts = check_config(job.config, self._ranks)
            codes = run_on_threads(
                self._ranks,
                lambda world: run_training(job.config, world, StopRequest(), doubts),
            )
        except GpipeError as error:
            return print_error(error, says_kind=not isinstance(error, ConfigError))
        assert len(set(codes)) == 1, codes
        return codes[0]


@contextlib.contextmanager
def _limited(limit_s: float) -> Iterator[None]:
    """Context that raises `Hang` after a time limit, and ends the process if that has no effect."""

    def end(number: int, frame: FrameType | None) -> None:
        others = "".join(
            "".join(traceback.format_stack(each)) for each in sys._current_frames().values()
        )
        raise Hang(f"longer than {limit_s:.0f} s; {others}")

    began_s = time.monotonic()
    handler = signal.signal(signal.SIGALRM, end)
    left_s, _ = signal.setitimer(signal.ITIMER_REAL, limit_s)
    faulthandler.dump_traceback_later(2 * limit_s, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left_s:
            signal.setitimer(signal.ITIMER_REAL, max(1.0, left_s - (time.monotonic() - began_s)))


@contextlib.contextmanager
def _little_memory() -> Iterator[None]:
    """Context that limits the address space of this process."""
    own = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (own + SPARE_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def shell_line(case: Case) -> str:
    """Return a case as a shell command line."""
    assert case.ranks == 1, "a shell starts one process"
    words = " ".join(map(shlex.quote, case.words))
    return f"{shlex.quote(sys.executable)} -m gpipe_hpc.{case.command} {words}"


def ended_command(case: Case, folder: Path, environ: dict[str, str]) -> Ended:
    """Run a case in `folder` as a shell command."""
    line = f"ulimit -v {(8 << 30) // 1024}; exec {shell_line(case)}"
    limit_s = 3 * LIMIT_S * patience()
    try:
        done = subprocess.run(
            ["sh", "-c", os.fsencode(line)],
            cwd=folder,
            env=environ | {"HOME": str(folder)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired:
        return Ended(None, "", "", f"Hang: longer than {limit_s:.0f} s")
    return Ended(done.returncode, *(t.decode(errors="replace") for t in (done.stdout, done.stderr)))


def ended_by_torchrun(case: Case, folder: Path, environ: dict[str, str]) -> list[Ended]:
    """Run a case in `folder` by torchrun; return exit code and output of each rank.

    The exit code of a rank is None if torchrun terminated it because another rank failed first.
    """
    limit_s = 3 * LIMIT_S * patience()
    logs = folder.with_name(f"{folder.name}_logs")
    launch = [
        "--standalone",
        f"--nproc_per_node={case.ranks}",
        f"--log_dir={logs}",
        "--redirects=3",
        "--monitor-interval=1",  # seconds, so that ranks that end together are seen together
    ]
    words = [sys.executable, "-m", "torch.distributed.run", *launch, "-m", "gpipe_hpc.train"]
    with subprocess.Popen(
        [*words, *map(os.fsencode, case.words)],
        cwd=folder,
        env=environ | {"HOME": str(folder)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as launcher:
        error = ""
        try:
            _, told = launcher.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            told = end_launcher(launcher)
            error = f"Hang: longer than {limit_s:.0f} s"
    ranks = sorted(logs.glob("*/attempt_0/*"), key=lambda path: int(path.name))
    codes = {} if error else codes_told(told, len(ranks) if launcher.returncode == 0 else 0)
    found = [Ended(codes.get(int(rank.name)), *_logged(rank), error) for rank in ranks]
    shutil.rmtree(logs, ignore_errors=True)
    return found


def codes_told(told: str, num_good: int = 0) -> dict[int, int]:
    """Return the exit codes in torchrun's report, by rank; 0 for the `num_good` successful ranks.

    Ranks that torchrun terminated because another rank failed are omitted.
    """
    if num_good:
        return dict.fromkeys(range(num_good), 0)
    asked = set(re.findall(r"Sending process (\d+) closing signal", told))
    each = r"^\s*rank +: (\d+) .*\n\s*exitcode +: (-?\d+) \(pid: (\d+)\)"
    return {
        int(rank): int(code)
        for rank, code, pid in re.findall(each, told, re.MULTILINE)
        if pid not in asked or int(code) not in _ENDED_BY_LAUNCHER
    }


def end_launcher(launcher: subprocess.Popen[str], grace_s: float = 60.0) -> str:
    """Terminate a launcher that hangs, and its ranks; return its output."""
    launcher.terminate()  # it terminates its ranks, and kills those still running after 30 s
    try:
        return launcher.communicate(timeout=grace_s)[1]
    except subprocess.TimeoutExpired:
        pass
    own = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
    for child in map(int, own.read_text().split()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    launcher.kill()
    return launcher.communicate()[1]


def _logged(rank: Path) -> list[str]:
    return [(rank / name).read_text(errors="replace") for name in ("stdout.log", "stderr.log")]


def faults(case: Case, found: Ended, folder: Path, before: Leftovers) -> list[str]:
    """Return descriptions of everything wrong with how a case ended; empty if nothing is."""
    return [*_ended_badly(case, found), *_left(case, found, folder, before)]


def _ended_badly(case: Case, found: Ended) -> Iterator[str]:
    if found.error:
        yield f"raised: {found.error}"
        return
    if "Traceback (most recent call last)" in found.stderr + found.stdout:
        yield f"a traceback: {found.stderr}"
    if found.code == 0 or found.code in _OTHERS.get(case.command, ()):
        return
    messages = re.findall(r"^gpipe_hpc: .*", found.stderr, re.MULTILINE)
    if found.code != 2 and not _is_said_reason(found.code, messages):
        yield f"exit code {found.code}: {found.stderr}"
    if len(messages) != 1:
        yield f"{len(messages)} messages: {found.stderr}"
        return
    (message,) = messages
    said = found.stderr[found.stderr.index(message) :]
    if ";" not in said:
        yield f"not of the form 'where: what is wrong; remedy': {said}"
    if not any(part in said for word in case.words for part in _parts(word)):
        yield f"names none of the settings: {said}"


def _parts(word: str) -> Iterator[str]:
    """Yield the texts by which a message may name a setting: argument, name or value."""
    name, _, value = word.lstrip("+~").partition("=")
    if name == "model":
        yield "layers."  # messages name a layer of the model by its index
    yield from (each for each in (word, repr(word), repr(word)[1:-1], name) if each)
    yield from (each for each in (name.rpartition(".")[2], value) if len(each) > 3)


def _is_said_reason(code: object, messages: list[str]) -> bool:
    """Return whether a run failed for a valid reason that occurs only in training (code 4)."""
    return code == 4 and any("NonFiniteError: " in message for message in messages)


def _left(case: Case, found: Ended, folder: Path, before: Leftovers) -> Iterator[str]:
    for _ in range(50):  # threads that are about to end
        after = Leftovers.of(folder)
        threads = {each for each in after.threads - before.threads if each.is_alive()}
        if not threads or "train.compile=true" in case.words:  # torch keeps compiler threads
            break
        time.sleep(0.02)
    else:
        yield f"threads are left: {threads}"
    if shared := after.shared - before.shared:
        yield f"left in shared memory: {sorted(shared)}"
    files = after.files - before.files
    if found.code == 2 and files:
        yield f"files are left of a refused start: {sorted(files)}; {found.stderr}"
    if found.code == 0:
        yield from _untrained(folder, files)


def _untrained(folder: Path, files: frozenset[str]) -> Iterator[str]:
    """Yield a description of each missing result of a run that ended successfully."""
    for name in files:
        path = folder / name
        if path.name != "config.yaml" or not path.is_file():
            continue
        train = yaml.safe_load(path.read_text("utf-8"))["train"]
        last = train["steps"] if train["stop_at"] is None else min(train["steps"], train["stop_at"])
        metrics = path.parent / "metrics.jsonl"
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        losses = [line["loss"] for line in map(json.loads, lines) if "loss" in line]
        if last and not losses:
            yield f"no step was trained in {path.parent.name}"
        if not all(map(math.isfinite, losses)):
            yield f"losses {losses}"


def tried(case: Case, folder: Path, trained: Path | None) -> tuple[Ended, list[str]]:
    """Run a case in a new `folder` in this process; return its result and what is wrong with it.

    `trained` is the folder of an earlier run, which the case finds as ``run``.
    """
    make_place(folder, trained)
    before = Leftovers.of(folder)
    try:
        found = ended(case, folder)
        return found, faults(case, found, folder, before)
    finally:
        for each in (folder, _SHARED):
            shutil.rmtree(each, ignore_errors=True)


def tried_command(
    case: Case, folder: Path, trained: Path | None, environ: dict[str, str]
) -> tuple[Ended, list[str]]:
    """Run a case as `tried` does, but as a process of a shell."""
    make_place(folder, trained)
    before = Leftovers.of(folder)
    try:
        found = ended_command(case, folder, environ)
        return found, faults(case, found, folder, before)
    finally:
        for each in (folder, _SHARED):
            shutil.rmtree(each, ignore_errors=True)


def tried_by_torchrun(
    case: Case, folder: Path, trained: Path | None, environ: dict[str, str]
) -> tuple[list[Ended], list[str]]:
    """Run a case as `tried` does, but by torchrun; return the result of each rank."""
    make_place(folder, trained)
    before = Leftovers.of(folder)
    try:
        ended = ended_by_torchrun(case, folder, environ)
        wrong = [*ranks_ended_badly(case, ended)]
        codes = [each.code for each in ended if each.code is not None]
        wrong += _left(case, Ended(max(codes, default=None), "", ""), folder, before)
        return ended, wrong
    finally:
        for each in (folder, _SHARED):
            shutil.rmtree(each, ignore_errors=True)


def ranks_ended_badly(case: Case, ended: list[Ended]) -> Iterator[str]:
    """Yield descriptions of what is wrong with how the ranks ended.

    If a start is refused, each rank that torchrun did not terminate prints the reason once, and all
    exit with the same code. Only rank 0 prints the reason if all ranks find the error before they
    connect.
    """
    if len(ended) != case.ranks:
        yield f"{len(ended)} ranks began"
    own = [each for each in ended if each.code is not None or each.error]
    if not own:
        yield "no rank has ended by itself"
    if len(codes := {each.code for each in own}) > 1:
        yield f"one end, and several exit codes: {codes}"
    if not any("gpipe_hpc: " in each.stderr or each.code == 0 for each in own):
        yield "no rank has said why it ended"
    for each in ended:
        if each.code is None and not each.error:
            said = each.stderr + each.stdout
            if "Traceback (most recent call last)" in said:
                yield f"a traceback: {said}"
        else:
            yield from _ended_badly(case, each)


def train_first(folder: Path) -> Path:
    """Train a small run in a new `folder`, for cases that read a run; return the run folder."""
    make_place(folder, None)
    words = ("model=mlp", "model.widths=[6,8,3]", "data=synthetic_vectors", "data.width=6")
    sizes = ("data.num_classes=3", "train.batch_size=4", "pipeline.microbatches=2")
    short = ("train.steps=1", "train.validate_every=0", "train.validate_batches=1")
    case = Case("train", (*words, *sizes, *short, "pipeline.partition=uniform", "run.dir=run"))
    found = ended(case, folder)
    assert found.code == 0 and not found.error, found
    return folder / "run"
