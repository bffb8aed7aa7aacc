"""The roll call: every rank enters its name in the store, and one verdict goes for all.

Ranks are a tree, with rank 0 at its root. Each rank hears of those below it and says in one line
whether all of them have come and are alike; so none reads more than a few lines. Only where
something is wrong does rank 0 read what every rank says of itself, and names who it is.

A name carries the proof of the job's secret, and whoever is above a rank answers it with a proof
of its own. So neither a stranger's entry nor a stranger who serves the store in rank 0's place is
believed.
"""

import hashlib
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

from gpipe_hpc import __version__
from gpipe_hpc.comm.net.secret import PROOF_BYTES, SECRET_VARIABLE, Secret
from gpipe_hpc.comm.world.launcher import Launch
from gpipe_hpc.device.host.machine import shared_identity
from gpipe_hpc.errors import LaunchError, PeerError
from gpipe_hpc.torch_compat import Store

log = logging.getLogger("gpipe_hpc.comm")

# How long past its time a rank stays for others to hear, or to speak.
_GRACE_S: Final = 5.0
_ANSWER_S: Final = 60.0  # ranks that share few cores are slow
_LISTEN_S: Final = 3.0  # from one look for notices to the next
_ABSENT: Final = "rank 0 is absent"
_STOPPED: Final = "a rank is stopped"
_VERDICT: Final = "verdict"
_WIDTH: Final = 8
_SAY_S: Final = 15.0  # after which rank 0 says for whom it waits
# A store answers more; and no rank asks less often than every two seconds.
_QUESTIONS_A_SECOND: Final = 5000


@dataclass(frozen=True)
class Member:
    """What a rank says of itself; ``number`` is random, so no answer to it can be an old one.

    ``machine`` is the same for processes that reach each other on 127.0.0.1. ``started`` tells
    two processes with one number apart. ``loopback`` is what the user asked for.
    """

    rank: int
    host: str
    machine: str
    pid: int
    started: str
    secret_source: str
    loopback: bool | None
    versions: dict[str, str]
    number: str = field(default_factory=lambda: secrets.token_hex(16))

    @classmethod
    def of(cls, launch: Launch, loopback: bool | None, secret_source: str) -> "Member":
        """Return this process."""
        return cls(
            rank=launch.rank,
            host=socket.gethostname(),
            machine=_machine(),
            pid=os.getpid(),
            started=_started(os.getpid()),
            secret_source=secret_source,
            loopback=loopback,
            versions={
                "gpipe_hpc": __version__,
                "torch": torch.__version__,
                "world size": str(launch.world_size),
            },
        )

    def __str__(self) -> str:
        """Return the process, for messages."""
        return f"process {self.pid} on {self.host}"

    def facts(self) -> str:
        """Return a digest of what must be the same on all ranks."""
        text = json.dumps([self.versions, self.loopback], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def is_same_process(self, other: "Member") -> bool:
        """Say whether both are one process."""
        return self._process() == other._process()

    def runs_here(self) -> bool:
        """Say whether the process is on this machine and has not ended."""
        return self.machine == _machine() and self.started == _started(self.pid) != ""

    def _process(self) -> tuple[str, int, str]:
        return self.machine, self.pid, self.started


def _machine() -> str:
    """Return a text that processes share if one's 127.0.0.1 is the other's."""
    return shared_identity("net") or socket.gethostname()


def _started(pid: int) -> str:
    """Return when a process was started, in clock ticks since boot; empty if it has ended."""
    try:
        # Behind the name in brackets, which may have anything in it.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]


class OverError(Exception):
    """This roll call is over: rank 0 holds another one by now."""


class _Alike(NamedTuple):
    """What some ranks have in common: a digest of the facts that must be equal, and the machine.

    `machine` is empty where they are on several.
    """

    facts: str
    machine: str


def _depth(rank: int) -> int:
    """Return how many ranks are above one."""
    depth = 0
    while rank:
        rank, depth = (rank - 1) // _WIDTH, depth + 1
    return depth


def _longest_pause_s(world_size: int) -> float:
    """Return how long a rank waits at most until it asks the store again, as all others do."""
    return min(max(0.2, world_size / _QUESTIONS_A_SECOND), 2.0)


@dataclass(frozen=True)
class RollCall:
    """One roll call over a store.

    Rank 0 says that all may go on once all have come and fit together; whoever waited too long
    says who is missing. Only the first verdict counts, so no two ranks ever act on different ones.
    `is_over`: whether rank 0 holds another one by now.
    """

    launch: Launch
    store: Store
    secret: Secret
    me: Member
    timeout_s: float
    deadline: float
    is_over: Callable[[], bool] = lambda: False

    def hold(self) -> bool:
        """Return when all ranks have come and fit together: whether all are on one machine.

        Raises LaunchError otherwise, and OverError where it waits and the roll call is over.
        """
        rank = self.launch.rank
        entry = self._entry()
        try:
            self._set(self.key(rank), entry)
            text = self._verdict()
            verdict = json.loads(text)
            if verdict["refusal"]:
                self._farewell()
            else:
                self._check_answer(entry, text)
                self._answer(text)
        except dist.DistError as error:
            raise LaunchError(
                f"launch: rank {rank} lost the store, expected it to be served until all ranks "
                f"have come, got {error}; rank 0 has ended: look at its log"
            ) from error
        except (ValueError, KeyError, TypeError) as error:
            raise LaunchError(
                f"launch: rank {rank} expected the verdict of a rank of this job, got something "
                f"else ({error}); {self._stranger()}"
            ) from error
        if verdict["refusal"]:
            raise LaunchError(f"launch: rank {rank}: {verdict['refusal']}")
        return bool(verdict["local"])

    def refuse_double(self, limit_s: float = _GRACE_S) -> bool:
        """Raise LaunchError, here and on all that still wait, if another process is this rank.

        Returns False if none has entered its name in this roll call within ``limit_s`` seconds.
        """
        key = self.key(self.launch.rank)
        self._await(time.monotonic() + limit_s, [key])
        if not self.store.check([key]):
            return False
        first = self._member(self.launch.rank)
        if first is None:
            return False
        told = (
            f"two processes are rank {self.launch.rank}: {first} and {self.me}; give each its own "
            "RANK"
        )
        verdict = json.loads(self._propose(told, local=False))
        others = "" if verdict["refusal"] else "; the first one continues"
        raise LaunchError(f"launch: rank {self.launch.rank}: {told}{others}")

    def refuse_living_double(self) -> None:
        """Raise LaunchError as `refuse_double` if who is this rank here is at work on this host.

        One process after another may use the environment of one rank; not two at once.
        """
        other = self.member()
        if other is not None and not other.is_same_process(self.me) and other.runs_here():
            self.refuse_double()

    @property
    def has_entered(self) -> bool:
        """Say whether some process has entered as this rank."""
        return self._are_there([self.key(self.launch.rank)])

    @property
    def has_verdict(self) -> bool:
        """Say whether the verdict is given."""
        return self._are_there([_VERDICT])

    def say_absent(self, told: str) -> None:
        """Leave word, for ranks of this job alone, why rank 0 does not come to this roll call."""
        self._set(self._key_of(_ABSENT), self.secret.seal(_ABSENT, told.encode()))

    def say_stopped(self, told: str) -> None:
        """Leave a notice, for ranks of this job alone, that a signal has ended this rank."""
        self._set(self._key_of(_STOPPED), self.secret.seal(_STOPPED, told.encode()))

    def _key_of(self, notice: str) -> str:
        place = f"{self.launch.master_addr} {self.launch.master_port} {self.launch.world_size}"
        return f"notice/{self.secret.prove(notice, place.encode()).hex()}"

    def _hear_notices(self) -> None:
        """Raise what a rank that does not come has left for the others.

        LaunchError if rank 0 cannot serve, PeerError if a signal has ended a rank.
        """
        for notice in (_STOPPED, _ABSENT) if self.launch.rank else (_STOPPED,):
            key = self._key_of(notice)
            if not self.store.check([key]):
                continue
            told = self.secret.unseal(notice, self.store.get(key)).decode()
            if notice == _STOPPED:
                raise PeerError(told, is_stop=True)
            raise LaunchError(f"launch: rank {self.launch.rank}: {told}")

    def member(self) -> Member | None:
        """Return who has entered as this rank; None if nobody of this job has."""
        key = self.key(self.launch.rank)
        return self._member(self.launch.rank) if self.store.check([key]) else None

    def _entry(self) -> bytes:
        return self.secret.seal(
            f"rank {self.launch.rank} comes", json.dumps(asdict(self.me)).encode()
        )

    def _set(self, key: str, value: bytes) -> None:
        write: Any = self.store.set  # takes bytes as well as texts
        write(key, value)

    def _member(self, rank: int) -> Member | None:
        """Return who came as a rank; None for one that does not prove the secret."""
        entry = self.store.get(self.key(rank))
        try:
            return Member(**json.loads(self.secret.unseal(f"rank {rank} comes", entry)))
        except (ConnectionError, ValueError, TypeError):
            return None

    def _says_of_itself(self, rank: int) -> str:
        """Return what a rank that is not believed says, as a hint."""
        try:
            claims = json.loads(self.store.get(self.key(rank))[PROOF_BYTES:])
            return (
                f"rank {rank} (process {int(claims['pid'])} on {str(claims['host'])[:100]}, secret "
                f"from {str(claims['secret_source'])[:100]})"
            )
        except (ValueError, KeyError, TypeError):
            return f"rank {rank}"

    def _verdict(self) -> str:
        """Wait for the verdict, and give it where that is this rank's turn."""
        rank = self.launch.rank
        below = [f"below/{child}" for child in self._children()]
        if rank == 0:
            self._await(min(self.deadline, time.monotonic() + _SAY_S), [_VERDICT], below)
            if not self._are_there([_VERDICT]) and not self._are_there(below):
                self._say_missing()
        self._await(self.deadline, [_VERDICT], below)
        if not self._are_there([_VERDICT]) and self._are_there(below):
            told = self._told_by(self._children())
            if rank == 0 and told is not None:
                self._hear_notices()  # who has come may have been stopped since
                return self._decide(told)
            if rank > 0:
                self._set(f"below/{rank}", self._sealed(told))
        # Rank 0 has to look at each: somebody below it is not like the others.
        everyone = [[self.key(each) for each in range(self.launch.world_size)]] if not rank else []
        self._await(self.deadline, [_VERDICT], *everyone)
        # Whoever is nearer to rank 0 speaks first: else all would ask for all the missing.
        self._await(time.monotonic() + _GRACE_S * _depth(rank), [_VERDICT])
        if self._are_there([_VERDICT]):
            return self.store.get(_VERDICT).decode()
        missing = self._missing(range(self.launch.world_size))
        if missing:
            return self._propose(self._absence(missing), local=False)
        if rank == 0:
            return self._judge()
        # The last came just now: rank 0 is about to speak.
        self._await(time.monotonic() + _GRACE_S, [_VERDICT])
        return self._propose(
            f"rank 0 came but gave no verdict within {self.timeout_s:g} s; see its log", local=False
        )

    def _say_missing(self) -> None:
        """Say for whom all wait, if they do."""
        missing = self._missing(range(self.launch.world_size))
        if missing and time.monotonic() < self.deadline:
            log.warning(
                "launch: rank 0 on %s still waits at %s:%d for %s of %d; they have not started, or "
                "cannot reach it",
                *(self.me.host, self.launch.master_addr, self.launch.master_port),
                *(_named(missing), self.launch.world_size),
            )

    def _children(self) -> range:
        """Return the ranks right below this one."""
        first = _WIDTH * self.launch.rank + 1
        return range(first, max(first, min(first + _WIDTH, self.launch.world_size)))

    def _told_by(self, children: Sequence[int]) -> "_Alike | None":
        """Return what is the same on this rank and all below it; None where something differs."""
        own = _Alike(self.me.facts(), self.me.machine)
        for child in children:
            sealed = self.store.get(f"below/{child}")
            try:
                text = self.secret.unseal(f"below rank {child}", sealed)
                told = json.loads(text)
                theirs = None if told is None else _Alike(*map(str, told))
            except (ConnectionError, ValueError, TypeError):
                return None
            if theirs is None or theirs.facts != own.facts:
                return None
            if theirs.machine != own.machine:
                own = own._replace(machine="")
        return own

    def _sealed(self, told: "_Alike | None") -> bytes:
        return self.secret.seal(f"below rank {self.launch.rank}", json.dumps(told).encode())

    def _decide(self, told: "_Alike") -> str:
        """Let all go on who are alike; rank 0 alone."""
        is_local = told.machine != ""
        if self.me.loopback and not is_local:
            return self._judge()
        return self._propose("", local=is_local and self.me.loopback is not False)

    def _propose(self, refusal: str, *, local: bool) -> str:
        """Give a verdict unless there is one; return the one that stands."""
        text = json.dumps({"refusal": refusal, "local": local})
        return self.store.compare_set(_VERDICT, "", text).decode()

    def _judge(self) -> str:
        """Look at who has come; rank 0 alone."""
        ranks = range(self.launch.world_size)
        members = [self._member(rank) for rank in ranks]
        strangers = [rank for rank, member in enumerate(members) if member is None]
        if strangers:
            who = ", ".join(map(self._says_of_itself, strangers[:4]))
            return self._propose(
                f"the ranks do not share a secret, expected the one that rank 0 has from "
                f"{self.me.secret_source}, got another or none on {len(strangers)} of "
                f"{len(members)} ranks: {who}; give all ranks one {SECRET_VARIABLE}",
                local=False,
            )
        present = [member for member in members if member is not None]
        refusal, local = self._unequal(present), len({m.machine for m in present}) == 1
        if not refusal and self.me.loopback and not local:
            refusal = (
                "comm.loopback=true does not reach other machines, expected all ranks on one, "
                f"got {', '.join(sorted({m.host for m in present})[:8])}; leave loopback off"
            )
        return self._propose(refusal, local=local and self.me.loopback is not False)

    def _answer(self, verdict: str) -> None:
        """Prove to those right below that the verdict is one of this job."""
        for child in self._children():
            entry = self.store.get(self.key(child))
            self._set(f"answer/{child}", self.secret.prove("answer", entry, verdict.encode()))

    def _check_answer(self, entry: bytes, verdict: str) -> None:
        """Raise LaunchError unless who is above has proved the secret over this rank's number."""
        if self.launch.rank == 0:
            return
        key = f"answer/{self.launch.rank}"
        self._await(time.monotonic() + _ANSWER_S, [key])
        proof = self.store.get(key) if self.store.check([key]) else b""
        if not self.secret.proves(proof, "answer", entry, verdict.encode()):
            raise LaunchError(
                f"launch: rank {self.launch.rank} expected rank 0 to prove the job's secret (from "
                f"{self.me.secret_source}), got another answer; {self._stranger()}"
            )

    def _stranger(self) -> str:
        return (
            f"what serves {self.launch.master_addr}:{self.launch.master_port} belongs to another "
            f"job or somebody else: set MASTER_PORT to another on all ranks"
        )

    def _farewell(self) -> None:
        """Let the server outlive the news: it stays until those who came have heard the reason."""
        self.store.set(f"heard/{self.launch.rank}", "")
        if self.launch.rank == 0 and not self.launch.agent_store:
            missing = self._missing(range(self.launch.world_size))
            came = [rank for rank in range(self.launch.world_size) if rank not in missing]
            self._await(time.monotonic() + _GRACE_S, [f"heard/{rank}" for rank in came])

    def _await(self, deadline: float, *alternatives: Sequence[str]) -> None:
        """Wait until all keys of one alternative are there, or the deadline has passed.

        Asks again and again, slower and slower: a blocking wait would shut out signals, and
        torch writes warnings to stderr when it ends without success.
        """
        pause_s, listens_at = 0.001, time.monotonic() + _LISTEN_S
        while not any(map(self._are_there, alternatives)):
            now = time.monotonic()
            left = deadline - now
            if left <= 0:
                return
            if now > listens_at:
                self._hear_notices()
                if self.is_over():
                    raise OverError
                listens_at = now + _LISTEN_S
            time.sleep(min(pause_s, left))
            pause_s = min(2 * pause_s, _longest_pause_s(self.launch.world_size))

    def _are_there(self, keys: Sequence[str]) -> bool:
        return not keys or self.store.check(list(keys))

    def _missing(self, ranks: Sequence[int]) -> list[int]:
        """Return who has not come; asks for all at once, then for halves that are not complete."""
        if self.store.check([self.key(rank) for rank in ranks]):
            return []
        if len(ranks) == 1:
            return [*ranks]
        middle = len(ranks) // 2
        return self._missing(ranks[:middle]) + self._missing(ranks[middle:])

    def _absence(self, missing: Sequence[int]) -> str:
        size = self.launch.world_size
        return (
            f"not all ranks came within {self.timeout_s:g} s, expected {size}, got "
            f"{size - len(missing)}: missing {_named(missing)}; look at the logs of the missing, "
            f"check that the launcher started {size} processes, or raise comm.timeout_s"
        )

    def _unequal(self, members: Sequence[Member]) -> str:
        """Return how what the ranks run differs from rank 0's; empty when it does not."""
        for what in self.me.versions:
            refusal = self._differ(members, what, [m.versions.get(what) for m in members])
            if refusal:
                return f"{refusal}; use one environment on all machines"
        refusal = self._differ(members, "comm.loopback", [m.loopback for m in members])
        return refusal and f"{refusal}; give all ranks one setting"

    def _differ(self, members: Sequence[Member], what: str, values: Sequence[object]) -> str:
        """Return whose value is not rank 0's, the first; empty if all are."""
        other = next((value for value in values if value != values[0]), values[0])
        if other == values[0]:
            return ""
        alike = [m.rank for m, value in zip(members, values, strict=True) if value == other]
        return (
            f"the ranks do not fit together, expected {what} {values[0]} as on rank 0, got "
            f"{other} on {_named(alike)}"
        )

    @staticmethod
    def key(rank: int) -> str:
        """Return where a rank enters its name."""
        return f"rank/{rank}"


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {_spans(ranks)}"


def _spans(ranks: Sequence[int]) -> str:
    """Return ranks in short: ``1, 4-7, 9``."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in spans)
