"""From the settings to this process's place among the ranks."""

import gc

from gpipe_hpc.comm.world.start import say_stopped, start_world
from gpipe_hpc.comm.world.world import World
from gpipe_hpc.device.device import Device
from gpipe_hpc.device.host.allocator import give_back_freed_memory, keep_freed_memory
from gpipe_hpc.settings import Config
from gpipe_hpc.trainer.signals import INTERRUPTED_EXIT_CODE, Ending


def keep_memory(config: Config) -> None:
    """Let this process keep freed memory or give it back, as the settings say, before layers run.

    A forecast whose layers pay for page faults that a run avoids is too slow.
    """
    if config.train.keep_freed_memory:
        keep_freed_memory()
    else:
        give_back_freed_memory()


def settle_memory(device: Device) -> None:
    """Give back what the start has used and freed, and begin a new peak: training starts here."""
    gc.collect()
    device.trim()
    device.reset_peak()


def join_world(config: Config) -> World:
    """Start or join the ranks as the settings say; see `start_world` for what it raises."""
    keep_memory(config)
    return start_world(
        device=config.train.device,
        backend=config.comm.backend,
        timeout_s=config.comm.timeout_s,
        mpi_device_pointers=config.comm.mpi_device_pointers,
        loopback=config.comm.loopback,
        shares_memory=config.comm.shared_memory,
        secret_file=config.comm.secret_file,
        silence_s=config.comm.silence_s,
        stall_s=config.comm.stall_s,
        ends_process=True,
        interface=config.comm.interface,
        reach_s=config.comm.reach_s,
    )


def leave_notice(config: Config, ending: Ending) -> None:
    """Let ranks that wait in `join_world` know that a signal ends this one.

    Ctrl-C reaches all ranks, and its user waits.
    """
    if ending.code == INTERRUPTED_EXIT_CODE:
        return
    say_stopped(
        ending.words,
        backend=config.comm.backend,
        loopback=config.comm.loopback,
        secret_file=config.comm.secret_file,
    )
