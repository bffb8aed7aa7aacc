"""Connect the ranks of a run, and configure the memory allocator of the process."""

import gc

from gpipe_hpc.comm.world.start import announce_stop, start_world
from gpipe_hpc.comm.world.world import World
from gpipe_hpc.device.device import Device
from gpipe_hpc.device.host.allocator import keep_freed_memory, return_freed_memory
from gpipe_hpc.settings import Config
from gpipe_hpc.trainer.signals import INTERRUPTED_EXIT_CODE, ProcessExit


def keep_memory(config: Config) -> None:
    """Configure whether the allocator keeps freed memory (train.keep_freed_memory).

    Call this before layers are timed, so that their times do not include page faults that the run
    avoids.
    """
    if config.train.keep_freed_memory:
        keep_freed_memory()
    else:
        return_freed_memory()


def settle_memory(device: Device) -> None:
    """Free unused memory and reset the peak-memory counter, before the first training step."""
    gc.collect()
    device.trim()
    device.reset_peak()


def join_world(config: Config) -> World:
    """Connect this process with the other ranks, calling `start_world` with the settings."""
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


def send_stop_notice(config: Config, ending: ProcessExit) -> None:
    """Notify ranks that wait in `join_world` that a signal stopped this rank.

    Does nothing after Ctrl-C, which reaches all ranks itself.
    """
    if ending.code == INTERRUPTED_EXIT_CODE:
        return
    announce_stop(
        ending.words,
        backend=config.comm.backend,
        secret_file=config.comm.secret_file,
    )
