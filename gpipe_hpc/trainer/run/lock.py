"""Exclusive lock of a run folder; the lock of a dead run is taken over.

The lock file is created under a unique name and hard-linked to its final name, which is atomic,
also over NFS. It names host, process and job, and its owner updates its modification time every few
seconds. A process that finds a lock checks, on the same machine, whether the owner is alive, and
for another machine, whether the file was modified recently.

The lock with token T of a dead owner goes to the process that links the name `LOCK.after.T`, which
again only one process can do; it then renames its file to `LOCK`.
"""

import contextlib
import errno
import json
import logging
import os
import re
import socket
import stat
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple

from gpipe_hpc.device.host.machine import shared_identity
from gpipe_hpc.errors import RunFolderError
from gpipe_hpc.small_files import Number, OrNull, mismatch, read_json

log = logging.getLogger("gpipe_hpc.train")

LOCK_FILE: Final = "LOCK"
BEAT_S: Final = 5.0
STALE_S: Final = 60.0
"""Seconds without a heartbeat after which an owner on another machine counts as dead."""
WAIT_S: Final = 75.0
"""Seconds that a restarted run waits for the end of the previous one."""
_POLL_S: Final = 0.25
_JOBS: Final = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID", "TORCHELASTIC_RUN_ID")
_MOST_BYTES: Final = 2**16
_TOKEN: Final = re.compile(r"\w{1,64}").fullmatch  # used in file names
_NUMBER: Final = Number(0, is_whole=True)
_OWNER: Final = {
    **dict.fromkeys(("token", "host", "machine", "since"), str),
    **dict.fromkeys(("pid", "pid_started"), _NUMBER),
    "job": OrNull(str),
}
_NO_LINKS: Final = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV}


class LockOwner(NamedTuple):
    """The process that holds a lock; `machine` identifies the boot and the PID namespace."""

    token: str
    host: str
    machine: str
    pid: int
    pid_started: int  # clock ticks after boot; distinguishes processes with a reused PID
    job: str | None
    since: str

    def named(self) -> str:
        """Return a description of the owner for messages."""
        job = "" if self.job is None else f", job {self.job}"
        return f"process {self.pid} on {self.host}{job}, since {self.since}"


class RunLock:
    """The exclusive lock of a run folder, held from `acquire` until `release`."""

    def __init__(self, folder: Path, owner: LockOwner) -> None:
        self.owner = owner
        self.folder = folder
        self._path = folder / LOCK_FILE
        self._lost: str | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="run-lock", daemon=True)

    @classmethod
    def acquire(cls, folder: Path, waits: bool = False) -> "RunLock":
        """Lock an existing folder; raise RunFolderError naming the owner if it is locked.

        If the heartbeat of an owner on another machine is overdue, wait for the next one, or until
        the owner counts as dead after STALE_S. Raises OSError if the folder is not writable.

        Args:
            folder: the run folder.
            waits: whether to wait up to WAIT_S for the owner to exit, as in a restart, whose
                previous process may still be ending.
        """
        lock = cls(folder, myself())
        aside = folder / f"{LOCK_FILE}.new.{lock.owner.token}"
        aside.write_text(json.dumps(lock.owner._asdict(), indent=1) + "\n")
        try:
            lock._acquire(aside, waits)
        finally:
            aside.unlink(missing_ok=True)
        lock._thread.start()
        return lock

    def check(self, looks: bool = False) -> None:
        """Raise RunFolderError if another process has taken over the lock, believing this one dead.

        If `looks` is set, the lock file is read now; otherwise the last heartbeat's result is used.
        """
        if looks and self._lost is None:
            self._lost = self._new_owner()
        if self._lost is not None:
            raise RunFolderError(
                f"run.dir {self.folder}: the lock was lost ({self._lost}), so this run writes "
                "nothing more; find the process that writes there now, and start again"
            )

    def release(self) -> None:
        """Remove the lock if this process still owns it."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        with contextlib.suppress(OSError):
            owner = _read(self._path)
            if owner is not None and owner.token == self.owner.token:
                self._path.unlink(missing_ok=True)

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def _acquire(self, aside: Path, waits: bool) -> None:
        limit_s = time.monotonic() + WAIT_S
        said = False
        while True:
            found = self._attempt(aside)
            if found is None:
                self._clear()
                return
            owner, silent_s = found
            # After several missed heartbeats it is dying, or will beat again soon.
            may_die = waits or (silent_s is not None and silent_s > 3 * BEAT_S)
            if not may_die or time.monotonic() > limit_s:
                raise self._refusal(owner, silent_s)
            if not said:
                log.warning("run.dir %s: waiting for %s to end", self.folder, owner.named())
                said = True
            time.sleep(_POLL_S)

    def _clear(self) -> None:
        """Remove files of dead processes that were waiting for the lock."""
        for left in self.folder.glob(f"{LOCK_FILE}.new.*"):
            owner = _read(left)
            if owner is not None and is_here(owner) and not lives(owner):
                left.unlink(missing_ok=True)

    def _refusal(self, owner: LockOwner, silent_s: float | None) -> RunFolderError:
        heard = "" if silent_s is None else f", last heartbeat {silent_s:.0f} s ago"
        return RunFolderError(
            f"run.dir {self.folder}: the folder is used by another run: "
            f"{owner.named()}{heard}; end that run, or choose another run.dir"
        )

    def _attempt(self, aside: Path) -> tuple[LockOwner, float | None] | None:
        """Try to lock once; return None on success, else the owner and the age of its heartbeat.

        The age is None for an owner on this machine.
        """
        dead: list[tuple[Path, LockOwner]] = []
        place = self._path
        while not _link(aside, place):
            owner = _read(place)
            if owner is None:
                return self._attempt(aside)  # released in the meantime
            silent_s = _silence_s(place, owner, aside)
            if silent_s is None and lives(owner):
                return owner, None
            if silent_s is not None and silent_s < STALE_S:
                return owner, silent_s
            dead.append((place, owner))
            place = self.folder / f"{LOCK_FILE}.after.{owner.token}"
        if dead and not self._inherit(dead, place):
            return self._attempt(aside)
        return None

    def _inherit(self, dead: list[tuple[Path, LockOwner]], claim: Path) -> bool:
        """Replace a dead owner's lock by this process's; return False if another was faster."""
        for place, owner in dead:
            now = _read(place)
            if now is None or now.token != owner.token:
                claim.unlink(missing_ok=True)
                return False
        # Rename first: a removed claim on a dead owner's lock could be made again.
        claim.rename(self._path)
        log.warning(
            "run.dir %s: took over the lock of %s, which is dead",
            self.folder,
            dead[0][1].named(),
        )
        # Claims on locks of other owners are now obsolete.
        for left in self.folder.glob(f"{LOCK_FILE}.after.*"):
            if not left.name.endswith(self.owner.token):
                left.unlink(missing_ok=True)
        return True

    def _beat(self) -> None:
        while not self._stop.wait(BEAT_S):
            with contextlib.suppress(OSError):
                self._lost = self._lost or self._new_owner()
                if self._lost is None:
                    os.utime(self._path)

    def _new_owner(self) -> str | None:
        """Return why this process has lost the lock; None if it has not, or if this is unknown."""
        try:
            owner = read_owner(self._path)
        except FileNotFoundError:
            return f"no {LOCK_FILE}: removed by hand, or by a run that took it over and has ended"
        except (OSError, ValueError):
            return None
        if owner.token == self.owner.token:
            return None
        return f"taken over by {owner.named()}, after {STALE_S:g} s without a heartbeat"


def job_of(environ: Mapping[str, str]) -> str | None:
    """Return the scheduler's or launcher's job of this process as NAME=ID, or None."""
    return next((f"{name}={environ[name]}" for name in _JOBS if name in environ), None)


def myself() -> LockOwner:
    """Return an `LockOwner` that describes this process, with a new token."""
    return LockOwner(
        token=uuid.uuid4().hex,
        host=socket.gethostname(),
        machine=machine(),
        pid=os.getpid(),
        pid_started=started(os.getpid()) or 0,
        job=job_of(os.environ),
        since=time.strftime("%Y-%m-%d %H:%M:%S"),
    )


def machine() -> str:
    """Return an identifier of the PID namespace, or the host name if there is none."""
    return shared_identity("pid") or socket.gethostname()


def started(pid: int) -> int | None:
    """Return a process's start time in clock ticks after boot; None if it is dead."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    # A zombie has ended; its parent has not waited for it yet.
    return None if fields[0] in "ZX" else int(fields[19])


def is_here(owner: LockOwner) -> bool:
    """Return whether an owner runs on this machine, in this boot and PID namespace."""
    return owner.machine == machine()


def lives(owner: LockOwner) -> bool:
    """Return whether an owner on this machine is alive."""
    since = started(owner.pid)
    if since is not None:
        return since == owner.pid_started
    try:
        os.kill(owner.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # a process of another user, which /proc may hide
    # A process of this user, which /proc would show if it existed.
    return not Path("/proc/self/stat").exists()


def _silence_s(place: Path, owner: LockOwner, aside: Path) -> float | None:
    """Return the age in seconds of the heartbeat of an owner on another machine; None on this one.

    Both file times are those of the file server, as the clocks of machines differ.
    """
    if is_here(owner):
        return None
    os.utime(aside)
    with contextlib.suppress(FileNotFoundError):
        return max(0.0, aside.stat().st_mtime - place.stat().st_mtime)
    return 0.0


def _link(source: Path, target: Path) -> bool:
    """Create a hard link, atomically also over NFS; return False if the name exists."""
    try:
        os.link(source, target)
    except FileExistsError:
        # NFS may repeat a request whose reply was lost: then the link is our own.
        return _is_same_file(source, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return _copy_exclusively(source, target)
    return True


def _is_same_file(source: Path, target: Path) -> bool:
    try:
        return os.path.samefile(source, target)
    except OSError:
        return False


def _copy_exclusively(source: Path, target: Path) -> bool:
    """Copy a file to a new name, in place of a hard link; return False if the name exists."""
    try:
        with target.open("x") as file:
            file.write(source.read_text())
    except FileExistsError:
        return False
    return True


def _read(place: Path) -> LockOwner | None:
    """Return the owner in a lock file; None if the file is gone, an unknown one if it is invalid.

    Raises RunFolderError if the path is not a regular file (for example a folder), as such a lock
    would never be released.
    """
    try:
        if not stat.S_ISREG(place.lstat().st_mode):
            raise RunFolderError(
                f"run.dir {place.parent}: {place.name} is not a regular file; remove it, or "
                "choose another run.dir"
            )
        return read_owner(place)
    except FileNotFoundError:
        return None
    except ValueError:
        return LockOwner("unreadable", "an unknown host", "unknown", 0, 0, None, "an unknown time")


def read_owner(place: Path) -> LockOwner:
    """Read the owner from a file; raise OSError or ValueError if it is unreadable or invalid."""
    told = read_json(place, _MOST_BYTES)
    wrong = mismatch(told, _OWNER)
    if (
        wrong
        or set(told) != set(LockOwner._fields)
        or not _TOKEN(told["token"])
        or told["pid"] >= 2**31
    ):
        raise ValueError(wrong or "not an owner")
    return LockOwner(**told)
