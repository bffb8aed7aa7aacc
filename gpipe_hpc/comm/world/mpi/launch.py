"""Rank of this process under MPI, and address of the rendezvous store.

MPI transfers tensors. The membership check, the watchdog and small lookups use a store served by
rank 0; its address is broadcast over MPI, so no environment variable is needed.
"""

import os
import socket
from typing import Final

from gpipe_hpc.comm.world.launcher import Environment, Launch, detect_launch
from gpipe_hpc.comm.world.mpi.library import MpiLibrary
from gpipe_hpc.errors import LaunchError
from gpipe_hpc.setting_names import setting

_LOOPBACK: Final = "127.0.0.1"
# An address reserved for documentation; used to find the default route, nothing is sent.
_OUTSIDE: Final = ("192.0.2.1", 9)


def launch_by(library: MpiLibrary, environ: Environment | None = None) -> Launch:
    """Return the launch of this process according to its launcher and to MPI, which must agree.

    Under a launcher without known variables, only MPI provides the rank. A collective call. Raises
    LaunchError if MPI has another number or order of ranks.
    """
    env = os.environ if environ is None else environ
    if library.size == 1:
        return _validated(detect_launch(env), library)
    place = library.neighbours()
    is_together = place.local_size == library.size
    told = library.broadcast_from_first(
        _meeting_place(env, is_together) if library.rank == 0 else None
    )
    launch = detect_launch({**env, **{name: env.get(name, told[name]) for name in told}})
    if launch.launcher != "none":
        return _validated(launch, library)
    return Launch(
        rank=library.rank,
        world_size=library.size,
        local_rank=place.local_rank,
        local_size=place.local_size,
        launcher="mpi",
        master_addr=told["MASTER_ADDR"],
        master_port=int(told["MASTER_PORT"]),
    )


def _validated(launch: Launch, library: MpiLibrary) -> Launch:
    if (launch.rank, launch.world_size) == (library.rank, library.size):
        return launch
    raise LaunchError(
        f"launch: comm.backend=mpi: this process is rank {launch.rank} of {launch.world_size} "
        f"according to {launch.launcher}, but rank {library.rank} of {library.size} according to "
        f"{library.name}; {_remedy(launch)}"
    )


def _remedy(launch: Launch) -> str:
    if launch.launcher in ("torchrun", "environment"):
        return (
            "start the ranks with the mpiexec of this MPI, or with srun --mpi=pmi2, without RANK "
            f"and WORLD_SIZE in their environment; or use {setting('comm.backend', 'gloo')}"
        )
    if launch.launcher == "srun":
        return (
            "start the step with srun --mpi=pmi2 or --mpi=pmix, whichever this MPI was built for; "
            f"or use {setting('comm.backend', 'gloo')}"
        )
    return (
        "the mpiexec that started it belongs to another MPI library than the one loaded by "
        "mpi4py: use the mpiexec of mpi4py's library, or make mpi4py load the other library "
        "(MPI4PY_MPIABI, LD_LIBRARY_PATH)"
    )


def _meeting_place(env: Environment, is_together: bool) -> dict[str, str]:
    """Return MASTER_ADDR and MASTER_PORT of the store, as set in the environment or chosen here."""
    addr = env.get("MASTER_ADDR") or (_LOOPBACK if is_together else own_address())
    return {"MASTER_ADDR": addr, "MASTER_PORT": env.get("MASTER_PORT") or str(_free_port())}


def own_address() -> str:
    """Return an address of this machine that other machines may reach."""
    try:
        named = [str(at[4][0]) for at in socket.getaddrinfo(socket.gethostname(), None)]
    except OSError:
        named = []
    outside = [each for each in named if not each.startswith("127.") and each != "::1"]
    if outside:
        return outside[0]
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(_OUTSIDE)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise LaunchError(
            f"launch: the ranks are on several machines, but no address is known at which others "
            f"can reach {socket.gethostname()}: its name resolves to {', '.join(named) or 'none'}, "
            f"and there is no default route ({error}); set MASTER_ADDR on all ranks"
        ) from error


def _free_port() -> int:
    with socket.create_server(("", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port
