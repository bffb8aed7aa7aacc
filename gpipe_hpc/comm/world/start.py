"""Create the world of this process: join an existing process group or start one."""

import atexit
import logging
import os
from contextlib import suppress
from datetime import timedelta
from typing import Final

import torch.distributed as dist

from gpipe_hpc.comm.net.gloo import default_group_settings, listening_address
from gpipe_hpc.comm.net.interfaces import requested_interface
from gpipe_hpc.comm.net.sealed_store import SealedStore
from gpipe_hpc.comm.net.secret import SECRET_VARIABLE, job_secret
from gpipe_hpc.comm.transport.thread_hub import ThreadHub
from gpipe_hpc.comm.watchdog.settings import DEFAULT_SILENCE_S, WatchdogConfig
from gpipe_hpc.comm.watchdog.timeouts import DEFAULT_REACH_S, checked_timeout
from gpipe_hpc.comm.watchdog.tracebacks import OwnFramesStripped
from gpipe_hpc.comm.watchdog.uncaught import (
    install_failure_hook,
    install_start_hook,
    remove_failure_hook,
)
from gpipe_hpc.comm.world import rendezvous
from gpipe_hpc.comm.world.launcher import Launch, detect_launch
from gpipe_hpc.comm.world.mpi.launch import launch_by
from gpipe_hpc.comm.world.mpi.library import MpiLibrary, open_mpi
from gpipe_hpc.comm.world.mpi.process_group import NAME as MPI_NAME
from gpipe_hpc.comm.world.mpi.process_group import register
from gpipe_hpc.comm.world.processes import ProcessWorld, leave_default_group
from gpipe_hpc.comm.world.threads import ThreadWorld
from gpipe_hpc.comm.world.world import World, collective_errors
from gpipe_hpc.device.device import Device, device_of_rank
from gpipe_hpc.device.host.flight_recorder import disable_flight_recorder
from gpipe_hpc.device.host.machine import started_by
from gpipe_hpc.errors import ConfigError, LaunchError
from gpipe_hpc.setting_names import setting

log = logging.getLogger("gpipe_hpc.comm")

DEFAULT_TIMEOUT_S = 600.0
MPI: Final = "mpi"


def start_world(
    *,
    device: str = "auto",
    backend: str = "auto",
    timeout_s: float = DEFAULT_TIMEOUT_S,
    shares_memory: bool = True,
    secret_file: str | None = None,
    silence_s: float = DEFAULT_SILENCE_S,
    stall_s: float | None = None,
    ends_process: bool = False,
    interface: str | None = None,
    reach_s: float = DEFAULT_REACH_S,
) -> World:
    """Return the world of this process.

    Joins the default process group if there is one. Otherwise reads the launcher's environment
    (torchrun, Open MPI, MPICH, MVAPICH2, srun) and starts the group. Without a launcher the world
    is this process alone and no connection is opened.

    Args:
        device: ``auto``, ``cpu``, a device type such as ``cuda`` (NVIDIA and AMD) or ``xpu``
            (Intel), or one device such as ``cuda:0``; see `device_of_rank`.
        backend: ``auto``, ``gloo``, ``mpi`` (by mpi4py, under an MPI launcher), or torch's backend
            for the device, such as ``nccl`` or ``xccl``.
        timeout_s: time after which a rank that waits for another gives up.
        shares_memory: whether ranks of one host send each other CPU tensors, and sum small ones, in
            shared memory.
        secret_file: file with the job's secret; None for GPIPE_HPC_SECRET, else this user's own
            secret if all ranks are on one machine, else none.
        silence_s: see `WatchdogConfig`; not used in a world of one rank.
        stall_s: see `WatchdogConfig`.
        ends_process: see `WatchdogConfig`.
        interface: name or subnet of the network interface for other machines; None for the route to
            MASTER_ADDR.
        reach_s: time within which the host of MASTER_ADDR must respond, if only by a refusal.
    """
    with OwnFramesStripped():
        _watch_place()
        world = _start(
            device,
            backend,
            timeout_s,
            shares_memory,
            secret_file,
            WatchdogConfig(silence_s, stall_s, ends_process),
            interface,
            checked_timeout(reach_s, "reach_s"),
        )
        if isinstance(world, ProcessWorld):
            install_failure_hook(world)
            with collective_errors(world, "joining the other ranks"):
                world.claim(device)
    return world


def announce_stop(told: str, *, backend: str, secret_file: str | None) -> None:
    """Notify ranks that wait for this one in `start_world` that a signal has ended this rank.

    Takes some seconds. `told` is the message; the other arguments are those of `start_world`. Under
    torchrun or MPI the launcher ends the other ranks.
    """
    if backend == MPI:
        return
    with suppress(LaunchError, ConfigError):
        launch = detect_launch()
        secret = job_secret(launch.one_machine and _sees_users_files(launch), secret_file)
        rendezvous.announce_stop(launch, told, secret)


# Programs of each launcher that are ancestors of its ranks.
_PROGRAMS: Final = {
    "srun": ("slurmstepd",),
    "openmpi": ("mpirun", "mpiexec", "orted", "prte"),
    "mpich": ("hydra", "mpiexec"),
    "mvapich2": ("hydra", "mpiexec", "mpirun", "mpispawn"),
}


def _sees_users_files(launch: Launch) -> bool:
    """Return whether all ranks of this machine see the same file of this user.

    This is not certain if the launcher is outside of a container: each rank may then run in a
    container of its own and would create its own secret.
    """
    if launch.launcher == "torchrun":
        return True
    return started_by(_PROGRAMS.get(launch.launcher, ())) is not None


def _watch_place() -> None:
    """Set the rank for reports of uncaught errors, so that an error of all ranks appears only once.

    The rank is taken from the environment; errors in the environment are reported later.
    """
    if dist.is_initialized():
        install_start_hook(dist.get_rank(), dist.get_world_size())
        return
    with suppress(LaunchError):
        # Without resolving MASTER_ADDR, which may take long.
        place = detect_launch({"MASTER_ADDR": "unknown", "MASTER_PORT": "0", **os.environ})
        install_start_hook(place.rank, place.world_size)


def _start(
    device: str,
    backend: str,
    timeout_s: float,
    shares_memory: bool,
    secret_file: str | None,
    watchfulness: WatchdogConfig,
    interface: str | None,
    reach_s: float,
) -> World:
    timeout_s = checked_timeout(timeout_s, "timeout_s")
    if dist.is_initialized() and backend == MPI and dist.get_backend() != MPI_NAME:
        raise ConfigError(
            f"comm.backend=mpi: the default process group already exists and uses "
            f"{dist.get_backend()}; call start_world before init_process_group, or "
            f"leave comm.backend unset"
        )
    joined = None if dist.is_initialized() else _joined(backend, timeout_s)
    launch, library = joined or (None, None)
    if launch is None:
        chosen = device_of_rank(device, None)
        # It is unknown whether all ranks are on one machine, so no secret is created.
        secret = job_secret(one_machine=False, secret_file=secret_file)
        return ProcessWorld(
            chosen,
            timeout_s,
            shares_memory=shares_memory,
            job_secret=secret,
            watchfulness=watchfulness,
            address=_address_of_choice(interface),
            reach_s=reach_s,
        )
    install_start_hook(launch.rank, launch.world_size)  # MPI alone may know
    chosen = device_of_rank(device, launch.local_rank)
    chosen_backend = _backend(backend, chosen)
    if launch.world_size == 1:
        return ThreadWorld(ThreadHub(1, timeout_s), 0, chosen)
    secret = job_secret(launch.one_machine and _sees_users_files(launch), secret_file)
    if secret is None and launch.rank == 0:
        log.warning(
            "launch: no secret is set, so any program that reaches this job's ports can "
            "join or modify it; on a shared network set %s or comm.secret_file for all ranks",
            SECRET_VARIABLE,
        )
    met = rendezvous.open_rendezvous(
        launch, timeout_s, secret, interface=interface, reach_s=reach_s
    )
    store, address = met.store, listening_address(met.address)
    if library is not None:
        register(library, chosen)
    if secret is not None and chosen_backend in ("gloo", MPI_NAME):
        # Not for NCCL, whose threads use the store when they must not wait for the GIL.
        store = SealedStore(store, secret.derive("store"))
    remove_failure_hook()
    if not chosen.is_accelerator:  # NCCL uses the recorder to name the collective that hangs
        disable_flight_recorder()
    with default_group_settings(address):
        dist.init_process_group(
            chosen_backend,
            store=store,
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=timedelta(seconds=timeout_s),
        )
    install_start_hook(launch.rank, launch.world_size)
    # The group calls the store from C++ and does not keep the Python object alive.
    atexit.register(leave_default_group, store)
    return ProcessWorld(
        chosen,
        timeout_s,
        shares_memory=shares_memory,
        job_secret=secret,
        watchfulness=watchfulness,
        address=met.address,
        reach_s=reach_s,
    )


def _address_of_choice(interface: str | None) -> str | None:
    """Return the address of the interface named in the settings; None if none is named."""
    found = requested_interface(interface) if interface is not None else None
    return None if found is None else found.address


def _joined(backend: str, timeout_s: float) -> tuple[Launch, MpiLibrary | None]:
    """Return the launch of this process, and the MPI library if it is used with several ranks."""
    if backend != MPI:
        return detect_launch(), None
    library = open_mpi()
    atexit.register(library.finish, timeout_s)  # registered first, so it runs last
    launch = launch_by(library)
    return launch, library if launch.world_size > 1 else None


def _backend(name: str, device: Device) -> str:
    """Return torch's backend string; CPU tensors (objects, flags) always use Gloo."""
    if name == MPI:
        return MPI_NAME
    if name not in ("auto", "gloo", device.backend):
        raise ConfigError(
            f"comm.backend: expected auto, gloo, mpi or torch's backend for {device.type} devices "
            f"({device.backend}), got {name!r}; choose one of them"
        )
    if device.backend == "gloo" or name == "gloo":
        return "gloo"
    if not dist.is_backend_available(device.backend):
        raise ConfigError(
            f"comm.backend: this torch was built without {device.backend}, the backend for "
            f"{device.type} devices; use {setting('comm.backend', 'gloo')}, which copies through "
            f"host memory, or another torch build"
        )
    return f"cpu:gloo,{device.type}:{device.backend}"
