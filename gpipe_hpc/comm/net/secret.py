"""The shared secret of a job, with which ranks authenticate each other.

The secret comes from the environment (GPIPE_HPC_SECRET), from a file that only its user may read
(``comm.secret_file``) or, if all ranks are on one machine and none is given, from a file that the
first rank creates for this user. The secret itself is never sent. Ranks send proofs: HMAC-SHA256
(RFC 2104) over a label that names the purpose and over random numbers of both sides.

Every `ProcessWorld` has its own secret, ``world.secret``, derived from the job's secret and a
random number drawn by rank 0. ``world.secret.derive("watch")`` derives a secret for one purpose,
whose proofs are invalid for any other. `Secret.seal` and `Secret.unseal` protect single values
against modification; mutual authentication of a connection is in
`gpipe_hpc.comm.watchdog.watcher_connection`.
Without a job secret the key is the random number alone, which is readable in the store:
``world.secret.guards`` is False, and a proof only shows that its author could read the store.
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
    """A received value is not authentic; treated like a lost connection or store."""


@dataclass(frozen=True)
class Secret:
    """A key shared by the ranks of a job.

    Args:
        key: the key; not shown by `repr`.
        source: where the key comes from, for messages.
        guards: whether the key is secret, or else readable in the store.
    """

    key: bytes = field(repr=False)
    source: str
    guards: bool = True

    def prove(self, label: str, *parts: bytes) -> bytes:
        """Return a proof (32 bytes) that its author has this secret and states ``parts``.

        ``label`` names the purpose, so that a proof cannot be used for another one.
        """
        proof = hmac.new(self.key, digestmod=hashlib.sha256)
        for part in (label.encode(), *parts):
            # Prefixed with its length, so that different lists never give equal input.
            proof.update(len(part).to_bytes(8, "little") + part)
        return proof.digest()

    def proves(self, proof: bytes, label: str, *parts: bytes) -> bool:
        """Return whether ``proof`` was made with this secret for these arguments.

        The comparison takes the same time for every proof.
        """
        return hmac.compare_digest(proof, self.prove(label, *parts))

    def derive(self, label: str) -> "Secret":
        """Return a derived secret for one purpose; its proofs are invalid for any other."""
        return Secret(self.prove(f"derive {label}"), self.source, self.guards)

    def seal(self, label: str, value: bytes) -> bytes:
        """Return ``value`` with a proof in front of it; ``label`` identifies the value."""
        return self.prove(label, value) + value

    def unseal(self, label: str, sealed: bytes) -> bytes:
        """Return the value of `seal`; raise ProofError if secret or label differ."""
        proof, value = sealed[:PROOF_BYTES], sealed[PROOF_BYTES:]
        if not self.proves(proof, label, value):
            raise ProofError(
                f"{label}: the value is not authenticated by the job's secret (from "
                f"{self.source}); the sender has a different secret, or belongs to another job"
            )
        return value


def job_secret(
    one_machine: bool,
    secret_file: str | None = None,
    environ: Mapping[str, str] | None = None,
    places: tuple[Path, ...] | None = None,
) -> Secret | None:
    """Return the secret of this job; None if none is given and the ranks cannot share a file.

    The first that applies: ``secret_file``, GPIPE_HPC_SECRET and, if all ranks are on
    ``one_machine``, this user's own file, which is created if necessary. ``places`` are candidate
    folders for that file; the first that exists or can be created is used.

    Raises ConfigError for a file that is missing or readable by others, LaunchError if the folder
    of this user's file belongs to another user.
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
    """Return the content of a file that only this user or root can read or write."""
    try:
        # Non-blocking, in case it is a pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(
            f"launch: cannot read the secret {path}: {error.strerror}; create one for all ranks: "
            f"(umask 077; openssl rand -hex 32 > {path})"
        ) from error
    try:
        fault = _access_fault(os.fstat(descriptor), stat.S_ISREG)
        if not fault:
            return os.read(descriptor, MAX_SECRET_BYTES + 1)
    finally:
        os.close(descriptor)
    raise ConfigError(
        f"launch: {path} cannot be used as a secret: {fault}; it must be a file of this user that "
        f"no other user can read: create it again, or chmod 600 {path}"
    )


def _access_fault(facts: os.stat_result, is_right_kind: Callable[[int], bool]) -> str:
    """Return why others could have accessed a file or folder; empty if they could not."""
    if not is_right_kind(facts.st_mode):
        return "wrong file type"
    if facts.st_uid not in (os.getuid(), 0):
        return f"it belongs to user {facts.st_uid}, this is user {os.getuid()}"
    if facts.st_mode & 0o077:
        return f"mode {stat.S_IMODE(facts.st_mode):o}"
    return ""


def _usual_places() -> tuple[Path, ...]:
    # By user id, not by environment variables: all ranks must use the same folder.
    user = os.getuid()
    return Path(f"/run/user/{user}/gpipe_hpc"), Path(f"/tmp/gpipe_hpc-{user}")


def _secret_of_user(places: tuple[Path, ...]) -> Secret | None:
    """Read this user's secret on this machine; create it if it does not exist.

    All jobs share it; each job derives its own key from it, so no job can read data of another.
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
        "launch: running without a secret, because its folder cannot be used (%s); other users of "
        "this machine can connect to this job: set %s",
        ", ".join(reasons),
        SECRET_VARIABLE,
    )
    return None


def _make_private_folder(folder: Path) -> None:
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    fault = _access_fault(folder.lstat(), stat.S_ISDIR)
    if fault:
        raise LaunchError(
            f"launch: cannot store a secret in {folder}: {fault}; it must be a folder of this user "
            f"that no other user can enter: remove it, or set {SECRET_VARIABLE} for all ranks"
        )


def _write_once(path: Path, text: bytes) -> None:
    """Write a file atomically, unless another process has created it first."""
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
    """Return the secret of a world, derived from the job's secret and a random number."""
    if job is None:
        return Secret(hashlib.sha256(number).digest(), "a number in the store", guards=False)
    return Secret(job.prove("world", number), job.source, job.guards)
