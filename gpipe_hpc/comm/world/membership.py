"""Membership check: every rank registers in the store, and all ranks receive the same verdict.

Ranks form a tree with rank 0 as root. Each rank receives from its children one line with the result
for their subtrees: whether all ranks have arrived and agree. So no rank reads more than a few
lines. Only if something is wrong does rank 0 read the entries of all ranks, to name those
concerned.

An entry is authenticated with the job's secret, and the parent of a rank answers it with a proof of
its own. So neither a forged entry nor a foreign store in place of rank 0's is accepted.
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

# Time beyond the time-out for other ranks to read or give the verdict.
_GRACE_S: Final = 5.0
_ANSWER_S: Final = 60.0  # ranks that share few cores are slow
_LISTEN_S: Final = 3.0  # interval between checks for notices
_ABSENT: Final = "rank 0 is absent"
_STOPPED: Final = "a rank is stopped"
_VERDICT: Final = "verdict"
_WIDTH: Final = 8
_SAY_S: Final = 15.0  # time after which rank 0 logs the missing ranks
# Below the capacity of a store; each rank still polls at least every two seconds.
_QUESTIONS_A_SECOND: Final = 5000


@dataclass(frozen=True)
class Member:
    """A process's description of itself in the membership check.

    Args:
        rank: rank of the process.
        host: host name.
        machine: equal for processes that reach each other on 127.0.0.1.
        pid: process id.
        started: start time, which distinguishes processes with the same id.
        secret_source: where the process has the secret from.
        versions: versions and world size, which must be equal on all ranks.
        number: a random number, so that no old answer is accepted.
    """

    rank: int
    host: str
    machine: str
    pid: int
    started: str
    secret_source: str
    versions: dict[str, str]
    number: str = field(default_factory=lambda: secrets.token_hex(16))

    @classmethod
    def of(cls, launch: Launch, secret_source: str) -> "Member":
        """Return the description of this process."""
        return cls(
            rank=launch.rank,
            host=socket.gethostname(),
            machine=_machine(),
            pid=os.getpid(),
            started=_started(os.getpid()),
            secret_source=secret_source,
            versions={
                "gpipe_hpc": __version__,
                "torch": torch.__version__,
                "world size": str(launch.world_size),
            },
        )

    def __str__(self) -> str:
        """Return process id and host, for messages."""
        return f"process {self.pid} on {self.host}"

    def facts(self) -> str:
        """Return a digest of the facts that must be equal on all ranks."""
        text = json.dumps(self.versions, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def is_same_process(self, other: "Member") -> bool:
        """Return whether two members are the same process."""
        return self._process() == other._process()

    def runs_here(self) -> bool:
        """Return whether the process runs on this machine."""
        return self.machine == _machine() and self.started == _started(self.pid) != ""

    def _process(self) -> tuple[str, int, str]:
        return self.machine, self.pid, self.started


def _machine() -> str:
    """Return a string equal for processes that share the loopback interface."""
    return shared_identity("net") or socket.gethostname()


def _started(pid: int) -> str:
    """Return the start time of a process in clock ticks since boot; empty if it has ended."""
    try:
        # The fields after the name in parentheses, which may contain any character.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]


class ObsoleteCheckError(Exception):
    """Raised in ranks that wait in a membership check when rank 0 has opened a newer one."""


class _SubtreeFacts(NamedTuple):
    """What all ranks of a subtree have in common: the digest of their facts, and the machine.

    `machine` is empty if they are on several machines.
    """

    facts: str
    machine: str


def _depth(rank: int) -> int:
    """Return the depth of a rank in the tree."""
    depth = 0
    while rank:
        rank, depth = (rank - 1) // _WIDTH, depth + 1
    return depth


def _longest_pause_s(world_size: int) -> float:
    """Return the longest interval between a rank's queries of the store, in seconds."""
    return min(max(0.2, world_size / _QUESTIONS_A_SECOND), 2.0)


@dataclass(frozen=True)
class MembershipCheck:
    """A check, through a store, that all ranks have arrived and agree.

    Rank 0 lets all ranks continue once all have arrived and agree; a rank that has waited too long
    reports which ones are missing. Only the first verdict counts, so all ranks act on the same one.

    Args:
        launch: rank and world size of this process.
        store: store shared by all ranks.
        secret: secret that authenticates entries and verdicts.
        me: description of this process.
        timeout_s: time-out, for messages.
        deadline: time (`time.monotonic`) at which the time-out expires.
        is_over: returns whether rank 0 has opened a newer check.
    """

    launch: Launch
    store: Store
    secret: Secret
    me: Member
    timeout_s: float
    deadline: float
    is_over: Callable[[], bool] = lambda: False

    def wait_for_all(self) -> bool:
        """Wait until all ranks have arrived and agree; return whether all are on one machine.

        Raises LaunchError if they do not, and ObsoleteCheckError if the check ends while this rank
        waits.
        """
        rank = self.launch.rank
        entry = self._entry()
        try:
            self._set(self.key(rank), entry)
            text = self._verdict()
            verdict = json.loads(text)
            if verdict["refusal"]:
                self._await_readers()
            else:
                self._check_answer(entry, text)
                self._answer(text)
        except dist.DistError as error:
            raise LaunchError(
                f"launch: rank {rank} lost the store of rank 0 before all ranks had arrived "
                f"({error}); rank 0 has ended: look at its log"
            ) from error
        except (ValueError, KeyError, TypeError) as error:
            raise LaunchError(
                f"launch: rank {rank} received an invalid check result from the store ({error}); "
                f"{self._stranger()}"
            ) from error
        if verdict["refusal"]:
            raise LaunchError(f"launch: rank {rank}: {verdict['refusal']}")
        return bool(verdict["local"])

    def refuse_double(self, limit_s: float = _GRACE_S) -> bool:
        """Raise LaunchError, on all waiting ranks, if another process has this rank.

        Returns False if no process has registered as this rank within ``limit_s`` seconds.
        """
        key = self.key(self.launch.rank)
        self._await(time.monotonic() + limit_s, [key])
        if not self.store.check([key]):
            return False
        first = self._member(self.launch.rank)
        if first is None:
            return False
        told = (
            f"two processes are rank {self.launch.rank}: {first} and {self.me}; set a different "
            "RANK for each"
        )
        verdict = json.loads(self._propose(told, local=False))
        others = "" if verdict["refusal"] else "; the first one continues"
        raise LaunchError(f"launch: rank {self.launch.rank}: {told}{others}")

    def refuse_living_double(self) -> None:
        """Raise LaunchError as `refuse_double` if another live process of this host has this rank.

        Processes may use the environment of one rank one after the other, but not at the same time.
        """
        other = self.member()
        if other is not None and not other.is_same_process(self.me) and other.runs_here():
            self.refuse_double()

    @property
    def has_entered(self) -> bool:
        """Return whether a process has registered as this rank."""
        return self._exist([self.key(self.launch.rank)])

    @property
    def has_verdict(self) -> bool:
        """Return whether a verdict was given."""
        return self._exist([_VERDICT])

    def say_absent(self, told: str) -> None:
        """Publish an authenticated notice of why rank 0 does not take part in this check."""
        self._set(self._key_of(_ABSENT), self.secret.seal(_ABSENT, told.encode()))

    def announce_stop(self, told: str) -> None:
        """Publish an authenticated notice that a signal has ended this rank."""
        self._set(self._key_of(_STOPPED), self.secret.seal(_STOPPED, told.encode()))

    def _key_of(self, notice: str) -> str:
        place = f"{self.launch.master_addr} {self.launch.master_port} {self.launch.world_size}"
        return f"notice/{self.secret.prove(notice, place.encode()).hex()}"

    def _raise_notices(self) -> None:
        """Raise the errors of notices published by absent ranks.

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
        """Return the process registered as this rank; None if there is none of this job."""
        key = self.key(self.launch.rank)
        return self._member(self.launch.rank) if self.store.check([key]) else None

    def _entry(self) -> bytes:
        return self.secret.seal(
            f"rank {self.launch.rank} comes", json.dumps(asdict(self.me)).encode()
        )

    def _set(self, key: str, value: bytes) -> None:
        write: Any = self.store.set  # also accepts bytes, unlike its type stub
        write(key, value)

    def _member(self, rank: int) -> Member | None:
        """Return the process registered as `rank`; None if its entry is not authentic."""
        entry = self.store.get(self.key(rank))
        try:
            return Member(**json.loads(self.secret.unseal(f"rank {rank} comes", entry)))
        except (ConnectionError, ValueError, TypeError):
            return None

    def _claims_of(self, rank: int) -> str:
        """Describe a rank by its unauthenticated entry, as a hint for an error message."""
        try:
            claims = json.loads(self.store.get(self.key(rank))[PROOF_BYTES:])
            return (
                f"rank {rank} (process {int(claims['pid'])} on {str(claims['host'])[:100]}, secret "
                f"from {str(claims['secret_source'])[:100]})"
            )
        except (ValueError, KeyError, TypeError):
            return f"rank {rank}"

    def _verdict(self) -> str:
        """Wait for the verdict and return it; give the verdict if this rank has to."""
        rank = self.launch.rank
        below = [f"below/{child}" for child in self._children()]
        if rank == 0:
            self._await(min(self.deadline, time.monotonic() + _SAY_S), [_VERDICT], below)
            if not self._exist([_VERDICT]) and not self._exist(below):
                self._say_missing()
        self._await(self.deadline, [_VERDICT], below)
        if not self._exist([_VERDICT]) and self._exist(below):
            told = self._subtree_facts(self._children())
            if rank == 0 and told is not None:
                self._raise_notices()  # a rank may have been stopped since it arrived
                return self._decide(told)
            if rank > 0:
                self._set(f"below/{rank}", self._sealed(told))
        # Some ranks differ, so rank 0 has to check each entry.
        everyone = [[self.key(each) for each in range(self.launch.world_size)]] if not rank else []
        self._await(self.deadline, [_VERDICT], *everyone)
        # Ranks nearer to rank 0 act first; otherwise all would query all missing ranks.
        self._await(time.monotonic() + _GRACE_S * _depth(rank), [_VERDICT])
        if self._exist([_VERDICT]):
            return self.store.get(_VERDICT).decode()
        missing = self._missing(range(self.launch.world_size))
        if missing:
            return self._propose(self._absence(missing), local=False)
        if rank == 0:
            return self._judge()
        # The last rank has just arrived, and rank 0 is about to give the verdict.
        self._await(time.monotonic() + _GRACE_S, [_VERDICT])
        return self._propose(
            f"rank 0 started but did not report the result of its checks within "
            f"{self.timeout_s:g} s; see its log",
            local=False,
        )

    def _say_missing(self) -> None:
        """Log the missing ranks, if there are any."""
        missing = self._missing(range(self.launch.world_size))
        if missing and time.monotonic() < self.deadline:
            log.warning(
                "launch: rank 0 on %s still waits at %s:%d for %s of %d, which have not started or "
                "cannot reach it",
                *(self.me.host, self.launch.master_addr, self.launch.master_port),
                *(_named(missing), self.launch.world_size),
            )

    def _children(self) -> range:
        """Return the children of this rank in the tree."""
        first = _WIDTH * self.launch.rank + 1
        return range(first, max(first, min(first + _WIDTH, self.launch.world_size)))

    def _subtree_facts(self, children: Sequence[int]) -> "_SubtreeFacts | None":
        """Return what the ranks of this rank's subtree have in common; None if facts differ."""
        own = _SubtreeFacts(self.me.facts(), self.me.machine)
        for child in children:
            sealed = self.store.get(f"below/{child}")
            try:
                text = self.secret.unseal(f"below rank {child}", sealed)
                told = json.loads(text)
                theirs = None if told is None else _SubtreeFacts(*map(str, told))
            except (ConnectionError, ValueError, TypeError):
                return None
            if theirs is None or theirs.facts != own.facts:
                return None
            if theirs.machine != own.machine:
                own = own._replace(machine="")
        return own

    def _sealed(self, told: "_SubtreeFacts | None") -> bytes:
        return self.secret.seal(f"below rank {self.launch.rank}", json.dumps(told).encode())

    def _decide(self, told: "_SubtreeFacts") -> str:
        """Let all ranks continue and return the verdict; called by rank 0 if all agree."""
        return self._propose("", local=told.machine != "")

    def _propose(self, refusal: str, *, local: bool) -> str:
        """Give a verdict if there is none yet; return the verdict that applies."""
        text = json.dumps({"refusal": refusal, "local": local})
        return self.store.compare_set(_VERDICT, "", text).decode()

    def _judge(self) -> str:
        """Read the entries of all ranks, and give and return the verdict; rank 0 only."""
        ranks = range(self.launch.world_size)
        members = [self._member(rank) for rank in ranks]
        strangers = [rank for rank, member in enumerate(members) if member is None]
        if strangers:
            who = ", ".join(map(self._claims_of, strangers[:4]))
            return self._propose(
                f"the ranks do not share a secret: rank 0 has one from {self.me.secret_source}, "
                f"{len(strangers)} of {len(members)} ranks have a different one or none: "
                f"{who}; set {SECRET_VARIABLE} to the same value on all ranks",
                local=False,
            )
        present = [member for member in members if member is not None]
        refusal, local = self._unequal(present), len({m.machine for m in present}) == 1
        return self._propose(refusal, local=local)

    def _answer(self, verdict: str) -> None:
        """Prove to the children of this rank that the verdict is authentic."""
        for child in self._children():
            entry = self.store.get(self.key(child))
            self._set(f"answer/{child}", self.secret.prove("answer", entry, verdict.encode()))

    def _check_answer(self, entry: bytes, verdict: str) -> None:
        """Raise LaunchError unless the parent has authenticated the verdict for this rank."""
        if self.launch.rank == 0:
            return
        key = f"answer/{self.launch.rank}"
        self._await(time.monotonic() + _ANSWER_S, [key])
        proof = self.store.get(key) if self.store.check([key]) else b""
        if not self.secret.proves(proof, "answer", entry, verdict.encode()):
            raise LaunchError(
                f"launch: rank {self.launch.rank}: rank 0 did not prove the job's secret (from "
                f"{self.me.secret_source}); {self._stranger()}"
            )

    def _stranger(self) -> str:
        return (
            f"the store at {self.launch.master_addr}:{self.launch.master_port} belongs to another "
            f"job or user: set MASTER_PORT to another port on all ranks"
        )

    def _await_readers(self) -> None:
        """Keep the store running until all ranks that arrived have read the refusal."""
        self.store.set(f"heard/{self.launch.rank}", "")
        if self.launch.rank == 0 and not self.launch.agent_store:
            missing = self._missing(range(self.launch.world_size))
            came = [rank for rank in range(self.launch.world_size) if rank not in missing]
            self._await(time.monotonic() + _GRACE_S, [f"heard/{rank}" for rank in came])

    def _await(self, deadline: float, *alternatives: Sequence[str]) -> None:
        """Wait until all keys of one alternative exist, or until the deadline.

        Polls at increasing intervals: a blocking wait would delay signals, and torch would print
        warnings to stderr when it times out.
        """
        pause_s, listens_at = 0.001, time.monotonic() + _LISTEN_S
        while not any(map(self._exist, alternatives)):
            now = time.monotonic()
            left = deadline - now
            if left <= 0:
                return
            if now > listens_at:
                self._raise_notices()
                if self.is_over():
                    raise ObsoleteCheckError
                listens_at = now + _LISTEN_S
            time.sleep(min(pause_s, left))
            pause_s = min(2 * pause_s, _longest_pause_s(self.launch.world_size))

    def _exist(self, keys: Sequence[str]) -> bool:
        return not keys or self.store.check(list(keys))

    def _missing(self, ranks: Sequence[int]) -> list[int]:
        """Return the ranks that have not arrived, by bisection of store queries."""
        if self.store.check([self.key(rank) for rank in ranks]):
            return []
        if len(ranks) == 1:
            return [*ranks]
        middle = len(ranks) // 2
        return self._missing(ranks[:middle]) + self._missing(ranks[middle:])

    def _absence(self, missing: Sequence[int]) -> str:
        size = self.launch.world_size
        return (
            f"not all ranks arrived within {self.timeout_s:g} s, expected {size}, got "
            f"{size - len(missing)}: missing {_named(missing)}; look at the logs of the missing "
            f"ranks, check that the launcher started {size} processes, or raise comm.timeout_s"
        )

    def _unequal(self, members: Sequence[Member]) -> str:
        """Return a message about versions that differ from rank 0's; empty if none does."""
        for what in self.me.versions:
            refusal = self._differ(members, what, [m.versions.get(what) for m in members])
            if refusal:
                return f"{refusal}; use one environment on all machines"
        return ""

    def _differ(self, members: Sequence[Member], what: str, values: Sequence[object]) -> str:
        """Return a message about the first value that differs from rank 0's; empty if none does."""
        other = next((value for value in values if value != values[0]), values[0])
        if other == values[0]:
            return ""
        alike = [m.rank for m, value in zip(members, values, strict=True) if value == other]
        return f"the ranks differ: {what} is {values[0]} on rank 0 and {other} on {_named(alike)}"

    @staticmethod
    def key(rank: int) -> str:
        """Return the store key under which a rank registers."""
        return f"rank/{rank}"


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {_spans(ranks)}"


def _spans(ranks: Sequence[int]) -> str:
    """Format ranks as ``1, 4-7, 9``."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in spans)
