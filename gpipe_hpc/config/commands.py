"""Run commands: from the command line to settings, jobs and exit codes, also for sweeps."""

import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from operator import attrgetter
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple

import hydra
import yaml
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from gpipe_hpc.comm.watchdog.output_streams import output_exit_code, print_line, protect_streams
from gpipe_hpc.comm.watchdog.torchrun_report import write_torchrun_error
from gpipe_hpc.comm.watchdog.tracebacks import users_traceback
from gpipe_hpc.config.compose import (
    CONF_VARIABLE,
    compose_config,
    conf_dir,
    load_config,
    overrides_of,
    register_schemas,
)
from gpipe_hpc.config.errors import (
    check_arguments,
    composing_error,
    is_of_composing,
    unknown_option,
)
from gpipe_hpc.config.help import help_of
from gpipe_hpc.errors import ConfigError, GpipeError, NonFiniteError, is_users_mistake
from gpipe_hpc.settings import Config, refuse


class ExitCode(IntEnum):
    """Exit codes of commands; plan, verify and preflight also use 3."""

    DONE = 0
    FAILED = 1
    BAD_CONFIG = 2
    NON_FINITE = 4  # a restart would fail the same way
    REQUEUE = 75
    INTERRUPTED = 128 + signal.SIGINT  # the code of shells


# Unless this variable is set, Hydra prints an error and exits instead of raising it.
_HYDRA_RAISES: Final = "HYDRA_FULL_ERROR"


# PyYAML has the loader in C only if it was built with libyaml.
_YamlLoader: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class CommandJob(NamedTuple):
    """The settings of one run.

    Args:
        config: The settings.
        number: Number of the job in a sweep, from 1; None if it is no sweep.
        words: Overrides from the command line.
        environment: Environment variables from ``hydra.job.env_set``.
    """

    config: Config
    number: int | None
    words: tuple[str, ...]
    environment: Mapping[str, str]


Task = Callable[[CommandJob], int]


def run_jobs(task: Task, command: str, unshared: str | None = None) -> int:
    """Run `task` with the settings of the command line; return the exit code of the process.

    With ``-m`` (--multirun), all jobs are composed first and then run one after the other in this
    process, also after a job that fails. The first exit code that is not 0 is returned.

    Args:
        task: Runs one job and returns its exit code.
        command: Name of the command in `COMMANDS`, whose help ``--help`` prints.
        unshared: Setting with an output path, which must differ between the jobs of a sweep.
    """
    protect_streams()
    words = sys.argv[1:]
    if {"-h", "--help"} & set(words):
        print(help_of(command, words))
        return output_exit_code(ExitCode.DONE)
    try:
        code = _run_all(task, command, unshared)
    except KeyboardInterrupt:
        print_line("\ngpipe_hpc: interrupted")
        return ExitCode.INTERRUPTED
    return code if command == "train" else output_exit_code(code)


def _run_all(task: Task, command: str, unshared: str | None) -> int:
    launcher = _other_launcher(sys.argv[1:])
    try:
        if "torch" in sys.modules:  # commands that need torch import it at their top
            from gpipe_hpc.torch_compat import refuse_unfit_torch

            refuse_unfit_torch()
        with _words(without_launcher(sys.argv[1:]) if launcher else sys.argv[1:]):
            jobs = _composed_jobs(reads_data=command != "draw")
        _refuse_shared(jobs, unshared)
        if launcher:
            return _run_elsewhere(jobs, command, launcher)
    except GpipeError as error:
        return print_error(error)
    if len(jobs) == 1:
        with _environment(jobs[0].environment):
            return task(jobs[0]._replace(number=None))
    return _run_in_turn(task, jobs)


def _other_launcher(words: Sequence[str]) -> str | None:
    """Return the Hydra launcher plugin that a sweep uses; None if jobs run in this process."""
    if not {"-m", "--multirun"} & set(words):
        return None
    chosen = [word.partition("=")[2] for word in words if word.startswith("hydra/launcher=")]
    return None if not chosen or chosen[-1] == "basic" else chosen[-1]


@contextmanager
def _words(words: Sequence[str]) -> Iterator[None]:
    """Return a context manager that replaces the arguments in sys.argv."""
    before = sys.argv
    sys.argv = [before[0], *words]
    try:
        yield
    finally:
        sys.argv = before


def _run_elsewhere(jobs: Sequence[CommandJob], command: str, launcher: str) -> int:
    """Run all jobs with a Hydra launcher; return the first exit code that is not 0."""
    mark = f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{os.getpid()}"
    folder = (Path("runs") / f"sweep_{mark}").absolute()
    print_line(f"gpipe_hpc: starting {len(jobs)} jobs with {launcher}; exit codes in {folder}")
    child = ChildLauncher(f"gpipe_hpc.{command}", folder)
    failure = None
    register_schemas()
    own = [f"hydra.sweep.dir={folder}", "hydra.job.name=gpipe_hpc"]
    with _words([*sys.argv[1:], *own]), _environment({_HYDRA_RAISES: "1"}):
        try:
            hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")(
                child
            )()
        except Exception as error:
            if is_of_composing(error):
                raise composing_error(error) from None
            failure = error  # for example a killed job, or a cluster that accepts none
    ended = ended_jobs(folder)
    if failure is not None and not ended:
        raise ConfigError(
            f"config: hydra/launcher={launcher} ran no job: {type(failure).__name__}: {failure}; "
            f"see {folder}"
        )
    codes = [(job, ended.get(place)) for place, job in enumerate(jobs)]
    failed = [(job, code) for job, code in codes if code != ExitCode.DONE]
    for job, code in failed:
        how = "was killed" if code is None else f"ended with exit code {code}"
        print_line(f"gpipe_hpc: {_heading(job, jobs)} {how}")
    return next((code or ExitCode.FAILED for _, code in failed), ExitCode.DONE)


def exit_code_of(error: Exception) -> int:
    """Return the exit code for an error.

    2 for settings or schedules that cannot work, 4 for a loss or gradient that is NaN or infinite,
    1 for all other errors.
    """
    if isinstance(error, NonFiniteError):
        return ExitCode.NON_FINITE
    return ExitCode.BAD_CONFIG if is_users_mistake(error) else ExitCode.FAILED


def print_error(error: Exception, *, says_kind: bool = False, is_echo: bool = False) -> int:
    """Print an error to standard error, below the frames of the user's code; return its exit code.

    The error is also reported to torchrun.

    Args:
        error: The error.
        says_kind: Begin the message with the class of the error.
        is_echo: Another rank has failed first and printed the cause.
    """
    kinds = (each.__name__ for each in type(error).__mro__)
    kind = f"{next(each for each in kinds if each[0] != '_')}: " if says_kind else ""
    frames = "" if is_echo else users_traceback(error)
    text = f"gpipe_hpc: {kind}{error}"
    print_line(f"{frames}{text}")
    write_torchrun_error(text, is_cause=not is_echo, whole=f"{frames}{text}")
    return exit_code_of(error)


def _composed_jobs(*, reads_data: bool) -> list[CommandJob]:
    jobs: list[CommandJob] = []
    wrong: list[ConfigError] = []

    def collect(composed: DictConfig) -> None:
        own = HydraConfig.get()
        environment = {str(name): str(value) for name, value in own.job.env_set.items()}
        try:
            _refuse_of_hydra(own)
            config = load_config(composed, own, reads_data=reads_data)
            jobs.append(CommandJob(config, len(jobs) + 1, overrides_of(own), environment))
        except ConfigError as error:
            wrong.append(error)

    _refuse_options(sys.argv[1:])
    if not _concerns_hydra(sys.argv[1:]):
        # Hydra's command line would compose all settings twice, first to find out whether it is a
        # sweep: a quarter of the CPU time of a short run, on every rank.
        words = sys.argv[1:]
        return [CommandJob(compose_config(words, reads_data=reads_data), 1, tuple(words), {})]
    check_arguments(_without_options(sys.argv[1:]))
    register_schemas()
    # Hydra writes multirun.yaml for every sweep; conf/config.yaml sends it here.
    with tempfile.TemporaryDirectory(prefix="gpipe_hpc_") as scratch:
        OmegaConf.register_new_resolver("gpipe_hpc.scratch", lambda: scratch, replace=True)
        try:
            with _environment({_HYDRA_RAISES: "1"}):
                hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")(
                    collect
                )()
        except Exception as error:
            if not is_of_composing(error):
                raise
            raise composing_error(error) from None
        except SystemExit as leaving:
            # Only composing has run: Hydra exits with 1 if it cannot compose the settings.
            if leaving.code == ExitCode.FAILED:
                sys.exit(ExitCode.BAD_CONFIG)
            raise
    if wrong:
        raise wrong[0]
    if not jobs and {"-m", "--multirun"} & set(sys.argv[1:]):
        raise ConfigError(
            "config: hydra/launcher returned no jobs, but must compose all jobs of a sweep in this "
            "process, like Hydra's basic launcher; leave it out, or start a run for each job"
        )
    return jobs


def _concerns_hydra(words: Sequence[str]) -> bool:
    """Return whether Hydra may have to do more than compose the settings of one job."""
    is_ours = CONF_VARIABLE not in os.environ  # a conf/ of the user's may configure Hydra
    if not is_ours or any(word.startswith("-") or "hydra" in word for word in words):
        return True
    # So may an edited conf/ of a checkout. Hydra's and OmegaConf's parser in Python would take a
    # tenth of the time of composing for this file.
    try:
        own = yaml.load((conf_dir() / "config.yaml").read_text("utf-8"), _YamlLoader)
    except yaml.YAMLError:
        return True  # Hydra will report it
    return not isinstance(own, dict) or own.get("hydra") != _OWN_HYDRA


# Settings of Hydra in the package's conf/: write no files, and keep the working directory.
_OWN_HYDRA: Final = {
    "run": {"dir": "."},
    "sweep": {"dir": "${gpipe_hpc.scratch:}", "subdir": "."},
    "output_subdir": None,
    "job": {"chdir": False},
}
# Options of Hydra's command line.
_OPTIONS: Final = frozenset(
    {
        *("-m", "--multirun", "-r", "--run", "--resolve", "--version", "-h"),
        *("-c", "--cfg", "-p", "--package", "-i", "--info", "-sc", "--shell-completion"),
        *("-cp", "--config-path", "-cn", "--config-name", "-cd", "--config-dir"),
        *("--experimental-rerun", "--help", "--hydra-help"),
    }
)


def _refuse_options(words: Sequence[str]) -> None:
    """Raise ConfigError for options such as ``--steps=5``, for which Hydra prints its own usage."""
    for word in words:
        known = word.partition("=")[0] in _OPTIONS
        if word.startswith("-") and not known:
            raise unknown_option(word)


def _without_options(words: Sequence[str]) -> list[str]:
    """Return the arguments without Hydra's options and their values."""
    pairs = zip(["", *words], words, strict=False)
    return [
        word
        for before, word in pairs
        if not word.startswith("-") and ("=" in word or not before.startswith("-"))
    ]


def _refuse_of_hydra(own: Any) -> None:
    """Raise ConfigError for Hydra settings that have no effect here, such as another sweeper."""
    if own.job.chdir:
        raise refuse("hydra.job.chdir", "false", True, "leave it out: a run writes to run.dir only")
    sweeper = own.runtime.choices.get("hydra/sweeper")
    if sweeper not in (None, "basic"):
        remedy = "let the sweeper start a command for each trial"
        raise refuse("hydra/sweeper", "basic, since jobs return no value", sweeper, remedy)


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Return a context manager that sets environment variables."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _refuse_shared(jobs: Sequence[CommandJob], setting: str | None) -> None:
    if setting is None:
        return
    seen: set[Path] = set()
    for job in jobs:
        path = attrgetter(setting)(job.config)
        if path is None:
            continue
        whole = Path(path).resolve()
        if whole in seen:
            raise refuse(
                setting,
                f"a different value for each of the {len(jobs)} jobs of a sweep",
                path,
                f"use a setting that differs, for example '{setting}=runs/${{optimizer.lr}}'",
            )
        seen.add(whole)


def _run_in_turn(task: Task, jobs: Sequence[CommandJob]) -> int:
    failed: list[tuple[CommandJob, int]] = []
    for job in jobs:
        print_line(f"gpipe_hpc: {_heading(job, jobs)}")
        try:
            with _environment(job.environment):
                code = task(job)
        except Exception:
            # The following jobs run nevertheless.
            traceback.print_exc()
            code = ExitCode.FAILED
        sys.stdout.flush()
        if code != ExitCode.DONE:
            failed.append((job, code))
    for job, code in failed:
        print_line(f"gpipe_hpc: {_heading(job, jobs)} ended with exit code {code}")
    return failed[0][1] if failed else ExitCode.DONE


def _heading(job: CommandJob, jobs: Sequence[CommandJob]) -> str:
    own = [word for word in job.words if not all(word in each.words for each in jobs)]
    return f"job {job.number} of {len(jobs)} ({' '.join(own)})"


_STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_LEFT_S: Final = 300.0
"""Seconds that a process of a requeued job waits for Slurm to end it."""


def without_launcher(words: Sequence[str]) -> list[str]:
    """Return the arguments without those that configure Hydra's launcher."""
    own = ("hydra/launcher=", "hydra.launcher.", "+hydra.launcher.", "++hydra.launcher.")
    return [word for word in words if not word.startswith(own)]


class ChildLauncher:
    """Callable that a Hydra launcher pickles and runs in each process of a job.

    It starts the command as a child process, which receives the job's signals, and writes its exit
    code to a folder.
    """

    def __init__(self, module: str, folder: Path) -> None:
        self._module, self._folder = module, folder

    def __call__(self, composed: object) -> int:
        """Run the job whose settings Hydra has composed; return its exit code."""
        own = HydraConfig.get()
        words = [str(word) for word in own.overrides.task]
        environment = os.environ | {str(k): str(v) for k, v in own.job.env_set.items()}
        code = self._run(words, environment)
        if code == ExitCode.REQUEUE and "SLURM_JOB_ID" in os.environ:
            _queue_again()
        if _is_first():
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / f"{own.job.num}.code").write_text(f"{code}\n")
        return code

    def _run(self, words: list[str], environment: dict[str, str]) -> int:
        """Run the command as a child, forward stop signals to it, and return its exit code."""
        command = [sys.executable, "-m", self._module, *words]
        for number in _STOP_SIGNALS:
            # The child inherits that the signal is ignored, until it has installed its handler.
            signal.signal(number, signal.SIG_IGN)
        child = subprocess.Popen(command, env=environment)

        def forward(number: int, frame: FrameType | None) -> None:
            child.send_signal(signal.SIGUSR1)

        for number in _STOP_SIGNALS:
            signal.signal(number, forward)
        return child.wait()


def _is_first() -> bool:
    """Return whether this is the first process of its job."""
    return os.environ.get("SLURM_PROCID", os.environ.get("SUBMITIT_LOCAL_GLOBALID", "0")) == "0"


def _queue_again() -> None:
    """Requeue this Slurm job and wait for Slurm to end it, or the launcher would report success."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if _is_first():
        subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=True)
    time.sleep(_LEFT_S)


def ended_jobs(folder: Path) -> dict[int, int]:
    """Return the exit codes of the jobs that have ended, by job number from 0."""
    return {int(path.stem): int(path.read_text()) for path in folder.glob("*.code")}
