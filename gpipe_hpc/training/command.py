"""What `python -m gpipe_hpc.train` does, from the command line to the exit code."""

import logging
import sys

import hydra
from omegaconf import DictConfig

from gpipe_hpc.comm.allocator import keep_freed_memory
from gpipe_hpc.comm.launcher import detect_launch
from gpipe_hpc.comm.start import start_world
from gpipe_hpc.config import check_config, conf_dir, load_config, register_schemas
from gpipe_hpc.errors import ConfigError, GpipeError
from gpipe_hpc.training.loop import run_training
from gpipe_hpc.training.signals import StopRequest

log = logging.getLogger("gpipe_hpc.train")
BAD_CONFIG_EXIT_CODE = 2
FAILED_EXIT_CODE = 1


def run_command(stop: StopRequest) -> None:
    """Compose the settings from the command line, train, and exit.

    Exit codes: 0 done, 1 failed, 2 settings that cannot work, 75 stopped by a signal (run it
    again to go on).
    """
    register_schemas()

    def task(composed: DictConfig) -> None:
        sys.exit(_train(composed, stop))

    decorate = hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")
    decorate(task)()


def _train(composed: DictConfig, stop: StopRequest) -> int:
    try:
        config = load_config(composed)
        doubts = check_config(config, detect_launch().world_size)
        if config.train.keep_freed_memory:
            keep_freed_memory()
        world = start_world(
            device=config.train.device,
            backend=config.comm.backend,
            timeout_s=config.comm.timeout_s,
            loopback=config.comm.loopback,
            shares_memory=config.comm.shared_memory,
        )
        return run_training(config, world, stop, doubts)
    except ConfigError as error:
        print(f"gpipe_hpc: {error}", file=sys.stderr, flush=True)
        return BAD_CONFIG_EXIT_CODE
    except GpipeError as error:
        print(f"gpipe_hpc: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        log.debug("where it happened", exc_info=True)
        return FAILED_EXIT_CODE
