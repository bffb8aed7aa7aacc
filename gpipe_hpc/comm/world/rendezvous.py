"""Bring the ranks of a launch together: one store they all reach, and nobody missing."""

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
    asked_for,
    follow_gloo,
    keep_local,
    listen_on,
    refuse_loopback,
)
from gpipe_hpc.comm.net.secret import Secret
from gpipe_hpc.comm.watchdog.timeouts import DEFAULT_REACH_S
from gpipe_hpc.comm.world.launcher import Launch
from gpipe_hpc.comm.world.meetings import Meetings
from gpipe_hpc.comm.world.roll_call import Member, OverError, RollCall
from gpipe_hpc.device.host.open_files import allow_files
from gpipe_hpc.errors import LaunchError
from gpipe_hpc.torch_compat import HashStore, PrefixStore, Store, TCPStore

# How long a store may take to answer that may be none.
_LOOK_S: Final = 3.0
# After which a rank says for whom it waits.
_SAY_S: Final = 15.0
# In which one call to the store's host is answered, or made anew.
_KNOCK_S: Final = 5.0
# A call that would go on for longer than this past its time is not made.
_CLOSE_S: Final = 1.0
_PAUSE_S: Final = 0.1
# In which a rank that a signal ends looks for the store, and in which others hear what it left.
_STOPPED_S: Final = 3.0
_HEARD_S: Final = 3.5
# In which a call whose connections are ended returns: it may pause for some seconds before.
_LEAVE_S: Final = 10.0
_NUM_LOOKED_FOR: Final = 65  # ranks, of which one has to come
_SEEN_AT: Final = "seen_at"  # the address at which other hosts reach that of the store
# That rank 0 opens beside connections to the store.
_OTHER_FILES: Final = 512

log = logging.getLogger("gpipe_hpc.comm")


class Met(NamedTuple):
    """What ranks that have met have: a store, and where this one listens for the others.

    `address`: None where all are on this machine.
    """

    store: Store
    address: str | None


def rendezvous(
    launch: Launch, timeout_s: float, loopback: bool | None = None, secret: Secret | None = None
) -> Store:
    """Return the store of `meet`."""
    return meet(launch, timeout_s, loopback, secret).store


def meet(
    launch: Launch,
    timeout_s: float,
    loopback: bool | None = None,
    secret: Secret | None = None,
    *,
    interface: str | None = None,
    reach_s: float = DEFAULT_REACH_S,
) -> Met:
    """Return a store that all ranks of the launch share, once all of them have come.

    Rank 0 serves it, unless torchrun's agent already does. Its keys are separate for every
    attempt of a job and every meeting, so nobody reads what a killed attempt left (stale addresses
    hang Gloo).
    ``loopback``: listen on 127.0.0.1 only; None means when all ranks are on this machine. Then
    Gloo, NCCL and their kind are kept on the loopback interface too, on all ranks alike, unless
    their variables say otherwise; on several machines they listen on ``interface``, a name or a
    subnet; None for GLOO_SOCKET_IFNAME, else for the one that leads to MASTER_ADDR. ``reach_s``: in
    which the host of MASTER_ADDR has to answer, be it that nobody listens there yet. ``secret``:
    what the ranks prove to each other; None lets everybody in. A world of one rank opens nothing.

    Raises `LaunchError` on every rank when some have not come within ``timeout_s`` seconds,
    naming them, when two processes are one rank, when the ranks have unequal secrets, and when
    they run unequal versions of torch or of this package; and `ConfigError` for an interface that
    is not there.
    """
    local = _is_local(launch, loopback)
    if loopback and launch.local_known and not launch.one_machine:
        raise LaunchError(
            f"launch: loopback does not reach other machines, but only {launch.local_size} of "
            f"{launch.world_size} ranks are on this one; remove comm.loopback"
        )
    if launch.world_size == 1:
        if local:
            keep_local()
        return Met(PrefixStore(f"gen{launch.restart_count}", HashStore()), None)
    if not launch.agent_store:
        _check_address(launch, local)
    meeting = _Meeting.of(launch, loopback, secret, timeout_s, reach_s)
    wanted = None if local else asked_for(interface)
    if wanted is not None and _leads_to(launch.master_addr, wanted):
        meeting.address = wanted.address
    store, all_local = meeting.hold(local)
    if all_local:
        keep_local()
        return Met(store, None)
    meeting.tell_where_seen(store)
    chosen = wanted or meeting.interface_towards_others(store)
    if chosen is None:
        follow_gloo()
        return Met(store, None)
    if not launch.one_machine:
        source = "comm.interface" if interface is not None else "GLOO_SOCKET_IFNAME"
        refuse_loopback(chosen, launch.rank, f"choose another by {source}, or leave it unset")
    listen_on(chosen)
    return Met(store, chosen.address)


def say_stopped(
    launch: Launch, told: str, loopback: bool | None = None, secret: Secret | None = None
) -> None:
    """Leave a notice for ranks that wait in `meet`: a signal has ended this rank.

    They end by it within some seconds. Returns without one if nobody serves a store yet. Under
    torchrun its agent ends the others.
    """
    if launch.world_size == 1 or launch.agent_store:
        return
    meeting = _Meeting.of(launch, loopback, secret, _STOPPED_S, _STOPPED_S)
    with contextlib.suppress(LaunchError, dist.DistError):
        meeting.say_stopped(_is_local(launch, loopback), told)


def _is_local(launch: Launch, loopback: bool | None) -> bool:
    return launch.one_machine if loopback is None else loopback


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
        self.address = ""  # on which rank 0 serves the store to other hosts; empty: on all
        # Of the connection to the store's host: this end's address, and that of the other end.
        self._own, self._far = "", ""

    @classmethod
    def of(
        cls,
        launch: Launch,
        loopback: bool | None,
        secret: Secret | None,
        timeout_s: float,
        reach_s: float,
    ) -> "_Meeting":
        """Return the way of this process, which begins now."""
        key = Secret(b"", "nowhere", guards=False) if secret is None else secret
        return cls(
            launch,
            key.derive(f"rendezvous {launch.restart_count}"),
            Member.of(launch, loopback, key.source),
            timeout_s,
            time.monotonic() + timeout_s,
            reach_s,
        )

    def say_stopped(self, local: bool, told: str) -> None:
        """Leave a notice in the store that rank 0 serves; LaunchError or DistError if none does."""
        launch = self._launch
        addr = "127.0.0.1" if local else launch.master_addr
        self._await_server(addr)
        store = _client(addr, launch.master_port, launch, _LOOK_S, _LOOK_S)
        self._call(PrefixStore(f"gen{launch.restart_count}", store)).say_stopped(told)
        if launch.rank == 0:  # the store ends with this process
            time.sleep(_HEARD_S)

    def hold(self, local: bool) -> tuple[Store, bool]:
        """Return the store, and whether all ranks are on one machine."""
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
        return keys, self._call(keys).hold()

    def _hold_at_agent(self, store: Store) -> tuple[Store, bool]:
        """Hold the meeting of all ranks in a store that has seen others before."""
        launch = self._launch
        meetings = Meetings(
            store,
            lambda keys, number: replace(
                self._call(keys),
                # Who can write into the store cannot move an entry to another meeting.
                secret=self._secret.derive(f"meeting {number}"),
                is_over=lambda: meetings.newest() > number,
            ),
        )
        while True:
            number = meetings.find(self._deadline) if launch.rank else meetings.open()
            if number is None:
                raise LaunchError(
                    f"launch: rank {launch.rank} on {socket.gethostname()} waited "
                    f"{self._timeout_s:g} s at torchrun's store for all {launch.world_size} ranks, "
                    f"expected rank 0 to come first, got no sign of it: missing rank 0; look at "
                    f"its log, check that the launcher started {launch.world_size} processes, or "
                    f"raise comm.timeout_s"
                )
            # A meeting of another attempt, which rank 0 has left, is over once it opens this one.
            with contextlib.suppress(OverError):
                return meetings.keys(number), meetings.roll_call(number).hold()

    def tell_where_seen(self, store: Store) -> None:
        """Tell those on the store's host at which address another host sees it."""
        if self._own and not is_loopback(self._own):
            store.compare_set(_SEEN_AT, "", self._far)

    def interface_towards_others(self, store: Store) -> Interface | None:
        """Return the interface that leads to the other hosts; None where that cannot be told.

        That by which this rank has reached MASTER_ADDR. Where that is on this host, and its name
        means a loopback address here, those of other hosts say at which address they see it.
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
        """Raise LaunchError unless another rank comes: MASTER_ADDR seems to lead elsewhere."""
        launch, deadline = self._launch, time.monotonic() + self._reach_s
        others = range(1, min(launch.world_size, _NUM_LOOKED_FOR))
        while not any(keys.check([RollCall.key(rank)]) for rank in others):
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"launch: rank 0 on {socket.gethostname()} waited {self._reach_s:g} s, "
                    f"expected another rank at MASTER_ADDR={launch.master_addr}, port "
                    f"{launch.master_port}, got none; {launch.master_addr} is no address of this "
                    f"host: set MASTER_ADDR to one by which the others reach it, or raise "
                    f"comm.reach_s where hosts start at different times"
                )
            time.sleep(_PAUSE_S)

    def _call(self, keys: Store) -> RollCall:
        return RollCall(self._launch, keys, self._secret, self._me, self._timeout_s, self._deadline)

    def _enter_once(self, keys: Store) -> None:
        """Refuse a second process of one rank, in the store of rank 0: that is for one meeting."""
        rank = self._launch.rank
        if keys.add(f"visits/{rank}", 1) > 1:
            self._call(keys).refuse_double()
            raise LaunchError(
                f"launch: rank {rank}: two processes are rank {rank}: {self._me} and another that "
                "has ended or has another secret; give each its own RANK"
            )

    def _serve(self, local: bool) -> TCPStore:
        """Serve the store."""
        make_room(2 * self._launch.world_size + _OTHER_FILES)
        try:
            address = "127.0.0.1" if local else self.address
            listening = _listening_socket(self._launch, address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                self._refuse_other_first()
            told = (
                f"rank 0 on {socket.gethostname()} cannot listen, expected port "
                f"{self._launch.master_port} to be free, got {error.strerror}; end what holds the "
                f"port, or set MASTER_PORT to another on all ranks"
            )
            if error.errno == errno.EADDRINUSE:
                self._leave_word(told)
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

    def _leave_word(self, told: str) -> None:
        """Let the others, which meet somebody else's store here, hear why rank 0 is not there."""
        with contextlib.suppress(dist.DistError):
            port = self._launch.master_port
            store = _client("127.0.0.1", port, self._launch, _LOOK_S, _LOOK_S)
            attempt = PrefixStore(f"gen{self._launch.restart_count}", store)
            self._call(attempt).say_absent(told)

    def _refuse_other_first(self) -> None:
        """Raise LaunchError, here and there, if it is another rank 0 of this job that listens."""
        try:
            store = _client("127.0.0.1", self._launch.master_port, self._launch, _LOOK_S, _LOOK_S)
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
            return _client(addr, launch.master_port, launch, self._timeout_s, left)
        except dist.DistError as error:
            raise LaunchError(
                f"launch: rank {launch.rank} on {socket.gethostname()} cannot use the store, "
                f"expected one at {addr}:{launch.master_port}, got {error}; something else listens "
                f"there: end it, or set MASTER_PORT to another on all ranks"
            ) from error

    def _await_server(self, addr: str) -> None:
        """Knock until somebody listens: TCPStore itself would fill stderr while it tries.

        A host that refuses is there, and rank 0 may come yet. One that does not answer, or whose
        name means nothing, is waited for no longer than `reach_s`.
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
        """Return what to raise where the host does not answer, or has no address."""
        launch, where = self._launch, f"{addr}:{self._launch.master_port}"
        if isinstance(error, socket.gaierror):
            expected = "MASTER_ADDR to be the name or address of a host"
            remedy = "correct MASTER_ADDR, or enter the name where hosts look it up (/etc/hosts)"
        else:
            expected = f"an answer of the host at {where}"
            remedy = (
                "check MASTER_ADDR and MASTER_PORT, and that no firewall drops that port; on a "
                "host with several networks set MASTER_ADDR to the address that the others reach"
            )
        return LaunchError(
            f"launch: rank {launch.rank} of {launch.world_size} on {socket.gethostname()} tried "
            f"for {self._reach_s:g} s to reach {self._server()} at {where}, expected {expected}, "
            f"got {error}; {remedy}; raise comm.reach_s where hosts start at different times"
        )

    def _unanswered(self, addr: str, error: OSError) -> LaunchError:
        """Return what to raise where the host is there, and the server has not come."""
        launch = self._launch
        missing = "it" if launch.agent_store else "missing rank 0"
        return LaunchError(
            f"launch: rank {launch.rank} of {launch.world_size} on {socket.gethostname()} waited "
            f"{self._timeout_s:g} s, expected {self._server()} at {addr}:{launch.master_port}, got "
            f"no answer ({error}): {missing} has not started, or cannot be reached; look at its "
            f"log, check MASTER_ADDR, MASTER_PORT and firewalls"
        )


def _client(addr: str, port: int, launch: Launch, timeout_s: float, limit_s: float) -> TCPStore:
    """Connect to a store within ``limit_s`` seconds; DistError if there is none.

    On a thread: if something else listens there, TCPStore waits for its answer without end.
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
                # In which it tries again, whatever the answer.
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
        _end_calls(thread, port, before)
        raise dist.DistError(f"no answer of a store within {limit_s:.3g} s") from None


def _end_calls(thread: threading.Thread, port: int, before: Container[int]) -> None:
    """Let a thread leave TCPStore, by ending the connections to a port that it has opened.

    A thread that leaves it while Python goes down aborts the process. `before`: the sockets that
    were open before the thread began.
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
    """Return the sockets of this process, by inode; none where the system does not list them."""
    found = {}
    with contextlib.suppress(OSError):
        for name in os.listdir("/dev/fd"):
            with contextlib.suppress(OSError):
                status = os.fstat(int(name))
                if stat.S_ISSOCK(status.st_mode):
                    found[status.st_ino] = int(name)
    return found


def make_room(num_files: int) -> None:
    """Let this process open so many files, as far as it may; warn where it may not.

    Who serves the store has two connections for each rank: its own, and its watcher's.
    """
    allowed = allow_files(num_files)
    if allowed < num_files:
        log.warning(
            "launch: rank 0 serves all ranks, which needs %d open files, but the limit is %d; "
            "raise it where rank 0 is started (ulimit -Hn, LimitNOFILE)",
            num_files,
            allowed,
        )


def _leads_to(name: str, interface: Interface) -> bool:
    """Say whether a name leads to one interface of this host alone, on this host too."""
    try:
        found = {str(address[0]) for *_, address in socket.getaddrinfo(name, 0)}
    except OSError:
        return False
    return found == {interface.address}


def _listening_socket(launch: Launch, address: str) -> socket.socket:
    """Listen on an address, or with an empty one on all interfaces."""
    port = launch.master_port
    if not address and socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, backlog=launch.world_size, dualstack_ipv6=True
        )
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=launch.world_size)
