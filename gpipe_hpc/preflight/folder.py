"""Check that all ranks see the same run folder and can write to it."""

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from gpipe_hpc.comm.collectives.group import barrier
from gpipe_hpc.comm.world.world import World, collective_errors
from gpipe_hpc.errors import ConfigError, os_remedy
from gpipe_hpc.trainer.run.identity import RunIdentity, run_id

SEEN_S: Final = 10.0
"""Time for other hosts to see a new file; NFS clients cache that a file does not exist."""
_PAUSE_S: Final = 0.05


def await_run(run: RunIdentity, rank: int, limit_s: float = SEEN_S) -> None:
    """Wait until this rank sees the run folder that rank 0 created; raise ConfigError otherwise."""
    if not _await(lambda: run_id(run.folder) == run.name, limit_s):
        raise _not_shared(run.folder, rank, "the run.json of rank 0", limit_s)


def check_folder(world: World, folder: Path | None, limit_s: float = SEEN_S) -> Path:
    """Check that each rank can read a file that another rank writes to the run folder.

    Collective. `folder` is given on rank 0, which creates it and removes it again if it was new.
    Returns the folder. Raises ConfigError on all ranks if some rank cannot write, or does not see
    the file.
    """
    with collective_errors(world, "checking the run folder"):
        is_new = folder is not None and not folder.exists()
        made: tuple[str, Path] = world.world_group.broadcast_object(_create_folder(folder), root=0)
        token, path = made
        own = path / _name(token, world.rank)
        try:
            _write(own, token, world.rank)
            barrier(world.world_group)
            other = (world.rank + 1) % world.size
            seen = path / _name(token, other)
            if not _await(lambda: _text(seen) == f"{token} {other}", limit_s):
                raise _not_shared(path, world.rank, f"the file of rank {other}", limit_s)
            barrier(world.world_group)
        finally:
            with contextlib.suppress(OSError):
                own.unlink()
        barrier(world.world_group)
        if is_new:
            with contextlib.suppress(OSError):
                path.rmdir()
    return path


def _create_folder(folder: Path | None) -> tuple[str, Path] | None:
    """Create the folder on rank 0; return a token for this check, and the path."""
    if folder is None:
        return None
    path = folder.absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(path, 0, error) from error
    return secrets.token_hex(8), path


def _name(token: str, rank: int) -> str:
    return f".preflight_{token}_{rank}"


def _write(path: Path, token: str, rank: int) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(f"{token} {rank}")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise _unwritable(path.parent, rank, error) from error


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _await(holds: Callable[[], bool], limit_s: float) -> bool:
    deadline_s = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_PAUSE_S)
    return True


def _unwritable(folder: Path, rank: int, error: OSError) -> ConfigError:
    remedy = os_remedy(error) or "check the folder"
    return ConfigError(
        f"run.dir: rank {rank} on {socket.gethostname()} cannot write to {folder} "
        f"({error.strerror}), but all ranks must; {remedy}, or set run.dir to another folder"
    )


def _not_shared(folder: Path, rank: int, what: str, limit_s: float) -> ConfigError:
    return ConfigError(
        f"run.dir: rank {rank} on {socket.gethostname()} does not see {what} in {folder} after "
        f"{limit_s:g} s, so ranks do not share this folder; set run.dir to a folder on a file "
        f"system that all hosts share, mounted at the same path in all containers"
    )
