"""The command that restarts a run: the command as typed, with the run's folder."""

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

MODULE: Final = "gpipe_hpc.train"
_FOLDER: Final = "run.dir="
_RESUME: Final = "checkpoint.resume="
_MOST_ANCESTORS: Final = 8  # mpirun, for example, has helpers between itself and a rank


def restart_command(
    run_folder: Path, words: Sequence[str], pid: int | None = None, proc: Path = Path("/proc")
) -> str:
    """Return a command line that continues the run in `run_folder`.

    The launcher and its arguments are taken from the outermost ancestor of process `pid` whose
    command line ends with this command. `checkpoint.resume` is removed.

    Args:
        run_folder: the folder of the run.
        words: the settings of the run, as typed.
        pid: the process whose ancestors are searched; None: this one.
        proc: the /proc file system.
    """
    own = [MODULE, *words]
    launched = _launcher_of(own, os.getpid() if pid is None else pid, proc)
    ahead = [Path(sys.executable).name, "-m"] if launched is None else launched
    kept = [word for word in words if word.lstrip("+").partition("=")[0] != _RESUME[:-1]]
    if not any(word.startswith(_FOLDER) for word in kept):
        kept.append(f"{_FOLDER}{_relative(run_folder)}")
    return shlex.join([*ahead, MODULE, *kept])


def _launcher_of(own: Sequence[str], pid: int, proc: Path) -> list[str] | None:
    """Return the words before `own` in the outermost ancestor command line that ends with `own`.

    None if no ancestor has such a command line.
    """
    found = None
    for _ in range(_MOST_ANCESTORS):
        try:
            words = (proc / str(pid) / "cmdline").read_bytes().decode(errors="replace")
            status = (proc / str(pid) / "stat").read_text()
        except OSError:
            break
        each = words.split("\0")[:-1]
        if each[-len(own) :] == list(own) and len(each) > len(own):
            found = each[: -len(own)]
        pid = int(status.rpartition(")")[2].split()[1])
    return None if found is None else _as_typed(found)


def _as_typed(words: Sequence[str]) -> list[str]:
    """Return a command without the interpreter that the system prepends to a script."""
    if len(words) > 1 and Path(words[0]).name.startswith("python") and "/" in words[1]:
        script = Path(words[1])
        if shutil.which(script.name) == words[1]:
            return [script.name, *words[2:]]
    if shutil.which(Path(words[0]).name) == words[0]:
        return [Path(words[0]).name, *words[1:]]
    return list(words)


def _relative(folder: Path) -> Path:
    """Return a folder relative to the current one, if it is inside that."""
    here = Path.cwd()
    return folder.relative_to(here) if folder.is_relative_to(here) else folder
