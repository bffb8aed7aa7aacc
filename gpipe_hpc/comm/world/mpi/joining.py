"""Which rank this process is under MPI, and where the ranks meet besides it.

MPI carries tensors. The ranks' roll call, the failure watch and what they look up of one another
stay on a store that rank 0 serves; MPI tells all where that is, so no variable has to.
"""

import os
import socket
from typing import Final

from gpipe_hpc.comm.world.launcher import Environment, Launch, detect_launch
from gpipe_hpc.comm.world.mpi.library import Library
from gpipe_hpc.errors import LaunchError
from gpipe_hpc.setting_names import setting

_LOOPBACK: Final = "127.0.0.1"
# Told by no one: the way to it is the way out of this machine, and nothing is sent there.
_OUTSIDE: Final = ("192.0.2.1", 9)


def launch_by(library: Library, environ: Environment | None = None) -> Launch:
    """Return this process's place, by its launcher and by MPI, which must agree.

    Under a launcher that sets no variables that we know, MPI alone says it. Every rank of MPI calls
    it. Raises LaunchError where MPI has another number of ranks, or counts them otherwise.
    """
    env = os.environ if environ is None else environ
    if library.size == 1:
        return _checked(detect_launch(env), library)
    place = library.neighbours()
    is_together = place.local_size == library.size
    told = library.told_by_first(_meeting_place(env, is_together) if library.rank == 0 else None)
    launch = detect_launch({**env, **{name: env.get(name, told[name]) for name in told}})
    if launch.launcher != "none":
        return _checked(launch, library)
    return Launch(
        rank=library.rank,
        world_size=library.size,
        local_rank=place.local_rank,
        local_size=place.local_size,
        launcher="mpi",
        master_addr=told["MASTER_ADDR"],
        master_port=int(told["MASTER_PORT"]),
    )


def _checked(launch: Launch, library: Library) -> Launch:
    if (launch.rank, launch.world_size) == (library.rank, library.size):
        return launch
    raise LaunchError(
        f"launch: comm.backend=mpi: expected MPI to call this process what {launch.launcher} calls "
        f"it, rank {launch.rank} of {launch.world_size}, got rank {library.rank} of {library.size} "
        f"by {library.name}; {_remedy(launch)}"
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
        "the mpiexec that started it belongs to another MPI library than the one that mpi4py has "
        "loaded: use that library's own mpiexec, or let mpi4py load the other (MPI4PY_MPIABI, "
        "LD_LIBRARY_PATH)"
    )


def _meeting_place(env: Environment, is_together: bool) -> dict[str, str]:
    """Return where rank 0 serves the store; what is set in its environment counts."""
    addr = env.get("MASTER_ADDR") or (_LOOPBACK if is_together else own_address())
    return {"MASTER_ADDR": addr, "MASTER_PORT": env.get("MASTER_PORT") or str(_free_port())}


def own_address() -> str:
    """Return an address of this machine that others may reach."""
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
            f"launch: the ranks are on several machines, expected an address by which others reach "
            f"{socket.gethostname()}, got {', '.join(named) or 'none'} for its name and no way out "
            f"({error}); set MASTER_ADDR to one on all ranks"
        ) from error


def _free_port() -> int:
    with socket.create_server(("", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port
