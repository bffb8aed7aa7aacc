"""Join the ranks of a run, and memory settings of the process."""

import gc

from gpipe_hpc.comm.world.start import say_stopped, start_world
from gpipe_hpc.comm.world.world import World
from gpipe_hpc.device.device import Device
from gpipe_hpc.device.host.allocator import give_back_freed_memory, keep_freed_memory
from gpipe_hpc.settings import Config
from gpipe_hpc.trainer.signals import INTERRUPTED_EXIT_CODE, Ending


def keep_memory(config: Config) -> None:
    """Configure whether the allocator keeps freed memory (train.keep_freed_memory).

    Call it before layers are measured: a forecast must not include page faults that a run avoids.
    """
    if config.train.keep_freed_memory:
        keep_freed_memory()
    else:
        give_back_freed_memory()


def settle_memory(device: Device) -> None:
    """Release memory freed during the start and reset the peak memory, before training."""
    gc.collect()
    device.trim()
    device.reset_peak()


def join_world(config: Config) -> World:
    """Start or join the ranks according to the settings; raises the errors of `start_world`."""
    keep_memory(config)
    return start_world(
        device=config.train.device,
        backend=config.comm.backend,
        timeout_s=config.comm.timeout_s,
        shares_memory=config.comm.shared_memory,
        secret_file=config.comm.secret_file,
        silence_s=config.comm.silence_s,
        stall_s=config.comm.stall_s,
        ends_process=True,
        interface=config.comm.interface,
        reach_s=config.comm.reach_s,
    )


def leave_notice(config: Config, ending: Ending) -> None:
    """Notify ranks that wait in `join_world` that a signal ends this one.

    Not after Ctrl-C, which reaches all ranks itself.
    """
    if ending.code == INTERRUPTED_EXIT_CODE:
        return
    say_stopped(
        ending.words,
        backend=config.comm.backend,
        secret_file=config.comm.secret_file,
    )
