"""The command that starts a run again: what the user typed, with the folder of the run."""

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
_MOST_ANCESTORS: Final = 8  # mpirun, say, has helpers between itself and a rank


def command_again(
    run_folder: Path, words: Sequence[str], pid: int | None = None, proc: Path = Path("/proc")
) -> str:
    """Return a command line that goes on with the run in `run_folder`.

    `words`: the settings of the run as they were typed. A launcher's own arguments are those of
    the process, among the ancestors of this one (`pid`), whose command ends as this one's does.
    `checkpoint.resume` is left out where it would lead elsewhere.
    """
    own = [MODULE, *words]
    launched = _launcher_of(own, os.getpid() if pid is None else pid, proc)
    ahead = [Path(sys.executable).name, "-m"] if launched is None else launched
    kept = [word for word in words if word.lstrip("+").partition("=")[0] != _RESUME[:-1]]
    if not any(word.startswith(_FOLDER) for word in kept):
        kept.append(f"{_FOLDER}{_near(run_folder)}")
    return shlex.join([*ahead, MODULE, *kept])


def _launcher_of(own: Sequence[str], pid: int, proc: Path) -> list[str] | None:
    """Return the words ahead of ours of the outermost command that ends as ours does."""
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
    """Return a command's words without the interpreter that the system put ahead of a script."""
    if len(words) > 1 and Path(words[0]).name.startswith("python") and "/" in words[1]:
        script = Path(words[1])
        if shutil.which(script.name) == words[1]:
            return [script.name, *words[2:]]
    if shutil.which(Path(words[0]).name) == words[0]:
        return [Path(words[0]).name, *words[1:]]
    return list(words)


def _near(folder: Path) -> Path:
    """Return a folder below the current one as seen from there."""
    here = Path.cwd()
    return folder.relative_to(here) if folder.is_relative_to(here) else folder
