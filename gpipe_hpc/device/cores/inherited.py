"""The CPUs that the launcher gave to this process, before it bound itself to some of them."""

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

from gpipe_hpc.device.cores.machine import allowed_cpus, cpus_text, parse_cpus

# Format "PID:CPUS", such as "4711:0-63"; inherited by child processes.
_VARIABLE: Final = "GPIPE_HPC_GIVEN_CPUS"
_THREADS: Final = Path("/proc/self/task")


def inherited_cpus() -> frozenset[int] | None:
    """Return the CPUs that the launcher gave this process or its parent.

    If neither has bound itself, these are the CPUs that the process may use now. None if the system
    does not report them.
    """
    owner, _, cpus = os.environ.get(_VARIABLE, "").partition(":")
    if owner in (str(os.getpid()), str(os.getppid())):
        return parse_cpus(cpus)
    return allowed_cpus()


def use_inherited_cpus() -> None:
    """Let the calling thread and its child processes use all CPUs that the launcher gave.

    Used by data loading: only the first and last ranks of a pipeline load data, and the cores of
    the ranks between them are idle at times.
    """
    cpus = inherited_cpus()
    if cpus is not None and cpus != allowed_cpus():
        with suppress(OSError):  # the CPUs may have been withdrawn since
            os.sched_setaffinity(0, cpus)


def bind_process(cpus: frozenset[int]) -> Callable[[], None]:
    """Bind all threads of this process to `cpus`; return a function that restores their affinity.

    Threads with another affinity than the process are left alone. Raises OSError if the system
    refuses.
    """
    before = frozenset(os.sched_getaffinity(0))
    inherited = os.environ.get(_VARIABLE)
    os.sched_setaffinity(0, cpus)
    _move(before, cpus)
    os.environ[_VARIABLE] = f"{os.getpid()}:{cpus_text(before)}"
    return partial(_undo, cpus, before, inherited)


def user_chose_threads(environ: Mapping[str, str] = os.environ, agent: Path | None = None) -> bool:
    """Return whether the user has set OMP_NUM_THREADS or MKL_NUM_THREADS.

    torchrun sets OMP_NUM_THREADS=1 for several ranks if the variable is unset; that does not count.
    It is recognised by the environment of torchrun's agent, the parent process. `agent` is the path
    of the file with that environment.
    """
    if "MKL_NUM_THREADS" in environ:
        return True
    if environ.get("OMP_NUM_THREADS") != "1" or "TORCHELASTIC_RUN_ID" not in environ:
        return "OMP_NUM_THREADS" in environ
    path = agent or Path(f"/proc/{os.getppid()}/environ")
    try:
        return b"\0OMP_NUM_THREADS=" in b"\0" + path.read_bytes()
    except OSError:
        return True


def _undo(cpus: frozenset[int], before: frozenset[int], inherited: str | None) -> None:
    if inherited is None:
        os.environ.pop(_VARIABLE, None)
    else:
        os.environ[_VARIABLE] = inherited
    with suppress(OSError):
        os.sched_setaffinity(0, before)
        _move(cpus, before)


def _move(old: frozenset[int], new: frozenset[int]) -> None:
    for each in _THREADS.iterdir():
        with suppress(OSError):  # the thread may have ended
            if os.sched_getaffinity(int(each.name)) == old:
                os.sched_setaffinity(int(each.name), new)
