"""The secret of a job: by it ranks know one another, and whoever lacks it is turned away.

A job's secret comes from the environment (GPIPE_HPC_SECRET), from a file that only its user may
read (``comm.secret_file``), or, where all ranks are on one machine and nobody gave one, from a
file that the first rank makes for this user. It never travels: what travels are proofs, HMAC-SHA256
(RFC 2104) over a label that says what is proved, and over random numbers of both sides.

Every `ProcessWorld` has a secret of its own, ``world.secret``, made from that of the job and a
random number that rank 0 draws. ``world.secret.derive("watch")`` makes one for a purpose, so that
proofs of one are no others'. For single values that others could change on their way there are
`Secret.seal` and `Secret.unseal`; how two ends of a connection make sure of each other stands in
`gpipe_hpc.comm.watchdog.talk`.
Without a job's secret the key is the random number alone, which lay readable in the store:
``world.secret.guards`` is False, and a proof shows no more than that its maker could read there.
"""

import contextlib
import hashlib
import hmac
import logging
import os
import secrets
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from gpipe_hpc.errors import ConfigError, LaunchError

SECRET_VARIABLE: Final = "GPIPE_HPC_SECRET"
MIN_SECRET_BYTES: Final = 16
MAX_SECRET_BYTES: Final = 4096
PROOF_BYTES: Final = 32

log = logging.getLogger("gpipe_hpc.comm")


class ProofError(ConnectionError, RuntimeError):
    """What came is not proved by the job's secret; like a lost connection or store."""


@dataclass(frozen=True)
class Secret:
    """A key that ranks share and others lack; ``source`` says where it comes from, for messages.

    ``guards``: whether others really lack it. Its text form never shows the key.
    """

    key: bytes = field(repr=False)
    source: str
    guards: bool = True

    def prove(self, label: str, *parts: bytes) -> bytes:
        """Return the proof (32 bytes) that who has the secret says ``parts`` under ``label``."""
        proof = hmac.new(self.key, digestmod=hashlib.sha256)
        for part in (label.encode(), *parts):
            # With its length, so that no two lists of parts give one text.
            proof.update(len(part).to_bytes(8, "little") + part)
        return proof.digest()

    def proves(self, proof: bytes, label: str, *parts: bytes) -> bool:
        """Say whether ``proof`` was made with this secret, in a time that tells nothing."""
        return hmac.compare_digest(proof, self.prove(label, *parts))

    def derive(self, label: str) -> "Secret":
        """Return the secret for one purpose: its proofs are worth nothing for another."""
        return Secret(self.prove(f"derive {label}"), self.source, self.guards)

    def seal(self, label: str, value: bytes) -> bytes:
        """Return the value behind its proof; ``label`` says which value it is."""
        return self.prove(label, value) + value

    def unseal(self, label: str, sealed: bytes) -> bytes:
        """Return a sealed value; raise ProofError if it is none of this secret and label."""
        proof, value = sealed[:PROOF_BYTES], sealed[PROOF_BYTES:]
        if not self.proves(proof, label, value):
            raise ProofError(
                f"{label}: the value is not proved by the job's secret (from {self.source}); the "
                "sender has another secret, or belongs to another job"
            )
        return value


def job_secret(
    one_machine: bool,
    secret_file: str | None = None,
    environ: Mapping[str, str] | None = None,
    places: tuple[Path, ...] | None = None,
) -> Secret | None:
    """Return the secret of this job; None where nobody gave one and the ranks cannot share one.

    The first that applies: ``secret_file``, GPIPE_HPC_SECRET, and, if all ranks are on
    ``one_machine``, this user's own file on it, which is made if it is not there. ``places`` are
    the folders for that file, the first that is there or can be made.

    Raises ConfigError for a file that is missing or that others may read, LaunchError if
    somebody else holds the folder of this user's file.
    """
    if secret_file is not None:
        return _checked(_read_private(Path(secret_file)), f"comm.secret_file={secret_file}")
    given = (os.environ if environ is None else environ).get(SECRET_VARIABLE)
    if given is not None:
        return _checked(given.encode(errors="surrogateescape"), SECRET_VARIABLE)
    if not one_machine:
        return None
    return _secret_of_user(_usual_places() if places is None else places)


def _checked(text: bytes, source: str) -> Secret:
    key = text.strip()
    if not MIN_SECRET_BYTES <= len(key) <= MAX_SECRET_BYTES:
        raise ConfigError(
            f"launch: bad secret in {source}, expected {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES} "
            f"bytes, got {len(key)}; make one with `openssl rand -hex 32`"
        )
    return Secret(hashlib.sha256(b"gpipe_hpc job " + key).digest(), source)


def _read_private(path: Path) -> bytes:
    """Return a file that nobody but this user (or root) may read or write."""
    try:
        # Without waiting, should it be a pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(
            f"launch: no secret in {path}: {error.strerror}; create one that all ranks see: "
            f"(umask 077; openssl rand -hex 32 > {path})"
        ) from error
    try:
        fault = _fault_of(os.fstat(descriptor), stat.S_ISREG)
        if not fault:
            return os.read(descriptor, MAX_SECRET_BYTES + 1)
    finally:
        os.close(descriptor)
    raise ConfigError(
        f"launch: {path} cannot be the secret: {fault}; it must be a file of this user that "
        f"nobody else can read: create it again, or chmod 600 {path}"
    )


def _fault_of(facts: os.stat_result, is_right_kind: Callable[[int], bool]) -> str:
    """Return why others could have had their hands on a file or folder; empty if they could not."""
    if not is_right_kind(facts.st_mode):
        return "something of another kind"
    if facts.st_uid not in (os.getuid(), 0):
        return f"one of user {facts.st_uid} while this is user {os.getuid()}"
    if facts.st_mode & 0o077:
        return f"mode {stat.S_IMODE(facts.st_mode):o}"
    return ""


def _usual_places() -> tuple[Path, ...]:
    # By the user's number and not by variables: all ranks must look into the same folder.
    user = os.getuid()
    return Path(f"/run/user/{user}/gpipe_hpc"), Path(f"/tmp/gpipe_hpc-{user}")


def _secret_of_user(places: tuple[Path, ...]) -> Secret | None:
    """Read this user's secret on this machine; make it if it is not there.

    One for all jobs, so no rank can read what another job left: each job makes its own key of it.
    """
    reasons = []
    for folder in places:
        try:
            _make_private_folder(folder)
            path = folder / "secret"
            if not path.exists():
                _write_once(path, secrets.token_hex(32).encode() + b"\n")
        except OSError as error:
            reasons.append(f"{folder}: {error.strerror}")
        else:
            return _checked(_read_private(path), str(path))
    log.warning(
        "launch: no secret, because its folder cannot be used (%s); other users of this machine "
        "can reach this job's connections: set %s",
        ", ".join(reasons),
        SECRET_VARIABLE,
    )
    return None


def _make_private_folder(folder: Path) -> None:
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    fault = _fault_of(folder.lstat(), stat.S_ISDIR)
    if fault:
        raise LaunchError(
            f"launch: cannot keep a secret in {folder}: {fault}; it must be a folder of this user "
            f"that nobody else can enter: remove it, or set {SECRET_VARIABLE} for all ranks"
        )


def _write_once(path: Path, text: bytes) -> None:
    """Write a file whole, or leave the one that another rank has written meanwhile."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(text)
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def secret_for_all(job: Secret | None, number: bytes) -> Secret:
    """Return the secret of one world: of the job's and a random number that all its ranks have."""
    if job is None:
        return Secret(hashlib.sha256(number).digest(), "a number in the store", guards=False)
    return Secret(job.prove("world", number), job.source, job.guards)
