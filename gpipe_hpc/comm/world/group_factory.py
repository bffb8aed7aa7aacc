"""Creation of torch process groups by their members alone.

`dist.new_group` is either a call of every rank of the world, or names the group by the number of
groups that the process has created, which may differ between ranks. Here the name consists of the
world, the ranks and the number of groups formed by these ranks before, which is equal on all
members.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property
from typing import Any, Final

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from gpipe_hpc.comm.collectives.bruck import distances
from gpipe_hpc.comm.collectives.group import rank_names
from gpipe_hpc.comm.collectives.torch_adapter import NAME as FACE_NAME
from gpipe_hpc.comm.collectives.torch_adapter import StartBroadcast, register
from gpipe_hpc.comm.net import gloo
from gpipe_hpc.comm.net.reachability import ListenAddress, calls, listening, unanswered
from gpipe_hpc.errors import LaunchError
from gpipe_hpc.torch_compat import default_store, new_process_group, ranks_of_groups

_GLOO: Final = "gloo"  # as it appears in backend strings
_LONGEST_KNOCK_S: Final = 10.0  # TCP retries a connection four times meanwhile

Exchange = Callable[[str, str, Collection[int]], Mapping[int, str]]
"""Publishes a text under a name to the given ranks, including this one; returns those of all."""
Absent = Callable[[str, Collection[int]], Sequence[int]]
"""Returns those of the given ranks that have published nothing under a name yet."""


def _exchange_nothing(name: str, text: str, ranks: Collection[int]) -> Mapping[int, str]:
    return {}


def _report_none_absent(name: str, ranks: Collection[int]) -> Sequence[int]:
    return ()


class ProcessGroupFactory:
    """Factory of the process groups of one world.

    Args:
        name: name of the world, unique among worlds of the same ranks.
        timeout: time-out of the groups.
        backend: default backend.
        exchange: publishes a text and waits until all members of a group have published theirs.
            torch itself would wait for them on the store, where a member's failure would not end
            the wait.
        address: address of this host on which Gloo listens; None for Gloo's own choice.
        reach_s: time within which ranks of other hosts must answer.
        absent: returns the ranks that have not called `exchange`.
    """

    def __init__(
        self,
        name: str,
        timeout: timedelta,
        backend: str,
        exchange: Exchange = _exchange_nothing,
        address: str | None = None,
        reach_s: float = _LONGEST_KNOCK_S,
        absent: Absent = _report_none_absent,
    ) -> None:
        self._exchange, self._absent, self._chosen = exchange, absent, address
        self._reach_s = min(reach_s, _LONGEST_KNOCK_S)
        self._name, self._timeout, self._backend = name, timeout, backend
        self._num_formed: Counter[tuple[int, ...]] = Counter()

    def form(self, ranks: Sequence[int], backend: str | None = None) -> dist.ProcessGroup:
        """Form a process group of world ranks; called by all of its members and by no other rank.

        If the backend includes Gloo, all members connect with one another, so the group should be
        small. With other backends the number of store requests of a rank grows with the logarithm
        of the group size. `backend` is None for the default. Raises LaunchError on all members if
        one member cannot reach another.
        """
        members = tuple(ranks)
        name, chosen = self._group_name(members), backend or self._backend
        if _GLOO in chosen:
            self._meet(name, members, dist.get_rank())
        else:
            self._meet_in_rounds(name, members, dist.get_rank())
        return self._create_group(name, members, chosen)

    def show(self, ranks: Sequence[int], start_broadcast: StartBroadcast) -> dist.ProcessGroup:
        """Register a group with torch whose ranks are already connected; does not communicate."""
        register()
        members = tuple(ranks)
        return self._create_group(self._group_name(members), members, FACE_NAME, start_broadcast)

    def _group_name(self, members: tuple[int, ...]) -> str:
        self._num_formed[members] += 1
        digest = hashlib.sha256(str(members).encode()).hexdigest()[:32]
        return f"{self._name}_{digest}_{self._num_formed[members]}"

    def _create_group(
        self, name: str, members: tuple[int, ...], backend: str, given: object = None
    ) -> dist.ProcessGroup:
        """Create a process group and register it with torch; `given` are the backend's options."""
        default: Any = dist.group.WORLD
        is_gloo = _GLOO in backend
        if is_gloo:
            gloo.register(self._address)
            backend = backend.replace(_GLOO, gloo.NAME)
        with _unbound(default):
            formed, _ = new_process_group(
                len(members),
                members.index(default.rank()),
                list(members),
                dist.Backend(backend),
                default_store(),
                group_name=name,
                backend_options=given,
                timeout=self._timeout,
            )
        # torch < 2.14 sets the default backend of a mixed group to NCCL or its own Gloo. A group of
        # `show` has no backend: torch 2.14 would query the size of a default one.
        if is_gloo and formed.name() == "undefined":
            formed._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
        places = {rank: position for position, rank in enumerate(members)}
        ranks_of_groups()[formed] = places
        group: dist.ProcessGroup = formed
        return group

    @cached_property
    def _address(self) -> str:
        return gloo.listening_address(self._chosen)

    def open_device(self) -> Any:
        """Open a Gloo device that listens for pairwise connections."""
        return gloo.open_device(self._address)

    def connect(self, pair: tuple[int, int], device: Any) -> dist.ProcessGroupGloo:
        """Connect two world ranks over Gloo; called by both and by no other rank.

        The result can send and receive. It is not registered with torch and uses only the device's
        thread, so the number of threads does not grow with the number of connections. Raises
        LaunchError on both ranks if one cannot reach the other.
        """
        self._num_formed[pair] += 1
        name = f"{self._name}_{pair[0]}_{pair[1]}_pair{self._num_formed[pair]}"
        self._meet(name, pair, dist.get_rank())
        return self._connect_ready(name, pair, device)

    def _connect_ready(
        self, name: str, pair: tuple[int, int], device: Any
    ) -> dist.ProcessGroupGloo:
        """Connect the two ranks of `pair`, both of which are ready."""
        keys = PrefixStore(f"{name}/", default_store())
        position = pair.index(dist.get_rank())
        return gloo.connect(keys, position, 2, device, self._timeout, num_threads=1)

    def _meet_in_rounds(self, name: str, members: Sequence[int], rank: int) -> None:
        """Wait for all members in log2(n) rounds, each for the member 1, 2, 4, ... places before.

        After the round of distance d, a rank knows that the 2 d members before it have arrived.
        Raises TimeoutError naming the members that never arrived, not those that wait for them.
        """
        n, i = len(members), members.index(rank)
        rounds = {d: f"forming group {name}, {d} places on" for d in distances(n)}
        try:
            for d, what in rounds.items():
                self._exchange(what, "", [members[(i - d) % n]])
        except TimeoutError as error:
            # Every member publishes its arrival before each round.
            never = (self._absent(what, members) for what in rounds.values())
            missing = next(filter(None, never), ())
            if not missing:
                raise
            raise TimeoutError(
                f"forming group {name}: timed out waiting for {rank_names(missing)}"
            ) from error

    def _meet(self, name: str, members: Collection[int], rank: int) -> None:
        """Wait for all members; if they are on several hosts, check that all can be reached.

        For this check each member listens on an additional port, chosen by the kernel like Gloo's.
        """
        with listening(self._address, len(members)) as own:
            told = self._exchange(f"forming group {name}", own.encoded(), members)
            places = {member: ListenAddress.parsed(text) for member, text in told.items()}
            if len({place.address for place in places.values()}) < 2:
                return
            called = {r: place for r, place in places.items() if calls(own, place)}
            failed = unanswered(called, self._reach_s)
            why = "; ".join(_unreached(rank, own, r, places[r], why) for r, why in failed.items())
            heard = self._exchange(f"reaching group {name}", why, members)
        reasons = [heard[member] for member in sorted(heard) if heard[member]]
        if reasons:
            raise LaunchError(f"launch: {reasons[0]}")


def _unreached(rank: int, own: ListenAddress, other: int, place: ListenAddress, why: str) -> str:
    """Return the error message for a pair of ranks that cannot connect."""
    return (
        f"rank {rank} on {own.host} ({own.address}) cannot reach rank {other} on {place.host}, "
        f"which listens at {place}: {why}; open the ephemeral ports (sysctl "
        f"net.ipv4.ip_local_port_range) between the hosts, or select a network on which they are "
        f"open with comm.interface"
    )


@contextmanager
def _unbound(default: Any) -> Iterator[None]:
    """Temporarily unbind the default group from its device, if the user has bound it.

    NCCL would otherwise split the new group from it, which is collective over all ranks.
    """
    bound = default.bound_device_id
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = bound
