"""Ranks as processes under torch.distributed: groups, channels, failure handling, shutdown."""

import atexit
import contextlib
import logging
import multiprocessing.util
import os
import secrets
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from gpipe_hpc.comm.collectives.group import ControlGroup, Group, SoloGroup, rank_names
from gpipe_hpc.comm.collectives.orders import in_gloo_order
from gpipe_hpc.comm.collectives.pairs import PairConnections
from gpipe_hpc.comm.collectives.shared_memory_sum import SharedMemorySum, all_channels
from gpipe_hpc.comm.collectives.sparse_group import MESHED, SparseGroup
from gpipe_hpc.comm.collectives.torch_adapter import StartBroadcast, TorchGroupAdapter
from gpipe_hpc.comm.collectives.torch_group import EXCHANGE_TAG, TorchGroup
from gpipe_hpc.comm.collectives.tree_group import WIDTH, TreeGroup, own_tree_levels
from gpipe_hpc.comm.collectives.two_sided import TwoSidedGroup
from gpipe_hpc.comm.net.peer_auth import authenticate_peers
from gpipe_hpc.comm.net.secret import Secret, secret_for_all
from gpipe_hpc.comm.transport.base import PlacedChannel, Transport
from gpipe_hpc.comm.transport.lanes import TorchLane
from gpipe_hpc.comm.transport.outbox import Outbox
from gpipe_hpc.comm.transport.payload import Payload
from gpipe_hpc.comm.transport.process import ChannelEnd, ProcessTransport
from gpipe_hpc.comm.transport.routed import RoutedTransport
from gpipe_hpc.comm.transport.shared import (
    Exchange,
    SharedTransport,
    meeting_place,
    open_shared_transport,
    why_not_shared,
)
from gpipe_hpc.comm.watchdog.activity import ActivityTracker, BetweenPhases
from gpipe_hpc.comm.watchdog.failure import Board, FailureBoard, SoloBoard, with_host
from gpipe_hpc.comm.watchdog.published_status import StatusPublisher
from gpipe_hpc.comm.watchdog.report import FailureReport
from gpipe_hpc.comm.watchdog.settings import WatchdogConfig
from gpipe_hpc.comm.watchdog.store_exchange import StoreExchange
from gpipe_hpc.comm.watchdog.timeouts import DEFAULT_REACH_S, checked_timeout
from gpipe_hpc.comm.watchdog.torchrun_report import write_torchrun_error
from gpipe_hpc.comm.world.claim import claim_device
from gpipe_hpc.comm.world.group_factory import ProcessGroupFactory
from gpipe_hpc.comm.world.mpi.process_group import NAME as MPI_NAME
from gpipe_hpc.comm.world.mpi.process_group import MpiGroup
from gpipe_hpc.comm.world.source import own_source
from gpipe_hpc.comm.world.world import collective_errors
from gpipe_hpc.device.device import Device, uses_device_memory
from gpipe_hpc.device.host.machine import folder_identity, kernel_identity
from gpipe_hpc.errors import LaunchError
from gpipe_hpc.torch_compat import default_store

log = logging.getLogger("gpipe_hpc.comm")

_BREAK_TAG = 2**30
_LATE_TAG = 2**28
_DEVICE_TAG = 2**30  # for MPI, which does not use _BREAK_TAG


_Groups = list[tuple[dist.ProcessGroup, tuple[int, ...]]]


class ProcessWorld:
    """A world whose ranks are processes; this process is a rank of torch's default process group.

    Its groups, connections and threads are closed by `close` or when it is garbage-collected.

    Args:
        device: device of this rank.
        timeout_s: time-out of waits for other ranks.
        shares_memory: whether ranks of one host send each other CPU tensors, and sum small ones, in
            shared memory.
        job_secret: secret shared by all ranks, if there is one.
        watchfulness: time limits of the watchdog.
        width: `gathering` with more ranks uses a hierarchy of groups of this size.
        meshed: largest Gloo group that is a full mesh; larger ones are sparsely connected.
        address: address of this host on which to listen; None for Gloo's choice.
        reach_s: time within which other ranks must accept connections.
    """

    def __init__(
        self,
        device: Device,
        timeout_s: float,
        *,
        shares_memory: bool = True,
        job_secret: Secret | None = None,
        watchfulness: WatchdogConfig | None = None,
        width: int = WIDTH,
        meshed: int = MESHED,
        address: str | None = None,
        reach_s: float = DEFAULT_REACH_S,
    ) -> None:
        self._width, self._meshed = width, meshed
        self._address = address
        watchfulness = watchfulness or WatchdogConfig()
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.device = device
        self.is_one_process = False
        self._keys, number = _private_keys(self.rank)
        keys = self._keys
        self.secret = secret_for_all(job_secret, _number_of_world(keys, self.rank))
        timeout_s = checked_timeout(timeout_s, "timeout_s")
        self._display = StatusPublisher() if self.size > 1 else None  # one rank has no watcher
        self._pulse = ActivityTracker(timeout_s, watchfulness.stall_s, self._display)
        self._timeout = timedelta(seconds=timeout_s)
        uses_own = _is_carried(device)
        self._uses_mpi = isinstance(dist.group.WORLD, MpiGroup)
        self._host_backend = MPI_NAME if self._uses_mpi else "gloo"
        # CPU tensors (objects, flags) use Gloo even if the user's group is NCCL only.
        self._own_backend = f"{device.type}:{device.backend}"
        self._backend = f"cpu:gloo,{self._own_backend}" if uses_own else self._host_backend
        self._shares_memory = shares_memory
        self._is_divided = False  # whether the warning about missing shared memory was given
        self._shared: weakref.WeakSet[SharedTransport] = weakref.WeakSet()
        self._speaks: bool | None = None
        self._groups: _Groups = []
        self._wide_pairs: list[PairConnections] = []
        # Groups between hosts by pair of ranks, and of the device's backend by direction.
        self._pairs: dict[tuple[int, int], dist.ProcessGroup] = {}
        self._queues: dict[tuple[int, int], TorchLane] = {}
        self._board_of_notices = StoreExchange(keys, self.rank, timeout_s, self._pulse.wait_for)
        self._former = self._make_former(
            f"gpipe_hpc_world{number}",
            self._timeout,
            self._backend,
            partial(_exchange_texts_among, self._board_of_notices, self.rank),
            self._address,
            reach_s,
            self._board_of_notices.absent,
        )
        self._num_transports = 0
        # First of all, so that from here on the others notice a rank that ends or hangs.
        self._board = self._open_board(keys, watchfulness)
        # It does not sum in shared memory, as ranks may not exchange addresses of sockets before
        # `_introduce` has checked that they share a secret.
        with collective_errors(self, "joining the other ranks"):
            self.world_group = self._control_group(range(self.size), self._group_of)
        # NCCL groups must be destroyed on all ranks together, not by garbage collection.
        unasked = [] if uses_own else self._groups
        self._release = weakref.finalize(self, _release, self._board, unasked, self._wide_pairs)
        self._release.atexit = False
        # Runs before the default group is destroyed, which was registered first.
        atexit.register(_await_end, weakref.ref(self._board))
        atexit.register(self._release)
        # Processes started by multiprocessing end without atexit.
        multiprocessing.util.Finalize(self, self._release, exitpriority=1)
        # Otherwise a forked child would keep the connections of a dead rank open.
        os.register_at_fork(after_in_child=partial(_forget_in_child, weakref.ref(self)))
        self._introduce()
        self.activity = BetweenPhases("joining the other ranks")

    def claim(self, name: str) -> None:
        """Reserve the device for this rank; `name` is the device in the settings.

        See `claim_device`.
        """
        claim_device(self._keys, self.device, self.rank, name, self._backend)

    @property
    def activity(self) -> object:
        """Return the current activity of this rank: an action, a phase or a text."""
        return self._pulse.activity

    @activity.setter
    def activity(self, activity: object) -> None:
        self._pulse.note(activity)

    @property
    def doing(self) -> str:
        """Return the current activity and the ranks waited for as text."""
        return str(self._pulse)

    def _open_board(self, keys: Store, watchfulness: WatchdogConfig) -> Board:
        if self.size == 1:
            return SoloBoard(self.rank)
        assert self._display is not None, "a world of several ranks has a display"
        # A weak reference: the board's thread must not keep the world alive.
        this = weakref.ref(self)
        return FailureBoard(
            keys,
            self.rank,
            self.size,
            self._pulse,
            self._display,
            on_report=lambda: _break_groups(this()),
            key=self.secret.derive("watch").key,
            watchfulness=watchfulness,
            address=self._address,
        )

    def _make_former(self, *given: Any) -> ProcessGroupFactory:
        return ProcessGroupFactory(*given)

    def _introduce(self) -> None:
        """Check that all ranks share the secret and run the same source code.

        Raises LaunchError on all ranks if they do not.
        """
        world_group = self.world_group
        groups, below = (
            (world_group.groups, world_group.below)
            if isinstance(world_group, TreeGroup)
            else ((world_group,), ())
        )
        refusal = authenticate_peers(groups, below, self.rank, self.secret, own_source())
        if refusal:
            self.close()
            raise LaunchError(refusal)

    def group(self, members: Sequence[Sequence[int]]) -> Group:
        """Form the group of `members` that contains this rank; other ranks form the others."""
        return self._group_of(self._own(members))

    def control_group(self, members: Sequence[Sequence[int]]) -> ControlGroup:
        """Form a group for small sums and objects: a hierarchy of groups if it has many ranks."""
        return self._control_group(self._own(members), self._summing_group)

    def _control_group(
        self, ranks: Sequence[int], form: Callable[[Sequence[int]], Group]
    ) -> ControlGroup:
        """Form a group, or a hierarchy of groups, each by `form`."""
        if len(ranks) <= self._width:
            return form(ranks)
        position = ranks.index(self.rank)
        levels = own_tree_levels(len(ranks), position, self._width)
        groups = [form([ranks[i] for i in level]) for level in levels]
        return TreeGroup(ranks, position, groups, self._width)

    def _summing_group(self, members: Sequence[int]) -> Group:
        """Form a group that sums small tensors in shared memory, if its ranks are on one host."""
        group = self._group_of(members)
        if group.size == 1 or group.size > self._meshed or self._uses_mpi:
            return group
        hosts = set(group.all_gather_object(self._host))
        if len(hosts) == 1 and "" not in hosts and isinstance(group, TorchGroup):
            ranks, channels = group.ranks, all_channels(group.ranks)
            shared = self._shared_transport(
                channels,
                lambda own, _: dict(zip(ranks, group.all_gather_object(own), strict=True)),
            )
            transport = RoutedTransport(dict.fromkeys(channels, shared), self._pulse)
            group.shared_sum = SharedMemorySum(ranks, self.rank, transport)
        return group

    def _own(self, members: Sequence[Sequence[int]]) -> Sequence[int]:
        own = next((ranks for ranks in members if self.rank in ranks), None)
        assert own is not None, f"rank {self.rank} is in none of {members}"
        return own

    def _group_of(self, members: Sequence[int]) -> Group:
        ranks = tuple(members)
        if len(ranks) == 1:
            return SoloGroup(self.rank)
        if self._uses_mpi or len(ranks) <= self._meshed:
            return TorchGroup(self._form(ranks), ranks, self._pulse, self.device)
        # Too many for a full mesh over Gloo.
        host = self._wide_group(ranks)
        if self._backend == "gloo":
            return host
        formed = self._form(ranks, self._own_backend)
        own = TorchGroup(formed, ranks, self._pulse, self.device, host)
        return TwoSidedGroup(own, host, self.device)

    def _wide_group(self, ranks: tuple[int, ...]) -> SparseGroup:
        """Form a sparsely connected group."""
        # Without `self`: objects that are closed with this world must not keep it alive.
        former, position = self._former, ranks.index(self.rank)
        device = former.open_device()
        pairs = PairConnections(ranks, position, lambda pair: former.connect(pair, device))
        self._wide_pairs.append(pairs)
        return SparseGroup(
            ranks,
            position,
            lambda traffic, *messages: pairs.start(EXCHANGE_TAG + traffic.value, *messages),
            pairs.connect,
            self._pulse.wait_for,
            ordering=in_gloo_order,
            show=partial(_register_shown, former, self._groups, ranks),
        )

    def transport(
        self, channels: Sequence[PlacedChannel], device: Device | None = None
    ) -> Transport:
        """Open channels: in shared memory between ranks that can share it, else over torch.

        This rank exchanges host identities only with the ranks at the other ends of its channels.
        """
        device = device or self.device
        self._num_transports += 1
        what = f"channels {self._num_transports}"
        own = [c for c in channels if self.rank in _ends(c)]
        if self._why_not_shared and not device.is_accelerator:
            log.warning(
                "rank %d: cannot share memory with other processes (%s); boundaries are sent by "
                "torch.distributed, which copies more; set comm.shared_memory=false if this is "
                "intended",
                *(self.rank, self._why_not_shared),
            )
        host = "" if device.is_accelerator else self._host
        hosts = self._exchange_texts(f"hosts of {what}", host, _peers(own, self.rank))
        here = [c for c in own if _one_host(hosts, c)]
        apart = [c for c in own if c not in here]
        self._warn_divided(hosts, apart)
        routes: dict[PlacedChannel, Transport] = {}
        if here:
            tell = partial(self._exchange_texts, f"sockets of {what}")
            routes |= dict.fromkeys(here, self._shared_transport(here, tell))
        if apart:
            routes |= dict.fromkeys(apart, self._torch_transport(apart, device))
        return RoutedTransport(routes, self._pulse)

    def _shared_transport(
        self, channels: Sequence[PlacedChannel], exchange: Exchange
    ) -> SharedTransport:
        limit_s = self._timeout.total_seconds()
        shared = open_shared_transport(channels, self.rank, exchange, limit_s)
        self._shared.add(shared)
        return shared

    def _exchange_texts(self, what: str, text: str, peers: Collection[int]) -> Mapping[int, str]:
        """Publish a text; return the texts that the peers publish and this rank's own, by rank."""
        return _exchange_texts_among(self._board_of_notices, self.rank, what, text, peers)

    @cached_property
    def _why_not_shared(self) -> str:
        """Return why this rank cannot share memory; empty if it can, or if it is set not to."""
        return why_not_shared() if self._shares_memory else ""

    @property
    def _host(self) -> str:
        """Return a text equal on all ranks that can share memory; empty if this rank cannot."""
        # Both processes must see the same folder at the path of the socket.
        can_share = self._shares_memory and not self._why_not_shared
        return folder_identity(meeting_place()) if can_share else ""

    def _warn_divided(self, hosts: Mapping[int, str], channels: Sequence[PlacedChannel]) -> None:
        """Warn once if ranks of this machine cannot share memory, for lack of a common folder."""
        kernel = kernel_identity()
        near = [r for r in _peers(channels, self.rank) if hosts[r].startswith(kernel)]
        if self._is_divided or not near or not hosts[self.rank]:
            return
        self._is_divided = True
        log.warning(
            "rank %d: cannot share memory with %s of this machine, in another container; "
            "boundaries are sent by torch.distributed, which copies more. Mount one folder of the "
            "machine as %s in all containers, or set comm.shared_memory=false if this is intended",
            *(self.rank, rank_names(sorted(near)), meeting_place()),
        )

    def _torch_transport(self, channels: Sequence[PlacedChannel], device: Device) -> Transport:
        """Open channels over torch.

        Gloo and MPI support tags, so two ranks need only one group. Device backends do not: all
        messages between two ranks of a group are one queue. So each direction has its own group, in
        which a receive posted early does not delay a send. All channels of a direction share it,
        because the schedule posts receives in the order of the sends. This assumes that the queues
        of a rank, two for each peer, progress concurrently, that is, that the kernels of as many
        communicators can run at the same time.
        """
        # All ranks form groups in the same order, which prevents circular waits. Every second pair
        # of a pipeline comes first, so that groups are formed concurrently.
        for pair in sorted({_pair(c) for c in channels} - self._pairs.keys(), key=_order):
            self._pairs[pair] = self._form(pair, self._host_backend)
        ways = {_ends(c) for c in channels} if _is_carried(device) else set()
        for ends in sorted(ways - self._queues.keys(), key=_order):
            self._queues[ends] = self._open_queue(ends, device)
        payload = Payload(device)
        links = [self._link(channel) for channel in channels]
        return ProcessTransport(links, payload, Outbox(payload))

    def _link(self, channel: PlacedChannel) -> ChannelEnd:
        """Return this rank's end of a channel, with its lanes."""
        pair = _pair(channel)
        (peer,) = _peers([channel], self.rank)
        host = partial(TorchLane, self._pairs[pair], pair.index(peer))
        direct = self._queues.get(_ends(channel))
        if self._uses_mpi and self.device.is_accelerator:
            direct = host(_DEVICE_TAG + channel.tag)
        return ChannelEnd(channel, peer, host(channel.tag), host(_LATE_TAG + channel.tag), direct)

    def _open_queue(self, ends: tuple[int, int], device: Device) -> TorchLane:
        """Form the group for one direction between two ranks and create its communicator.

        So the communicator exists before the first step.
        """
        group = self._form(ends, self._own_backend)
        sends = self.rank == ends[0]
        lane = TorchLane(group, peer=int(sends))
        token = device.empty((1,), torch.uint8)
        # Without waiting, its memory could be reused while it is read or written.
        (lane.send(token) if sends else lane.receive(token)).wait()
        return lane

    @property
    def has_peer_failure(self) -> bool:
        """Return whether another rank has failed and this rank has not handled it yet."""
        return self._board.has_peer_failure

    def fail(self, report: str, *, is_mistake: bool = False, is_stop: bool = False) -> None:
        """Publish a failure report with this host's name; unblock ranks that wait for this one."""
        own = FailureReport(with_host(report, self.rank), is_mistake, is_stop)
        write_torchrun_error(own.words, is_cause=True)
        self._speaks = self._board.publish(own) == own
        if not self._speaks:
            write_torchrun_error(own.words, is_cause=False)
        self._board.await_spreading()
        self.break_groups()

    @property
    def is_first_failure(self) -> bool | None:
        """Whether this rank's failure is the one that ended the run; None if it has not failed."""
        return self._speaks

    def explain(self, symptom: str) -> FailureReport:
        """Return the failure report that explains a failed wait, or `symptom` if there is none."""
        return self._board.explain(symptom)

    def close(self) -> None:
        """Close groups, connections and threads; a collective call."""
        self._release()
        _release(self._board, self._groups, self._wide_pairs)
        for shared in list(self._shared):
            shared.close()

    def forget(self) -> None:
        """In a forked child process, drop the parent's resources without affecting the parent."""
        self._release.detach()
        atexit.unregister(self._release)
        self._board.forget()
        for shared in list(self._shared):
            shared.drop()

    def _form(self, ranks: tuple[int, ...], backend: str | None = None) -> dist.ProcessGroup:
        formed = self._former.form(ranks, backend)
        self._groups.append((formed, ranks))
        return formed

    def break_groups(self) -> None:
        """Close every connection, so that a rank blocked in a wait fails at once.

        Gloo cannot abort point-to-point messages, but a wait that times out closes all connections
        of its group. NCCL communicators are aborted.
        """
        self._board_of_notices.close()
        for shared in list(self._shared):
            shared.close()
        for pairs in self._wide_pairs:
            pairs.break_off(_BREAK_TAG)
        for group, ranks in self._groups:
            peer = next((rank for rank in ranks if rank != self.rank), None)
            if peer is None:  # a group of one has no waits
                continue
            if isinstance(group, MpiGroup):
                group.abort()
                continue
            if isinstance(group, TorchGroupAdapter):  # its connections belong to a sparse group
                continue
            with contextlib.suppress(RuntimeError, ValueError):
                work = dist.irecv(torch.empty(1), peer, group=group, tag=_BREAK_TAG)
                if work is not None:
                    work.wait(timedelta(milliseconds=1))
            if self._backend != "gloo":
                with contextlib.suppress(RuntimeError, AttributeError):
                    backend: Any = group._get_backend(self.device.torch)
                    backend.abort()


def _register_shown(
    former: ProcessGroupFactory,
    groups: _Groups,
    ranks: tuple[int, ...],
    start_broadcast: StartBroadcast,
) -> dist.ProcessGroup:
    """Register a sparse group with torch, and record it in `groups` to be destroyed later."""
    shown = former.show(ranks, start_broadcast)
    groups.append((shown, ranks))
    return shown


def _private_keys(rank: int) -> tuple[Store, int]:
    """Return the part of torch's default store reserved for this world, and the world's number.

    Each rank counts its own worlds; all create them together, so the numbers agree.
    """
    store = PrefixStore("gpipe_hpc", default_store())
    number = store.add(f"worlds/{rank}", 1)
    return PrefixStore(f"world{number}", store), number


def _number_of_world(keys: Store, rank: int) -> bytes:
    """Return the random number of this world, which rank 0 draws."""
    if rank == 0:
        keys.set("number", secrets.token_hex(32))
    return keys.get("number")


def _exchange_texts_among(
    notices: StoreExchange, rank: int, what: str, text: str, ranks: Collection[int]
) -> Mapping[int, str]:
    """Publish a text; return the texts of `ranks` and this rank's own once all are published."""
    notices.publish(what, text)
    return {rank: text, **notices.collect(what, set(ranks) - {rank})}


def _await_end(board: weakref.ref[Board]) -> None:
    """Wait, at interpreter exit, until the thread of a stopped failure board has ended."""
    stopped = board()
    if stopped is not None:
        stopped.await_end()


def _break_groups(world: ProcessWorld | None) -> None:
    if world is not None:
        world.break_groups()


def _forget_in_child(this: "weakref.ref[ProcessWorld]") -> None:
    world = this()
    if world is not None:
        world.forget()


def _release(board: Board, groups: _Groups, wide: list[PairConnections]) -> None:
    board.stop()
    while wide:
        wide.pop().close()
    while groups:
        group, _ = groups.pop()
        # ValueError or AssertionError: the user has destroyed the default group, and all with it.
        with contextlib.suppress(RuntimeError, ValueError, AssertionError):
            dist.destroy_process_group(group)


def leave_default_group(store: Store) -> None:
    """Destroy the default process group at exit; the argument keeps `store` alive until then."""
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()


def _one_host(hosts: Mapping[int, str], channel: PlacedChannel) -> bool:
    source, destination = hosts[channel.source_rank], hosts[channel.destination_rank]
    return source == destination != ""


def _is_carried(device: Device) -> bool:
    """Return whether the default group was created with the device's own backend."""
    world = dist.group.WORLD
    assert world is not None, "the default process group must exist"
    return uses_device_memory(world, device)


def _ends(channel: PlacedChannel) -> tuple[int, int]:
    return channel.source_rank, channel.destination_rank


def _pair(channel: PlacedChannel) -> tuple[int, int]:
    """Return both ranks of a channel, the lower one first; both directions share a pair."""
    low, high = sorted(_ends(channel))
    return low, high


def _order(ends: tuple[int, int]) -> tuple[int, tuple[int, int]]:
    low, high = sorted(ends)
    return low // (high - low) % 2, ends


def _peers(channels: Sequence[PlacedChannel], rank: int) -> set[int]:
    """Return the ranks at the other ends of this rank's channels."""
    return {end for channel in channels for end in _ends(channel)} - {rank}
