"""One run owns its folder: a lock file says which, and a dead run's lock is taken over.

The lock is a file with a name of its own, made elsewhere and given its name by a hard link, which
one of several that try gets, over NFS too. It says host, process and job. Its owner touches it
every few seconds. Whoever finds one asks, on the same machine, whether that process still lives,
and on another whether the file was touched lately.

A lock with token T whose owner is dead goes to whoever links the name `LOCK.after.T`, which again
only one of several gets; that one then renames its file to `LOCK`.
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
"""Without a sign of life for so long, an owner on another machine counts as dead."""
WAIT_S: Final = 75.0
"""A run that a launcher starts again waits so long for the one before it to die."""
_POLL_S: Final = 0.25
_JOBS: Final = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID", "TORCHELASTIC_RUN_ID")
_MOST_BYTES: Final = 2**16
_TOKEN: Final = re.compile(r"\w{1,64}").fullmatch  # it becomes a part of names of files
_NUMBER: Final = Number(0, is_whole=True)
_OWNER: Final = {
    **dict.fromkeys(("token", "host", "machine", "since"), str),
    **dict.fromkeys(("pid", "pid_started"), _NUMBER),
    "job": OrNull(str),
}
_NO_LINKS: Final = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV}


class Owner(NamedTuple):
    """Who holds a lock; `machine` tells apart boots, and containers that number processes alone."""

    token: str
    host: str
    machine: str
    pid: int
    pid_started: int  # clock ticks after the boot; tells apart processes of one number
    job: str | None
    since: str

    def named(self) -> str:
        """Return the owner for a message."""
        job = "" if self.job is None else f", job {self.job}"
        return f"process {self.pid} on {self.host}{job}, since {self.since}"


class RunLock:
    """The exclusive lock of a run folder, held from `take` until `give_back`."""

    def __init__(self, folder: Path, owner: Owner) -> None:
        self.owner = owner
        self.folder = folder
        self._path = folder / LOCK_FILE
        self._lost: str | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="run-lock", daemon=True)

    @classmethod
    def take(cls, folder: Path, waits: bool = False) -> "RunLock":
        """Lock an existing folder, or raise RunFolderError that names who holds it.
        OSError if nothing can be written there.

        `waits`: this run was started again after another process of it, which may still be
        dying; it is waited for during WAIT_S. An owner on another machine that was silent for
        some beats is waited for until it gives a sign, or counts as dead after STALE_S.
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
        """Raise RunFolderError if the lock is another's now: this process was taken for dead.

        `looks`: read the file now, else say what was seen at the last beat.
        """
        if looks and self._lost is None:
            self._lost = self._new_owner()
        if self._lost is not None:
            raise RunFolderError(
                f"run.dir {self.folder}: the lock was lost ({self._lost}), so nothing more is "
                "written here; find out who writes there now, and start again"
            )

    def give_back(self) -> None:
        """Remove the lock, if it is still this one's."""
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
        self.give_back()

    def _acquire(self, aside: Path, waits: bool) -> None:
        limit_s = time.monotonic() + WAIT_S
        said = False
        while True:
            found = self._attempt(aside)
            if found is None:
                self._clear()
                return
            owner, silent_s = found
            # One that was silent for some beats is dying, or gives a sign within the next.
            may_die = waits or (silent_s is not None and silent_s > 3 * BEAT_S)
            if not may_die or time.monotonic() > limit_s:
                raise self._refusal(owner, silent_s)
            if not said:
                log.warning("run.dir %s: waiting for %s to end", self.folder, owner.named())
                said = True
            time.sleep(_POLL_S)

    def _clear(self) -> None:
        """Remove what those left behind that died while they waited for the lock."""
        for left in self.folder.glob(f"{LOCK_FILE}.new.*"):
            owner = _read(left)
            if owner is not None and is_here(owner) and not lives(owner):
                left.unlink(missing_ok=True)

    def _refusal(self, owner: Owner, silent_s: float | None) -> RunFolderError:
        heard = "" if silent_s is None else f", which gave a sign of life {silent_s:.0f} s ago"
        return RunFolderError(
            f"run.dir {self.folder}: the folder is used by another run: "
            f"{owner.named()}{heard}; end that run, or choose another run.dir"
        )

    def _attempt(self, aside: Path) -> tuple[Owner, float | None] | None:
        """Try once; return who holds it and how long ago another machine's owner gave a sign."""
        dead: list[tuple[Path, Owner]] = []
        place = self._path
        while not _link(aside, place):
            owner = _read(place)
            if owner is None:
                return self._attempt(aside)  # given back in between
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

    def _inherit(self, dead: list[tuple[Path, Owner]], claim: Path) -> bool:
        """Turn the right to succeed `dead` into the lock; False if another did so before."""
        for place, owner in dead:
            now = _read(place)
            if now is None or now.token != owner.token:
                claim.unlink(missing_ok=True)
                return False
        # The lock changes hands first: a claim of the dead that is gone could be made again.
        claim.rename(self._path)
        log.warning(
            "run.dir %s: took over the lock of %s, which is dead",
            self.folder,
            dead[0][1].named(),
        )
        # Claims on anybody's place but ours lead nowhere now.
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
        """Say what became of the lock, if it is not ours; None where that cannot be seen."""
        try:
            owner = read_owner(self._path)
        except FileNotFoundError:
            return f"no {LOCK_FILE}: removed by hand, or by a run that took over and has ended"
        except (OSError, ValueError):
            return None
        if owner.token == self.owner.token:
            return None
        return f"taken over by {owner.named()}, after no sign of life for {STALE_S:g} s"


def job_of(environ: Mapping[str, str]) -> str | None:
    """Return the job that this process belongs to, as its scheduler or launcher names it."""
    return next((f"{name}={environ[name]}" for name in _JOBS if name in environ), None)


def myself() -> Owner:
    """Return this process as the owner of something, with a token of its own."""
    return Owner(
        token=uuid.uuid4().hex,
        host=socket.gethostname(),
        machine=machine(),
        pid=os.getpid(),
        pid_started=started(os.getpid()) or 0,
        job=job_of(os.environ),
        since=time.strftime("%Y-%m-%d %H:%M:%S"),
    )


def machine() -> str:
    """Return what is alike where process numbers mean the same."""
    return shared_identity("pid") or socket.gethostname()


def started(pid: int) -> int | None:
    """Return when a living process was started, in clock ticks after the boot; None if dead."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    # A zombie has ended; only its parent has not asked yet.
    return None if fields[0] in "ZX" else int(fields[19])


def is_here(owner: Owner) -> bool:
    """Say whether an owner is on this machine, in this boot, with these process numbers."""
    return owner.machine == machine()


def lives(owner: Owner) -> bool:
    """Say whether a process of this machine is still that one."""
    since = started(owner.pid)
    if since is not None:
        return since == owner.pid_started
    try:
        os.kill(owner.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # another user's, which /proc may hide
    # It is ours, so /proc would show it alive, if there is one.
    return not Path("/proc/self/stat").exists()


def _silence_s(place: Path, owner: Owner, aside: Path) -> float | None:
    """Return how long an owner on another machine gave no sign; None for one on this machine.

    Both times are the file server's: clocks of machines differ.
    """
    if is_here(owner):
        return None
    os.utime(aside)
    with contextlib.suppress(FileNotFoundError):
        return max(0.0, aside.stat().st_mtime - place.stat().st_mtime)
    return 0.0


def _link(source: Path, target: Path) -> bool:
    """Give a file a second name, unless that is taken: atomic, over NFS too."""
    try:
        os.link(source, target)
    except FileExistsError:
        # An answer of NFS may be lost and the request repeated: then it was us.
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
    """Stand in for a link where the file system has none."""
    try:
        with target.open("x") as file:
            file.write(source.read_text())
    except FileExistsError:
        return False
    return True


def _read(place: Path) -> Owner | None:
    """Return whose a lock file is; None if it is gone. One that says nothing is nobody's here.

    Raises RunFolderError for what is no file, such as a folder: nobody gives that back.
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
        return Owner("unreadable", "an unknown host", "unknown", 0, 0, None, "an unknown time")


def read_owner(place: Path) -> Owner:
    """Return the owner that a file names; OSError or ValueError if it cannot be read or is none."""
    told = read_json(place, _MOST_BYTES)
    wrong = mismatch(told, _OWNER)
    if (
        wrong
        or set(told) != set(Owner._fields)
        or not _TOKEN(told["token"])
        or told["pid"] >= 2**31
    ):
        raise ValueError(wrong or "no owner")
    return Owner(**told)
