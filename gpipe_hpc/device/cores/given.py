"""What a process was given before it bound itself, for those parts of it that go everywhere."""

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

from gpipe_hpc.device.cores.machine import allowed_cpus, cpus_text, parse_cpus

# "PID:CPUS", as "4711:0-63": processes that the bound one starts find it, too.
_VARIABLE: Final = "GPIPE_HPC_GIVEN_CPUS"
_THREADS: Final = Path("/proc/self/task")


def given_cpus() -> frozenset[int] | None:
    """Return the CPUs that the launcher gave this process, or the one that started it.

    Those that it may use, where it has not bound itself; None where the system does not tell.
    """
    owner, _, cpus = os.environ.get(_VARIABLE, "").partition(":")
    if owner in (str(os.getpid()), str(os.getppid())):
        return parse_cpus(cpus)
    return allowed_cpus()


def go_everywhere() -> None:
    """Let the calling thread, and what it starts, use all CPUs that the launcher gave.

    For what reads data: the first and the last rank of a pipeline read, and the cores of the ranks
    between them have room at times.
    """
    cpus = given_cpus()
    if cpus is not None and cpus != allowed_cpus():
        with suppress(OSError):  # taken away meanwhile
            os.sched_setaffinity(0, cpus)


def keep_on(cpus: frozenset[int]) -> Callable[[], None]:
    """Keep this process on some CPUs, its threads and those to come; return what undoes it.

    Threads that somebody has put elsewhere stay there. Raises OSError where the system refuses.
    """
    before = frozenset(os.sched_getaffinity(0))
    inherited = os.environ.get(_VARIABLE)
    os.sched_setaffinity(0, cpus)
    _move(before, cpus)
    os.environ[_VARIABLE] = f"{os.getpid()}:{cpus_text(before)}"
    return partial(_undo, cpus, before, inherited)


def user_chose_threads(environ: Mapping[str, str] = os.environ, agent: Path | None = None) -> bool:
    """Say whether the user has set how many threads libraries use, by OMP_NUM_THREADS or MKL's.

    torchrun sets OMP_NUM_THREADS=1 for several ranks where nobody has set it: that is no wish. Its
    agent, the parent, was started without. `agent`: the file with what that one was started with.
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
        with suppress(OSError):  # it has ended
            if os.sched_getaffinity(int(each.name)) == old:
                os.sched_setaffinity(int(each.name), new)
