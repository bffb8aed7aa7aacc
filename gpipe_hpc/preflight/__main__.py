"""Entry point of `python -m gpipe_hpc.preflight`."""

import sys
from dataclasses import replace
from typing import Final

import torch.distributed as dist

from gpipe_hpc.comm.watchdog.torchrun_report import write_torchrun_error
from gpipe_hpc.comm.world.launcher import detect_launch
from gpipe_hpc.comm.world.world import World
from gpipe_hpc.config import CommandJob, ExitCode, check_config, print_error, run_jobs
from gpipe_hpc.errors import ConfigError, GpipeError, PeerError
from gpipe_hpc.preflight.guard import limit_start_time
from gpipe_hpc.preflight.run import preflight
from gpipe_hpc.settings import Config
from gpipe_hpc.trainer.process_exit import end_soon
from gpipe_hpc.trainer.start_world import join_world

UNFIT_EXIT_CODE: Final = 3


def main() -> None:
    """Compose the settings from the command line, check all ranks, and exit.

    Exit codes: 0 ready (possibly with warnings), 1 ranks cannot work together, 2 invalid settings,
    3 a requirement of the run is not met.
    """
    code = run_jobs(_task, "preflight")
    if code in (ExitCode.FAILED, ExitCode.BAD_CONFIG) and dist.is_initialized():
        end_soon(code)
    sys.exit(code)


def _task(job: CommandJob) -> int:
    """Check all ranks; return the exit code (0 on ranks that print no report)."""
    world: World | None = None
    try:
        launch = detect_launch()
        doubts = check_config(job.config, launch.world_size)
        config = _with_short_timeout(job.config)
        with limit_start_time(launch, config.comm.timeout_s):
            world = join_world(config)
        report = preflight(config, world)
    except GpipeError as error:
        _name_own_limit(error, job.config)
        is_echo = isinstance(error, PeerError) or getattr(world, "speaks", None) is False
        return print_error(error, says_kind=not isinstance(error, ConfigError), is_echo=is_echo)
    if report is None:
        return ExitCode.DONE
    report.doubts[:0] = [doubt.removeprefix("config: ") for doubt in doubts]
    print(report, flush=True)
    if report.is_fit:
        return ExitCode.DONE
    write_torchrun_error(f"gpipe_hpc: not fit: {'; '.join(report.lacking)}", is_cause=True)
    return UNFIT_EXIT_CODE


def _with_short_timeout(config: Config) -> Config:
    """Return the config with a short communication timeout, suitable for the checks."""
    comm, limit_s = config.comm, config.comm.reach_s
    comm = replace(comm, timeout_s=min(comm.timeout_s, limit_s))
    return replace(config, comm=comm)


def _name_own_limit(error: GpipeError, config: Config) -> None:
    """Replace comm.timeout_s in an error message by comm.reach_s, the limit of the checks."""
    if len(error.args) == 1 and isinstance(error.args[0], str):
        text = error.args[0]
        if config.comm.timeout_s >= config.comm.reach_s:
            text = text.replace("comm.timeout_s", "comm.reach_s")
        error.args = (text,)


if __name__ == "__main__":
    main()
