"""Find this process's place among the ranks: join what exists, or start it."""

import atexit
import logging
from datetime import timedelta

import torch
import torch.distributed as dist

from gpipe_hpc.comm.device import Accelerator, Device, HostDevice, automatic_kind
from gpipe_hpc.comm.forming import connecting
from gpipe_hpc.comm.joining.launcher import detect_launch
from gpipe_hpc.comm.joining.rendezvous import rendezvous
from gpipe_hpc.comm.joining.sealed_store import SealedStore
from gpipe_hpc.comm.joining.secret import SECRET_VARIABLE, job_secret
from gpipe_hpc.comm.processes import ProcessWorld, leave_default_group
from gpipe_hpc.comm.thread_hub import ThreadHub
from gpipe_hpc.comm.threads import ThreadWorld
from gpipe_hpc.comm.timeouts import checked_timeout
from gpipe_hpc.comm.tracebacks import OwnFramesLeftOut
from gpipe_hpc.comm.uncaught import unwatch, watch_start, watch_uncaught
from gpipe_hpc.comm.watch.settings import DEFAULT_SILENCE_S, Watchfulness
from gpipe_hpc.comm.world import World
from gpipe_hpc.errors import ConfigError

log = logging.getLogger("gpipe_hpc.comm")

DEFAULT_TIMEOUT_S = 600.0


def start_world(
    *,
    device: str = "auto",
    backend: str = "auto",
    timeout_s: float = DEFAULT_TIMEOUT_S,
    loopback: bool | None = None,
    shares_memory: bool = True,
    secret_file: str | None = None,
    silence_s: float = DEFAULT_SILENCE_S,
    stall_s: float | None = None,
    ends_process: bool = False,
) -> World:
    """Return the world of this process.

    Joins the default process group if there is one. Otherwise asks the launcher's environment
    (torchrun, Open MPI, MPICH, MVAPICH2, srun) and starts the group; without a launcher the
    world is this process alone and nothing is opened.

    `device`: auto | cpu | cuda. `backend`: auto | gloo | nccl. `timeout_s`: how long a rank
    waits for another before it gives up and says so. `loopback`: listen on this machine alone;
    None means when all ranks are on it. `shares_memory`: ranks of one host with CPU tensors hand
    boundaries over in shared memory. `secret_file`: where the job's secret lies; None for
    GPIPE_HPC_SECRET, else this user's own where all ranks are on one machine, else none.
    `silence_s`, `stall_s`, `ends_process`: see `Watchfulness`; a world of one rank has no use for
    them.
    """
    with OwnFramesLeftOut():
        world = _start(
            device,
            backend,
            timeout_s,
            loopback,
            shares_memory,
            secret_file,
            Watchfulness(silence_s, stall_s, ends_process),
        )
    if isinstance(world, ProcessWorld):
        watch_uncaught(world)
    return world


def _start(
    device: str,
    backend: str,
    timeout_s: float,
    loopback: bool | None,
    shares_memory: bool,
    secret_file: str | None,
    watchfulness: Watchfulness,
) -> World:
    launch = None if dist.is_initialized() else detect_launch()
    if launch is None:
        watch_start(dist.get_rank(), dist.get_world_size())
    else:
        watch_start(launch.rank, launch.world_size)
    timeout_s = checked_timeout(timeout_s, "timeout_s")
    if launch is None:
        chosen = _device(device, local_rank=None)
        # Whether its ranks are on one machine is not known here, so no secret is made for them.
        secret = job_secret(one_machine=False, secret_file=secret_file)
        return ProcessWorld(
            chosen,
            timeout_s,
            shares_memory=shares_memory,
            job_secret=secret,
            watchfulness=watchfulness,
        )
    chosen = _device(device, launch.local_rank)
    if launch.world_size == 1:
        return ThreadWorld(ThreadHub(1, timeout_s), 0, chosen)
    secret = job_secret(launch.one_machine, secret_file)
    if secret is None and launch.rank == 0:
        log.warning(
            "launch: no secret, so whoever reaches this job's ports can join or change it; where "
            "others can, set %s or comm.secret_file for all ranks",
            SECRET_VARIABLE,
        )
    store = rendezvous(launch, timeout_s, loopback, secret)
    chosen_backend = _backend(backend, chosen)
    if secret is not None and chosen_backend == "gloo":
        # NCCL's own threads ask the store at times when they must not wait for Python.
        store = SealedStore(store, secret.derive("store"))
    unwatch()
    with connecting(lazily=True):  # we use it for nothing: our groups are small ones
        dist.init_process_group(
            chosen_backend,
            store=store,
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=timedelta(seconds=timeout_s),
        )
    watch_start(launch.rank, launch.world_size)
    # The group calls the store from C++ and does not keep the Python object alive.
    atexit.register(leave_default_group, store)
    return ProcessWorld(
        chosen,
        timeout_s,
        shares_memory=shares_memory,
        job_secret=secret,
        watchfulness=watchfulness,
    )


def _device(name: str, local_rank: int | None) -> Device:
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device: expected auto, cpu or cuda, got {name!r}")
    available = automatic_kind().type == "cuda"
    if name == "cuda" and not available:
        raise ConfigError(
            "device: expected a CUDA device, got a torch that sees none; use device=cpu, "
            "or check the driver and the torch build"
        )
    if name == "cpu" or not available:
        return HostDevice()
    if local_rank is None:
        return Accelerator(torch.device("cuda", torch.accelerator.current_device_index()))
    chosen = Accelerator(torch.device("cuda", local_rank % torch.accelerator.device_count()))
    chosen.use()
    return chosen


def _backend(name: str, device: Device) -> str:
    """Return torch's backend string; CPU tensors (words, flags) always travel over Gloo."""
    if name not in ("auto", "gloo", "nccl"):
        raise ConfigError(f"backend: expected auto, gloo or nccl, got {name!r}")
    wants_nccl = name == "nccl" or (name == "auto" and device.type == "cuda")
    if not wants_nccl:
        return "gloo"
    if not dist.is_nccl_available() or device.type != "cuda":
        raise ConfigError(
            f"backend: expected a CUDA device and a torch with NCCL for backend={name}, got "
            f"device {device.type}; use comm.backend=gloo"
        )
    return "cpu:gloo,cuda:nccl"
