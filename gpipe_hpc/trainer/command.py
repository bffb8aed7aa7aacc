"""Implementation of the command `python -m gpipe_hpc.train`."""

import logging
import sys
from collections.abc import Sequence
from functools import partial
from typing import Final

import torch
import torch.distributed as dist

from gpipe_hpc.comm.watchdog.output_streams import print_line
from gpipe_hpc.comm.world.launcher import detect_launch
from gpipe_hpc.comm.world.world import World
from gpipe_hpc.config import CommandJob, ExitCode, check_config, print_error, run_jobs
from gpipe_hpc.errors import ConfigError, GpipeError, PeerError
from gpipe_hpc.settings import Config
from gpipe_hpc.trainer.loop import run_training
from gpipe_hpc.trainer.process_exit import end_soon
from gpipe_hpc.trainer.run.folder import default_run_folder
from gpipe_hpc.trainer.run.launchers import is_one_of_several_agents
from gpipe_hpc.trainer.signals import REQUEUE_EXIT_CODE, ProcessExit, StopRequest
from gpipe_hpc.trainer.start_world import join_world, send_stop_notice

log = logging.getLogger("gpipe_hpc.train")

_AGENTS_S: Final = 3.0  # until all agents of torchrun have noticed a new host


def run_command(stop: StopRequest) -> None:
    """Compose the settings from the command line, train, and exit.

    Exit codes: 0 done, 1 failed, 2 invalid settings, 4 a loss or gradient that is not finite, 75
    stopped by a signal (run the command again to continue). A sweep (-m) returns the first code
    that is not 0.
    """

    def task(job: CommandJob) -> int:
        if job.number is None:
            return _train(job.config, stop, sys.argv[1:])
        return _train_of_sweep(job, stop)

    code = run_jobs(task, "train", unshared="run.dir")
    has_failed = code in (ExitCode.FAILED, ExitCode.BAD_CONFIG, ExitCode.NON_FINITE)
    if code == REQUEUE_EXIT_CODE and is_one_of_several_agents():
        # Each agent stops its workers when hosts join; if its workers end before that, it counts
        # this as a failure, of which it allows --max-restarts.
        stop.await_signal(_AGENTS_S)
    # Exit quickly: the process may soon be killed.
    if (has_failed and dist.is_initialized()) or code == REQUEUE_EXIT_CODE:
        end_soon(code)
    sys.exit(code)


def _train_of_sweep(job: CommandJob, stop: StopRequest) -> int:
    """Train one job of a sweep in this process, in its own folder."""
    if stop.is_requested:
        print_line("gpipe_hpc: stopped by a signal before this job")
        return REQUEUE_EXIT_CODE
    if job.config.run.dir is None:
        job.config.run.dir = str(default_run_folder() / str(job.number))
    num_threads = torch.get_num_threads()
    stop.reset()
    try:
        _refuse_launcher()
        return _train(job.config, stop, job.words)
    except GpipeError as error:
        return print_error(error)
    finally:
        torch.set_num_threads(num_threads)


def _refuse_launcher() -> None:
    # Connections between ranks belong to one run: its backend, timeouts and failures.
    size = detect_launch().world_size
    if size > 1:
        raise ConfigError(
            f"launch: a sweep (-m) runs in one process, but the launcher has started "
            f"{size}; launch each job separately, without -m"
        )


def _tell_others(world: World, ending: ProcessExit) -> None:
    """Notify the other ranks that a signal stopped this one; not after Ctrl-C, which stops all."""
    if ending.code == REQUEUE_EXIT_CODE:
        world.fail(ending.words, is_stop=True)


def _train(config: Config, stop: StopRequest, words: Sequence[str]) -> int:
    world: World | None = None
    try:
        with stop.before_exit(partial(send_stop_notice, config)):
            doubts = check_config(config, detect_launch().world_size, may_choose=True)
            world = join_world(config)
        joined = world
        with (
            stop.joined(lambda: joined.has_peer_failure),
            stop.before_exit(partial(_tell_others, world)),
        ):
            return run_training(config, world, stop, doubts, words)
    except GpipeError as error:
        stop.note_failure()
        log.debug("traceback of the error", exc_info=True)
        is_echo = isinstance(error, PeerError) or getattr(world, "speaks", None) is False
        code = print_error(error, says_kind=not isinstance(error, ConfigError), is_echo=is_echo)
        # Another rank was asked to stop too and exited earlier: the run can be continued. An error
        # of a rank itself would occur again.
        is_stopped = isinstance(error, PeerError) and (error.is_stop or stop.was_terminated)
        return REQUEUE_EXIT_CODE if is_stopped and code == ExitCode.FAILED else code
