"""Process groups of torch, formed by their members alone.

`dist.new_group` has every rank of the world take part, or derives the name of a group from how many
the process has, which ranks need not agree on. Here a name says the world, the ranks, and how many
groups these ranks have formed before: that is the same on all members, and nobody else is asked.
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
from gpipe_hpc.comm.collectives.torch_face import NAME as FACE_NAME
from gpipe_hpc.comm.collectives.torch_face import StartBroadcast, register
from gpipe_hpc.comm.net import gloo
from gpipe_hpc.comm.net.knocking import Place, calls, listening, unanswered
from gpipe_hpc.errors import LaunchError
from gpipe_hpc.torch_compat import default_store, new_process_group, ranks_of_groups

_GLOO: Final = "gloo"  # in the names of backends that callers give
_LONGEST_KNOCK_S: Final = 10.0  # in which a call is made four times

Exchange = Callable[[str, str, Collection[int]], Mapping[int, str]]
"""Tells some ranks, this one among them, a text under a name; returns all of theirs."""
Absent = Callable[[str, Collection[int]], Sequence[int]]
"""Returns which of some ranks have told nothing under a name by now."""


def _own_alone(name: str, text: str, ranks: Collection[int]) -> Mapping[int, str]:
    return {}


def _none_known(name: str, ranks: Collection[int]) -> Sequence[int]:
    return ()


class Former:
    """Forms the groups of one world; `name` tells it from other worlds of the same ranks.

    `exchange`: returns once all members of a group have called it. Forming itself waits for them on
    the store, where the failure of one would not end the wait. `address`: of this host, on which
    Gloo listens; None for its own choice. `reach_s`: in which ranks of other hosts have to answer.
    `absent`: who has not called `exchange`.
    """

    def __init__(
        self,
        name: str,
        timeout: timedelta,
        backend: str,
        exchange: Exchange = _own_alone,
        address: str | None = None,
        reach_s: float = _LONGEST_KNOCK_S,
        absent: Absent = _none_known,
    ) -> None:
        self._exchange, self._absent, self._chosen = exchange, absent, address
        self._reach_s = min(reach_s, _LONGEST_KNOCK_S)
        self._name, self._timeout, self._backend = name, timeout, backend
        self._num_formed: Counter[tuple[int, ...]] = Counter()

    def form(self, ranks: Sequence[int], backend: str | None = None) -> dist.ProcessGroup:
        """Form a group of world ranks, this one among them; each of them calls it, nobody else.

        `backend`: None for that of the other groups. Where Gloo is part of it, all members are
        connected with one another then, so a group should be small; what a rank asks the store for
        grows with the logarithm of the members elsewhere. Raises LaunchError, on all members, where
        one cannot be reached by another.
        """
        members = tuple(ranks)
        name, chosen = self._named(members), backend or self._backend
        if _GLOO in chosen:
            self._meet(name, members, dist.get_rank())
        else:
            self._meet_in_rounds(name, members, dist.get_rank())
        return self._entered(name, members, chosen)

    def show(self, ranks: Sequence[int], start_broadcast: StartBroadcast) -> dist.ProcessGroup:
        """Let torch see ranks that are connected already as a group; it waits for nobody."""
        register()
        members = tuple(ranks)
        return self._entered(self._named(members), members, FACE_NAME, start_broadcast)

    def _named(self, members: tuple[int, ...]) -> str:
        self._num_formed[members] += 1
        digest = hashlib.sha256(str(members).encode()).hexdigest()[:32]
        return f"{self._name}_{digest}_{self._num_formed[members]}"

    def _entered(
        self, name: str, members: tuple[int, ...], backend: str, given: object = None
    ) -> dist.ProcessGroup:
        """Make a group and enter it into torch's lists; `given`: what the backend is made with."""
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
        # torch < 2.14 gives a mixed group NCCL's or its own Gloo's. A group made by `show` has no
        # backend: with a default one torch 2.14 would ask it for its size.
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
        """Let Gloo listen for connections of two ranks."""
        return gloo.open_device(self._address)

    def connect(self, pair: tuple[int, int], device: Any) -> dist.ProcessGroupGloo:
        """Connect two world ranks over Gloo, this one among them; both call it, nobody else.

        What is returned sends and receives. Torch does not list it among its groups, so nothing of
        its own grows with their number, and no thread works for it besides the device's. Raises
        LaunchError, on both, where one cannot be reached by the other.
        """
        self._num_formed[pair] += 1
        name = f"{self._name}_{pair[0]}_{pair[1]}_pair{self._num_formed[pair]}"
        self._meet(name, pair, dist.get_rank())
        return self._connected(name, pair, device)

    def _connected(self, name: str, pair: tuple[int, int], device: Any) -> dist.ProcessGroupGloo:
        """Connect two ranks that have met."""
        keys = PrefixStore(f"{name}/", default_store())
        position = pair.index(dist.get_rank())
        return gloo.connect(keys, position, 2, device, self._timeout, num_threads=1)

    def _meet_in_rounds(self, name: str, members: Sequence[int], rank: int) -> None:
        """Wait for all members, each asking for those 1, 2, 4, 8, ... places before it alone.

        Who has heard of the one d places before has heard, by way of it, of 2 d places. Raises
        TimeoutError with those that never came: the one that a rank waits for may wait itself.
        """
        n, i = len(members), members.index(rank)
        rounds = {d: f"forming group {name}, {d} places on" for d in distances(n)}
        try:
            for d, what in rounds.items():
                self._exchange(what, "", [members[(i - d) % n]])
        except TimeoutError as error:
            # All that have come to a round have told so, and go on to the next once all have come.
            never = (self._absent(what, members) for what in rounds.values())
            missing = next(filter(None, never), ())
            if not missing:
                raise
            raise TimeoutError(
                f"forming group {name}: timed out waiting for {rank_names(missing)}"
            ) from error

    def _meet(self, name: str, members: Collection[int], rank: int) -> None:
        """Wait for all members; if they are on several hosts, check that all can be reached.

        Each member listens on a port beside Gloo's, which the kernel chooses likewise.
        """
        with listening(self._address, len(members)) as own:
            told = self._exchange(f"forming group {name}", own.told(), members)
            places = {member: Place.parsed(text) for member, text in told.items()}
            if len({place.address for place in places.values()}) < 2:
                return
            called = {r: place for r, place in places.items() if calls(own, place)}
            failed = unanswered(called, self._reach_s)
            why = "; ".join(_unreached(rank, own, r, places[r], why) for r, why in failed.items())
            heard = self._exchange(f"reaching group {name}", why, members)
        reasons = [heard[member] for member in sorted(heard) if heard[member]]
        if reasons:
            raise LaunchError(f"launch: {reasons[0]}")


def _unreached(rank: int, own: Place, other: int, place: Place, why: str) -> str:
    """Return a pair of ranks that does not meet, as a message, with what can be done."""
    return (
        f"rank {rank} on {own.host} ({own.address}) cannot reach rank {other} on {place.host}, "
        f"expected an answer at {place}, where it listens, got: {why}; open to one another the "
        f"ports that the kernel of each host gives (sysctl net.ipv4.ip_local_port_range), or "
        f"choose a network on which they are open with comm.interface"
    )


@contextmanager
def _unbound(default: Any) -> Iterator[None]:
    """Let the default group have no device of its own meanwhile, if its user gave it one.

    NCCL would else split the new group off from it, in which all ranks of the world take part.
    """
    bound = default.bound_device_id
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = bound
