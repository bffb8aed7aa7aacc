"""Bring the ranks of a launch together: one store they all reach, and nobody missing."""

import errno
import logging
import resource
import socket
import threading
import time
from concurrent.futures import Future
from datetime import timedelta
from typing import Final

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from gpipe_hpc.comm.joining.interfaces import follow_gloo, keep_local
from gpipe_hpc.comm.joining.launcher import Launch
from gpipe_hpc.comm.joining.roll_call import Member, RollCall
from gpipe_hpc.comm.joining.secret import Secret
from gpipe_hpc.errors import LaunchError

# How long a store may take to answer that may be none.
_LOOK_S: Final = 3.0
# After which a rank says for whom it waits.
_SAY_S: Final = 15.0
# That rank 0 opens beside connections to the store.
_OTHER_FILES: Final = 512

log = logging.getLogger("gpipe_hpc.comm")


def rendezvous(
    launch: Launch, timeout_s: float, loopback: bool | None = None, secret: Secret | None = None
) -> Store:
    """Return a store that all ranks of the launch share, once all of them have come.

    Rank 0 serves it, unless torchrun's agent already does. Its keys are separate for every
    attempt of a job, so nobody reads what a killed attempt left (stale addresses hang Gloo).
    ``loopback``: listen on 127.0.0.1 only; None means when all ranks are on this machine. Then
    Gloo, NCCL and their kind are kept on the loopback interface too, on all ranks alike, unless
    their variables say otherwise; on several machines they listen where GLOO_SOCKET_IFNAME says.
    ``secret``: what the ranks prove to each other; None lets everybody in. A world of one rank
    opens nothing.

    Raises `LaunchError` on every rank when some have not come within ``timeout_s`` seconds,
    naming them, when two processes are one rank, when the ranks have unequal secrets, and when
    they run unequal versions of torch or of this package.
    """
    local = launch.one_machine if loopback is None else loopback
    if loopback and launch.local_known and not launch.one_machine:
        raise LaunchError(
            f"launch: loopback does not reach the other machines, expected all "
            f"{launch.world_size} ranks on this one, got {launch.local_size}; leave "
            f"loopback off"
        )
    if launch.world_size == 1:
        if local:
            keep_local()
        return PrefixStore(f"gen{launch.restart_count}", HashStore())
    if not launch.agent_store:
        _check_address(launch, local)
    key = Secret(b"", "nowhere", guards=False) if secret is None else secret
    meeting = _Meeting(
        launch,
        key.derive(f"rendezvous {launch.restart_count}"),
        Member.of(launch, loopback, key.source),
        timeout_s,
        time.monotonic() + timeout_s,
    )
    store, all_local = meeting.hold(local)
    if all_local:
        keep_local()
    else:
        follow_gloo()
    return store


def _check_address(launch: Launch, local: bool) -> None:
    """Refuse a MASTER_ADDR that is none of this machine's where rank 0 must be on it."""
    if is_own_address(launch.master_addr):
        return
    if local:
        raise LaunchError(
            f"launch: rank {launch.rank}: wrong MASTER_ADDR, expected an address of this machine, "
            f"as all {launch.world_size} ranks are said to be on it, got {launch.master_addr}; "
            f"correct MASTER_ADDR, or the number of ranks here (LOCAL_WORLD_SIZE)"
        )
    if launch.rank == 0:
        log.warning(
            "launch: MASTER_ADDR=%s is no address of rank 0's machine (%s); unless something "
            "passes connections on, the other ranks will wait in vain",
            launch.master_addr,
            socket.gethostname(),
        )


def is_own_address(name: str) -> bool:
    """Say whether a host's name or address is one of this machine's."""
    try:
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    return any(_can_bind(family, address) for family, _, _, _, address in found)


def _can_bind(family: int, address: tuple[object, ...]) -> bool:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


class _Meeting:
    """The way of one rank to a store and through the roll call."""

    def __init__(
        self, launch: Launch, secret: Secret, me: Member, timeout_s: float, deadline: float
    ) -> None:
        self._launch, self._secret, self._me = launch, secret, me
        self._timeout_s, self._deadline = timeout_s, deadline

    def hold(self, local: bool) -> tuple[Store, bool]:
        """Return the store, and whether all ranks are on one machine."""
        launch = self._launch
        serves = launch.rank == 0 and not launch.agent_store
        addr = "127.0.0.1" if local and not launch.agent_store else launch.master_addr
        store = self._serve(local) if serves else self._join(addr)
        attempt = PrefixStore(f"gen{launch.restart_count}", store)
        keys = PrefixStore(f"visit{1 if serves else self._visit(attempt)}", attempt)
        return keys, self._call(keys).hold()

    def _call(self, keys: Store) -> RollCall:
        return RollCall(self._launch, keys, self._secret, self._me, self._timeout_s, self._deadline)

    def _visit(self, attempt: Store) -> int:
        """Return the number of this meeting; refuse a second process of one rank.

        An agent's store outlives attempts and groups: each rank counts its own visits, so all
        agree on the number without a word. A store that rank 0 serves is there for one meeting.
        """
        rank = self._launch.rank
        visit = attempt.add(f"visits/{rank}", 1)
        if visit == 1:
            return 1
        if not self._launch.agent_store:
            self._call(PrefixStore("visit1", attempt)).refuse_double()
            raise LaunchError(
                f"launch: rank {rank}: two processes are rank {rank}, expected one, got {self._me} "
                f"and another that has ended or has another secret; give each a RANK of its own"
            )
        # One process after another may use the environment of one rank; not two at once.
        before = self._call(PrefixStore(f"visit{visit - 1}", attempt))
        other = before.member()
        if other is not None and not other.is_same_process(self._me) and other.runs_here():
            before.refuse_double()
        return visit

    def _serve(self, local: bool) -> TCPStore:
        """Serve the store."""
        make_room(2 * self._launch.world_size + _OTHER_FILES)
        try:
            listening = _listening_socket(self._launch, local)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                self._refuse_other_first()
            raise LaunchError(
                f"launch: rank 0 cannot listen, expected port {self._launch.master_port} to be "
                f"free, got {error.strerror}; end what holds the port, or set MASTER_PORT to "
                f"another on all ranks"
            ) from error
        return TCPStore(
            "127.0.0.1",
            listening.getsockname()[1],
            self._launch.world_size,
            True,
            timeout=timedelta(seconds=max(self._timeout_s, 1.0)),
            wait_for_workers=False,
            # TCPStore's own socket would listen on all interfaces.
            master_listen_fd=listening.detach(),
        )

    def _refuse_other_first(self) -> None:
        """Raise LaunchError, here and there, if it is another rank 0 of this job that listens."""
        try:
            store = _client("127.0.0.1", self._launch.master_port, self._launch, _LOOK_S, _LOOK_S)
            attempt = PrefixStore(f"gen{self._launch.restart_count}", store)
            self._call(PrefixStore("visit1", attempt)).refuse_double(_LOOK_S)
        except dist.DistError:
            return

    def _join(self, addr: str) -> TCPStore:
        """Connect to the store of rank 0 or of torchrun's agent."""
        self._await_server(addr)
        port = self._launch.master_port
        try:
            left = max(self._deadline - time.monotonic(), _LOOK_S)
            return _client(addr, port, self._launch, self._timeout_s, left)
        except dist.DistError as error:
            raise LaunchError(
                f"launch: rank {self._launch.rank} cannot use the store, expected one at "
                f"{addr}:{port}, got {error}; check MASTER_ADDR and MASTER_PORT"
            ) from error

    def _await_server(self, addr: str) -> None:
        """Knock until somebody listens: TCPStore itself would fill stderr while it tries."""
        launch = self._launch
        host = "torchrun's agent" if launch.agent_store else "rank 0"
        said_at = time.monotonic() + _SAY_S
        while True:
            left = self._deadline - time.monotonic()
            try:
                socket.create_connection((addr, launch.master_port), max(left, 0.1)).close()
                return
            except OSError as error:
                if left <= 0:
                    raise LaunchError(
                        f"launch: rank {launch.rank} of {launch.world_size} waited "
                        f"{self._timeout_s:g} s, expected {host} at {addr}:{launch.master_port}, "
                        f"got no answer ({error}): "
                        f"{'it' if launch.agent_store else 'missing rank 0'} has not started, or "
                        f"cannot be reached; look at its log, check MASTER_ADDR, MASTER_PORT and "
                        f"firewalls"
                    ) from error
                if time.monotonic() > said_at:
                    said_at = self._deadline
                    log.warning(
                        "launch: rank %d still waits for %s at %s:%d (%s)",
                        *(launch.rank, host, addr, launch.master_port, error),
                    )
            time.sleep(min(0.05, max(left, 0.0)))


def _client(addr: str, port: int, launch: Launch, timeout_s: float, limit_s: float) -> TCPStore:
    """Connect to a store within ``limit_s`` seconds; DistError if there is none.

    On a thread: if something else listens there, TCPStore waits for its answer without end.
    """
    answer: Future[TCPStore] = Future()

    def connect() -> None:
        try:
            store = TCPStore(
                addr,
                port,
                launch.world_size,
                False,
                timeout=timedelta(seconds=max(timeout_s, 1.0)),
                wait_for_workers=False,
            )
        except Exception as error:
            answer.set_exception(error)
        else:
            answer.set_result(store)

    threading.Thread(target=connect, name="store", daemon=True).start()
    try:
        return answer.result(limit_s)
    except TimeoutError:
        raise dist.DistError(f"no answer of a store within {limit_s:.3g} s") from None


def make_room(num_files: int) -> None:
    """Let this process open so many files, as far as it may; warn where it may not.

    Who serves the store has two connections for each rank: its own, and its watcher's.
    """
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if limit == unlimited or limit >= num_files:
        return
    allowed = num_files if most == unlimited else min(num_files, most)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, most))
    if allowed < num_files:
        log.warning(
            "launch: rank 0 serves all ranks, expected to open %d files, got a limit of %d; raise "
            "it where rank 0 is started (ulimit -Hn, LimitNOFILE)",
            num_files,
            allowed,
        )


def _listening_socket(launch: Launch, local: bool) -> socket.socket:
    port = launch.master_port
    if local:
        return socket.create_server(("127.0.0.1", port), backlog=launch.world_size)
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, backlog=launch.world_size, dualstack_ipv6=True
        )
    return socket.create_server(("", port), backlog=launch.world_size)
