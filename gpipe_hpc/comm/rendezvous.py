"""Bring the ranks of a launch together: one store they all reach, and nobody missing."""

import json
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from gpipe_hpc import __version__
from gpipe_hpc.comm.launcher import Launch
from gpipe_hpc.errors import LaunchError

# How long past its time a rank stays for others to hear, or to speak.
_GRACE_S = 5.0


def rendezvous(launch: Launch, timeout_s: float, loopback: bool | None = None) -> Store:
    """Return a store that all ranks of the launch share, once all of them have come.

    Rank 0 serves it, unless torchrun's agent already does. Its keys are separate for every
    attempt of a job, so nobody reads what a killed attempt left (stale addresses hang Gloo).
    ``loopback``: listen on 127.0.0.1 only; None means when all ranks are on this machine. Then
    GLOO_SOCKET_IFNAME is set to the loopback interface too, unless it is set. A world of one rank
    opens nothing.

    Raises `LaunchError` on every rank when some have not come within ``timeout_s`` seconds,
    naming them, and when the ranks run unequal versions of torch or of this package.
    """
    local = launch.one_machine if loopback is None else loopback
    if local and not launch.one_machine:
        raise LaunchError(
            f"launch: loopback does not reach the other machines, expected all "
            f"{launch.world_size} ranks on this one, got {launch.local_size}; leave "
            f"loopback off"
        )
    if local:
        _keep_gloo_local()
    if launch.world_size == 1:
        return PrefixStore(f"gen{launch.restart_count}", HashStore())
    deadline = time.monotonic() + timeout_s
    store = _open_store(launch, local, timeout_s, deadline)
    meeting = _Meeting(launch, _private_keys(launch, store), timeout_s, deadline)
    meeting.hold()
    return meeting.store


def _keep_gloo_local() -> None:
    names = [name for _, name in socket.if_nameindex()]
    loopback = next((name for name in ("lo", "lo0") if name in names), None)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


def _open_store(launch: Launch, local: bool, timeout_s: float, deadline: float) -> TCPStore:
    """Serve the store on rank 0 of a launch that has none, else connect to it."""
    serves = launch.rank == 0 and not launch.agent_store
    addr = "127.0.0.1" if local and not launch.agent_store else launch.master_addr
    listening = _listening_socket(launch, local) if serves else None
    if listening is None:
        _await_server(launch, addr, timeout_s, deadline)
    try:
        return TCPStore(
            "127.0.0.1" if serves else addr,
            launch.master_port if listening is None else listening.getsockname()[1],
            launch.world_size,
            serves,
            timeout=timedelta(seconds=max(timeout_s, 1.0)),
            wait_for_workers=False,
            # TCPStore's own socket would listen on all interfaces.
            master_listen_fd=None if listening is None else listening.detach(),
        )
    except dist.DistError as error:
        raise LaunchError(
            f"launch: rank {launch.rank} cannot use the store, expected one at "
            f"{addr}:{launch.master_port}, got {error}; check MASTER_ADDR and MASTER_PORT"
        ) from error


def _listening_socket(launch: Launch, local: bool) -> socket.socket:
    port = launch.master_port
    try:
        if local:
            return socket.create_server(("127.0.0.1", port), backlog=launch.world_size)
        if socket.has_dualstack_ipv6():
            return socket.create_server(
                ("", port),
                family=socket.AF_INET6,
                backlog=launch.world_size,
                dualstack_ipv6=True,
            )
        return socket.create_server(("", port), backlog=launch.world_size)
    except OSError as error:
        raise LaunchError(
            f"launch: rank 0 cannot listen, expected port {port} to be free, got {error.strerror}; "
            f"end what holds the port, or set MASTER_PORT to another on all ranks"
        ) from error


def _await_server(launch: Launch, addr: str, timeout_s: float, deadline: float) -> None:
    """Knock until somebody listens: TCPStore itself would fill stderr while it tries."""
    host = "torchrun's agent" if launch.agent_store else "rank 0"
    while True:
        left = deadline - time.monotonic()
        try:
            socket.create_connection((addr, launch.master_port), max(left, 0.1)).close()
            return
        except OSError as error:
            if left <= 0:
                raise LaunchError(
                    f"launch: rank {launch.rank} of {launch.world_size} waited {timeout_s:g} s, "
                    f"expected {host} at {addr}:{launch.master_port}, got no answer ({error}): "
                    f"{'it' if launch.agent_store else 'missing rank 0'} has not started, or "
                    f"cannot be reached; look at its log, check MASTER_ADDR, MASTER_PORT and "
                    f"firewalls"
                ) from error
        time.sleep(min(0.05, max(left, 0.0)))


def _private_keys(launch: Launch, store: Store) -> Store:
    """Return the part of the store for this attempt and this meeting.

    An agent's store outlives attempts and groups: each rank counts its own visits, so all agree
    on the number without a word. (A store served by rank 0 must be dropped to meet again.)
    """
    attempt = PrefixStore(f"gen{launch.restart_count}", store)
    visit = attempt.add(f"visits/{launch.rank}", 1)
    return PrefixStore(f"visit{visit}", attempt)


@dataclass(frozen=True)
class _Meeting:
    """One roll call: every rank enters its name, and one verdict goes for all.

    Rank 0 says "go" once all have come and fit together; whoever waited too long says who is
    missing. Only the first verdict counts, so no two ranks ever act on different ones.
    """

    launch: Launch
    store: Store
    timeout_s: float
    deadline: float

    def hold(self) -> None:
        """Return when all ranks have come and fit together; else raise `LaunchError`."""
        rank = self.launch.rank
        try:
            self.store.set(self._key(rank), json.dumps(_versions(self.launch)))
            verdict = self._verdict()
            if verdict != "go":
                self._farewell()
        except dist.DistError as error:
            raise LaunchError(
                f"launch: rank {rank} lost the store, expected it to be served until all ranks "
                f"have come, got {error}; rank 0 has ended: look at its log"
            ) from error
        if verdict != "go":
            raise LaunchError(f"launch: rank {rank}: {verdict}")

    def _verdict(self) -> str:
        """Wait for the verdict, and give it where that is this rank's turn."""
        everyone = [self._key(rank) for rank in range(self.launch.world_size)]
        if self.launch.rank == 0:
            self._await(self.deadline, ["verdict"], everyone)
        else:
            self._await(self.deadline, ["verdict"])
        missing = self._missing()
        if missing:
            proposal = self._absence(missing)
        elif self.launch.rank == 0:
            proposal = self._unequal() or "go"
        else:
            # The last came just now: rank 0 is about to speak.
            self._await(time.monotonic() + _GRACE_S, ["verdict"])
            proposal = f"rank 0 came but gave no verdict within {self.timeout_s:g} s; see its log"
        return self.store.compare_set("verdict", "", proposal).decode()

    def _farewell(self) -> None:
        """Let the server outlive the news: it stays until those who came have heard the reason."""
        self.store.set(f"heard/{self.launch.rank}", "")
        if self.launch.rank == 0 and not self.launch.agent_store:
            missing = self._missing()
            came = [rank for rank in range(self.launch.world_size) if rank not in missing]
            self._await(time.monotonic() + _GRACE_S, [f"heard/{rank}" for rank in came])

    def _await(self, deadline: float, *alternatives: Sequence[str]) -> None:
        """Wait until all keys of one alternative are there, or the deadline has passed.

        Asks again and again, slower and slower: a blocking wait would shut out signals, and
        torch writes warnings to stderr when it ends without success.
        """
        pause_s = 0.001
        while not any(self.store.check(list(keys)) for keys in alternatives):
            left = deadline - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(pause_s, left))
            pause_s = min(2 * pause_s, 0.2)

    def _missing(self) -> list[int]:
        ranks = range(self.launch.world_size)
        return [rank for rank in ranks if not self.store.check([self._key(rank)])]

    def _absence(self, missing: Sequence[int]) -> str:
        size = self.launch.world_size
        who = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {_spans(missing)}"
        return (
            f"not all ranks came within {self.timeout_s:g} s, expected {size}, got "
            f"{size - len(missing)}: missing {who}; look at the logs of the missing, check that "
            f"the launcher started {size} processes, or raise comm.timeout_s"
        )

    def _unequal(self) -> str:
        """Return how the ranks' versions differ from rank 0's; empty when they do not."""
        own = _versions(self.launch)
        for rank in range(1, self.launch.world_size):
            theirs = json.loads(self.store.get(self._key(rank)))
            for what, expected in own.items():
                if theirs.get(what) != expected:
                    return (
                        f"the ranks do not fit together, expected {what} {expected} as on rank "
                        f"0, got {theirs.get(what)} on rank {rank}; use one environment on all "
                        f"machines"
                    )
        return ""

    @staticmethod
    def _key(rank: int) -> str:
        return f"rank/{rank}"


def _versions(launch: Launch) -> dict[str, str]:
    return {
        "gpipe_hpc": __version__,
        "torch": torch.__version__,
        "world size": str(launch.world_size),
    }


def _spans(ranks: Sequence[int]) -> str:
    """Return ranks in short: ``1, 4-7, 9``."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in spans)
