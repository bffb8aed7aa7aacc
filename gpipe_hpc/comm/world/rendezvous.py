"""Rendezvous of the ranks of a launch: a common store, and a check that all ranks are present."""

import contextlib
import errno
import logging
import os
import socket
import stat
import threading
import time
from collections.abc import Container
from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta
from typing import Final, NamedTuple

import torch.distributed as dist

from gpipe_hpc.comm.net.addresses import (
    Interface,
    address_outside,
    address_towards,
    holder_of,
    is_loopback,
)
from gpipe_hpc.comm.net.interfaces import (
    follow_gloo,
    listen_on,
    listen_on_loopback,
    refuse_loopback,
    requested_interface,
)
from gpipe_hpc.comm.net.secret import Secret
from gpipe_hpc.comm.watchdog.timeouts import DEFAULT_REACH_S
from gpipe_hpc.comm.world.launcher import Launch
from gpipe_hpc.comm.world.membership import Member, MembershipCheck, ObsoleteCheckError
from gpipe_hpc.comm.world.rendezvous_attempts import RendezvousAttempts
from gpipe_hpc.device.host.open_files import allow_files
from gpipe_hpc.errors import LaunchError
from gpipe_hpc.torch_compat import HashStore, PrefixStore, Store, TCPStore

# Time for a possible store to answer.
_LOOK_S: Final = 3.0
# Time after which a rank logs what it waits for.
_SAY_S: Final = 15.0
# Time-out of one connection attempt to the store's host.
_KNOCK_S: Final = 5.0
# No attempt is started if less than this is left.
_CLOSE_S: Final = 1.0
_PAUSE_S: Final = 0.1
# Time for a rank ended by a signal to find the store, and for others to read its notice.
_STOPPED_S: Final = 3.0
_HEARD_S: Final = 3.5
# Time for TCPStore to return after its connections were shut down; it may pause for seconds.
_LEAVE_S: Final = 10.0
_NUM_LOOKED_FOR: Final = 65  # number of ranks of which one must arrive
_SEEN_AT: Final = "seen_at"  # address at which other hosts reach the store's host
# Files that rank 0 opens besides connections to the store.
_OTHER_FILES: Final = 512

log = logging.getLogger("gpipe_hpc.comm")


class RendezvousResult(NamedTuple):
    """Result of a rendezvous: the shared store, and the address on which this rank must listen.

    `address` is None if all ranks are on this machine.
    """

    store: Store
    address: str | None


def rendezvous(launch: Launch, timeout_s: float, secret: Secret | None = None) -> Store:
    """Return a store shared by all ranks of the launch, as `open_rendezvous` does."""
    return open_rendezvous(launch, timeout_s, secret).store


def open_rendezvous(
    launch: Launch,
    timeout_s: float,
    secret: Secret | None = None,
    *,
    interface: str | None = None,
    reach_s: float = DEFAULT_REACH_S,
) -> RendezvousResult:
    """Return a store shared by all ranks of the launch, once all of them have arrived.

    Rank 0 serves the store, unless torchrun's agent already does. Its keys are separate for every
    attempt of a job, so no rank reads data of a killed attempt (stale addresses make Gloo hang). A
    world of one rank opens no connection. If all ranks are on this machine, they listen on
    127.0.0.1 only, and Gloo, NCCL and other libraries use loopback, unless their variables are set.

    Args:
        launch: rank and rendezvous address of this process.
        timeout_s: time to wait for all ranks.
        secret: with which ranks authenticate each other; None to accept every process.
        interface: name or subnet of the interface if there are several machines; None for
            GLOO_SOCKET_IFNAME, else the route to MASTER_ADDR.
        reach_s: time within which the host of MASTER_ADDR must respond, even if only to refuse the
            connection.

    Raises `LaunchError` on every rank if some ranks have not arrived in time (the error names
    them), if two processes have the same rank, or if secrets or versions of torch or of this
    package differ; `ConfigError` for an interface that does not exist.
    """
    local = launch.one_machine
    if launch.world_size == 1:
        if local:
            listen_on_loopback()
        return RendezvousResult(PrefixStore(f"gen{launch.restart_count}", HashStore()), None)
    if not launch.agent_store:
        _check_address(launch, local)
    meeting = _StoreConnection.of(launch, secret, timeout_s, reach_s)
    wanted = None if local else requested_interface(interface)
    if wanted is not None and _leads_to(launch.master_addr, wanted):
        meeting.address = wanted.address
    store, all_local = meeting.wait_for_all(local)
    if all_local:
        listen_on_loopback()
        return RendezvousResult(store, None)
    meeting.publish_seen_address(store)
    chosen = wanted or meeting.interface_towards_others(store)
    if chosen is None:
        follow_gloo()
        return RendezvousResult(store, None)
    if not launch.one_machine:
        source = "comm.interface" if interface is not None else "GLOO_SOCKET_IFNAME"
        refuse_loopback(chosen, launch.rank, f"choose another by {source}, or leave it unset")
    listen_on(chosen)
    return RendezvousResult(store, chosen.address)


def announce_stop(launch: Launch, told: str, secret: Secret | None = None) -> None:
    """Notify ranks in `open_rendezvous` that a signal has ended this rank; `told` is the message.

    They end within some seconds. Does nothing if no store is served yet, or under torchrun, whose
    agent ends the other ranks.
    """
    if launch.world_size == 1 or launch.agent_store:
        return
    meeting = _StoreConnection.of(launch, secret, _STOPPED_S, _STOPPED_S)
    with contextlib.suppress(LaunchError, dist.DistError):
        meeting.announce_stop(launch.one_machine, told)


def _check_address(launch: Launch, local: bool) -> None:
    """Raise LaunchError if rank 0 must be on this machine, but MASTER_ADDR is another machine."""
    if is_own_address(launch.master_addr):
        return
    if local:
        raise LaunchError(
            f"launch: rank {launch.rank}: wrong MASTER_ADDR, expected an address of this machine, "
            f"because all {launch.world_size} ranks are on it, got {launch.master_addr}; "
            f"correct MASTER_ADDR, or the number of ranks here (LOCAL_WORLD_SIZE)"
        )


def is_own_address(name: str) -> bool:
    """Return whether a host name or address belongs to this machine."""
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


class _StoreConnection:
    """One rank's part in the rendezvous: its connection to the store, and the membership check."""

    def __init__(
        self,
        launch: Launch,
        secret: Secret,
        me: Member,
        timeout_s: float,
        deadline: float,
        reach_s: float,
    ) -> None:
        self._launch, self._secret, self._me = launch, secret, me
        self._timeout_s, self._deadline = timeout_s, deadline
        self._reach_s = min(reach_s, timeout_s)
        self.address = ""  # address on which rank 0 serves the store; empty for all interfaces
        # Local and remote address of the connection to the store's host.
        self._own, self._far = "", ""

    @classmethod
    def of(
        cls,
        launch: Launch,
        secret: Secret | None,
        timeout_s: float,
        reach_s: float,
    ) -> "_StoreConnection":
        """Create the meeting of this process; its time-out starts now."""
        key = Secret(b"", "nowhere", guards=False) if secret is None else secret
        return cls(
            launch,
            key.derive(f"rendezvous {launch.restart_count}"),
            Member.of(launch, key.source),
            timeout_s,
            time.monotonic() + timeout_s,
            reach_s,
        )

    def announce_stop(self, local: bool, told: str) -> None:
        """Publish in rank 0's store that a signal has ended this rank; `told` is the message.

        Raises LaunchError or DistError if no store is served.
        """
        launch = self._launch
        addr = "127.0.0.1" if local else launch.master_addr
        self._await_server(addr)
        store = _connect_to_store(addr, launch.master_port, launch, _LOOK_S, _LOOK_S)
        self._call(PrefixStore(f"gen{launch.restart_count}", store)).announce_stop(told)
        if launch.rank == 0:  # the store ends with this process
            time.sleep(_HEARD_S)

    def wait_for_all(self, local: bool) -> tuple[Store, bool]:
        """Connect to the store and run the membership check of all ranks.

        Returns the store, and whether all ranks are on one machine.
        """
        launch = self._launch
        serves = launch.rank == 0 and not launch.agent_store
        addr = "127.0.0.1" if local and not launch.agent_store else launch.master_addr
        store = self._serve(local) if serves else self._join(addr)
        if launch.agent_store:
            return self._hold_at_agent(store)
        keys = PrefixStore(f"gen{launch.restart_count}", store)
        if not serves:
            self._enter_once(keys)
        if serves and not is_own_address(launch.master_addr):
            self._await_somebody(keys)
        return keys, self._call(keys).wait_for_all()

    def _hold_at_agent(self, store: Store) -> tuple[Store, bool]:
        """Run the membership check in torchrun's store, which may contain previous attempts."""
        launch = self._launch
        meetings = RendezvousAttempts(
            store,
            lambda keys, number: replace(
                self._call(keys),
                # So that no entry can be copied from one attempt to another.
                secret=self._secret.derive(f"meeting {number}"),
                is_over=lambda: meetings.newest() > number,
            ),
        )
        while True:
            number = meetings.find(self._deadline) if launch.rank else meetings.open()
            if number is None:
                raise LaunchError(
                    f"launch: rank {launch.rank} on {socket.gethostname()} waited "
                    f"{self._timeout_s:g} s at torchrun's store for all {launch.world_size} ranks: "
                    f"missing rank 0; look at its log, check that the "
                    f"launcher started {launch.world_size} processes, or raise comm.timeout_s"
                )
            # A previous attempt is over as soon as rank 0 opens a new one.
            with contextlib.suppress(ObsoleteCheckError):
                return meetings.keys(number), meetings.roll_call(number).wait_for_all()

    def publish_seen_address(self, store: Store) -> None:
        """Publish the address at which this rank reaches the store's host, for ranks there."""
        if self._own and not is_loopback(self._own):
            store.compare_set(_SEEN_AT, "", self._far)

    def interface_towards_others(self, store: Store) -> Interface | None:
        """Return the interface that leads to the other hosts; None if unknown.

        This is the interface by which this rank has reached MASTER_ADDR. If MASTER_ADDR is this
        host and resolves to a loopback address, the ranks of other hosts publish the address at
        which they reach this host.
        """
        if self._own and not is_loopback(self._own):
            return holder_of(self._own)
        own = address_towards(self._launch.master_addr)
        literal = is_loopback(self._launch.master_addr)
        if (not own or is_loopback(own)) and not literal and not self._launch.one_machine:
            deadline = time.monotonic() + self._reach_s
            while not store.check([_SEEN_AT]) and time.monotonic() < deadline:
                time.sleep(_PAUSE_S)
            if store.check([_SEEN_AT]):
                seen_at = store.get(_SEEN_AT).decode()
                own = seen_at if holder_of(seen_at) else address_towards(seen_at)
        if own and not is_loopback(own):
            return holder_of(own)
        return holder_of(address_outside())

    def _await_somebody(self, keys: Store) -> None:
        """Raise LaunchError unless another rank arrives in time.

        Called if MASTER_ADDR does not seem to be an address of this host.
        """
        launch, deadline = self._launch, time.monotonic() + self._reach_s
        others = range(1, min(launch.world_size, _NUM_LOOKED_FOR))
        while not any(keys.check([MembershipCheck.key(rank)]) for rank in others):
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"launch: rank 0 on {socket.gethostname()} waited {self._reach_s:g} s, but no "
                    f"other rank connected to MASTER_ADDR={launch.master_addr}, port "
                    f"{launch.master_port}; {launch.master_addr} is not an address of this host: "
                    f"set MASTER_ADDR to one by which the others reach it, or raise comm.reach_s "
                    f"if hosts start at different times"
                )
            time.sleep(_PAUSE_S)

    def _call(self, keys: Store) -> MembershipCheck:
        return MembershipCheck(
            self._launch, keys, self._secret, self._me, self._timeout_s, self._deadline
        )

    def _enter_once(self, keys: Store) -> None:
        """Raise LaunchError if a process has already entered as this rank.

        For a store served by rank 0, which serves only one attempt.
        """
        rank = self._launch.rank
        if keys.add(f"visits/{rank}", 1) > 1:
            self._call(keys).refuse_double()
            raise LaunchError(
                f"launch: rank {rank}: two processes are rank {rank}: {self._me} and another that "
                "has ended or has another secret; set a different RANK for each"
            )

    def _serve(self, local: bool) -> TCPStore:
        """Listen at the master address and serve the store."""
        raise_file_limit(2 * self._launch.world_size + _OTHER_FILES)
        try:
            address = "127.0.0.1" if local else self.address
            listening = _listening_socket(self._launch, address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                self._refuse_other_first()
            told = (
                f"rank 0 on {socket.gethostname()} cannot listen on port "
                f"{self._launch.master_port}: {error.strerror}; end the process that uses the "
                f"port, or set MASTER_PORT to another on all ranks"
            )
            if error.errno == errno.EADDRINUSE:
                self._publish_absence(told)
            raise LaunchError(f"launch: {told}") from error
        return TCPStore(
            address or "127.0.0.1",
            listening.getsockname()[1],
            self._launch.world_size,
            True,
            timeout=timedelta(seconds=max(self._timeout_s, 1.0)),
            wait_for_workers=False,
            # TCPStore's own socket would listen on all interfaces.
            master_listen_fd=listening.detach(),
        )

    def _publish_absence(self, told: str) -> None:
        """Publish why rank 0 is absent, in the store another program serves at this job's port."""
        with contextlib.suppress(dist.DistError):
            port = self._launch.master_port
            store = _connect_to_store("127.0.0.1", port, self._launch, _LOOK_S, _LOOK_S)
            attempt = PrefixStore(f"gen{self._launch.restart_count}", store)
            self._call(attempt).say_absent(told)

    def _refuse_other_first(self) -> None:
        """Raise LaunchError on both processes if another rank 0 of this job uses the port."""
        try:
            store = _connect_to_store(
                "127.0.0.1", self._launch.master_port, self._launch, _LOOK_S, _LOOK_S
            )
            attempt = PrefixStore(f"gen{self._launch.restart_count}", store)
            self._call(attempt).refuse_double(_LOOK_S)
        except dist.DistError:
            return

    def _join(self, addr: str) -> TCPStore:
        """Connect to the store of rank 0 or of torchrun's agent."""
        self._await_server(addr)
        launch = self._launch
        try:
            left = min(max(self._deadline - time.monotonic(), _LOOK_S), self._reach_s)
            return _connect_to_store(addr, launch.master_port, launch, self._timeout_s, left)
        except dist.DistError as error:
            raise LaunchError(
                f"launch: rank {launch.rank} on {socket.gethostname()} cannot use the store at "
                f"{addr}:{launch.master_port}: {error}; another program listens there: end it, or "
                f"set MASTER_PORT to another port on all ranks"
            ) from error

    def _await_server(self, addr: str) -> None:
        """Connect repeatedly until the store's port is open; TCPStore would flood stderr meanwhile.

        A refused connection shows that the host exists, and rank 0 may still start. A host that
        does not respond, or whose name does not resolve, is retried for at most `reach_s`.
        """
        launch, began = self._launch, time.monotonic()
        said_at, unreached_from = began + _SAY_S, began
        reason: OSError
        while True:
            left = self._deadline - time.monotonic()
            try:
                limit_s = min(max(left, 0.1), _KNOCK_S)
                with socket.create_connection((addr, launch.master_port), limit_s) as connection:
                    self._own = str(connection.getsockname()[0])
                    self._far = str(connection.getpeername()[0])
                    return
            except ConnectionRefusedError as error:
                unreached_from, reason = time.monotonic(), error
            except OSError as error:
                if time.monotonic() > unreached_from + self._reach_s - _CLOSE_S:
                    raise self._unreached(addr, error) from error
                reason = error
            if left <= 0:
                raise self._unanswered(addr, reason) from reason
            if time.monotonic() > said_at:
                said_at = self._deadline
                log.warning(
                    "launch: rank %d still waits for %s at %s:%d (%s)",
                    *(launch.rank, self._server(), addr, launch.master_port, reason),
                )
            time.sleep(min(0.05, max(left, 0.0)))

    def _server(self) -> str:
        return "torchrun's agent" if self._launch.agent_store else "rank 0"

    def _unreached(self, addr: str, error: OSError) -> LaunchError:
        """Return the LaunchError for a host that does not respond or has no address."""
        launch, where = self._launch, f"{addr}:{self._launch.master_port}"
        if isinstance(error, socket.gaierror):
            reason = "MASTER_ADDR is not the name or address of a host"
            remedy = "correct MASTER_ADDR, or make the name resolvable (/etc/hosts, DNS)"
        else:
            reason = "the host does not answer"
            remedy = (
                "check MASTER_ADDR and MASTER_PORT, and that no firewall blocks the port; on a "
                "host with several networks set MASTER_ADDR to an address that the others reach"
            )
        return LaunchError(
            f"launch: rank {launch.rank} of {launch.world_size} on {socket.gethostname()} tried "
            f"for {self._reach_s:g} s to reach {self._server()} at {where}: {reason} ({error}); "
            f"{remedy}; raise comm.reach_s if hosts start at different times"
        )

    def _unanswered(self, addr: str, error: OSError) -> LaunchError:
        """Return the LaunchError for a host that responds although no store is served there."""
        launch = self._launch
        missing = "it" if launch.agent_store else "missing rank 0"
        return LaunchError(
            f"launch: rank {launch.rank} of {launch.world_size} on {socket.gethostname()} waited "
            f"{self._timeout_s:g} s for {self._server()} at {addr}:{launch.master_port}, which did "
            f"not answer ({error}): {missing} has not started, or cannot be reached; look at its "
            f"log, and check MASTER_ADDR, MASTER_PORT and firewalls"
        )


def _connect_to_store(
    addr: str, port: int, launch: Launch, timeout_s: float, limit_s: float
) -> TCPStore:
    """Connect to a store within ``limit_s`` seconds; DistError if there is none.

    Connects on a thread, because TCPStore waits forever if another program listens there.
    """
    answer: Future[TCPStore] = Future()
    before = _sockets()

    def connect() -> None:
        try:
            store = TCPStore(
                addr,
                port,
                launch.world_size,
                False,
                # Time for retries, whatever the response.
                timeout=timedelta(seconds=max(limit_s, 1.0)),
                wait_for_workers=False,
            )
            store.set_timeout(timedelta(seconds=max(timeout_s, 1.0)))
        except Exception as error:
            answer.set_exception(error)
        else:
            answer.set_result(store)

    thread = threading.Thread(target=connect, name="store", daemon=True)
    thread.start()
    try:
        return answer.result(limit_s)
    except TimeoutError:
        _shut_down_connections(thread, port, before)
        raise dist.DistError(f"no answer of a store within {limit_s:.3g} s") from None


def _shut_down_connections(thread: threading.Thread, port: int, before: Container[int]) -> None:
    """Make a thread return from TCPStore by shutting down the connections it has opened to a port.

    A thread that is still in TCPStore at interpreter shutdown aborts the process. `before` contains
    the sockets that were open before the thread started.
    """
    deadline_s = time.monotonic() + _LEAVE_S
    while thread.is_alive() and time.monotonic() < deadline_s:
        for inode, descriptor in _sockets().items():
            if inode in before:
                continue
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as seen:
                if seen.family != socket.AF_UNIX and seen.getpeername()[1] == port:
                    seen.shutdown(socket.SHUT_RDWR)
        thread.join(_PAUSE_S)


def _sockets() -> dict[int, int]:
    """Return the descriptors of this process's sockets by inode number; empty if unknown."""
    found = {}
    with contextlib.suppress(OSError):
        for name in os.listdir("/dev/fd"):
            with contextlib.suppress(OSError):
                status = os.fstat(int(name))
                if stat.S_ISSOCK(status.st_mode):
                    found[status.st_ino] = int(name)
    return found


def raise_file_limit(num_files: int) -> None:
    """Raise the limit of open files as far as permitted; warn if it is too low.

    The rank that serves the store has two connections for each rank: from the rank and its watcher.
    """
    allowed = allow_files(num_files)
    if allowed < num_files:
        log.warning(
            "launch: rank 0 serves the store to all ranks, which needs %d open files, but the "
            "limit is %d; raise it where rank 0 is started (ulimit -Hn, LimitNOFILE)",
            num_files,
            allowed,
        )


def _leads_to(name: str, interface: Interface) -> bool:
    """Return whether a name resolves to the address of this interface only."""
    try:
        found = {str(address[0]) for *_, address in socket.getaddrinfo(name, 0)}
    except OSError:
        return False
    return found == {interface.address}


def _listening_socket(launch: Launch, address: str) -> socket.socket:
    """Listen on an address, or on all interfaces if it is empty."""
    port = launch.master_port
    if not address and socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, backlog=launch.world_size, dualstack_ipv6=True
        )
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=launch.world_size)
