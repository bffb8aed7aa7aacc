"""One real rank of a large world whose other ranks are simulated: they answer like this rank.

The default process group is torch's own, of all ranks. Small groups are formed through the store
and simulated from then on. The store is simulated too: the key of another rank exists as soon as
this rank has written its own.
"""

import importlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial, reduce
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store

from gpipe_hpc.comm.collectives.group import (
    CollectiveHandle,
    CompletedHandle,
    Group,
    PeerTensor,
    SoloGroup,
    TrafficCounter,
)
from gpipe_hpc.comm.collectives.plan import Plan
from gpipe_hpc.comm.collectives.torch_adapter import NAME as FACE_NAME
from gpipe_hpc.comm.collectives.torch_adapter import register
from gpipe_hpc.comm.net.gloo import default_group_settings
from gpipe_hpc.comm.net.pickling import dumps, loads
from gpipe_hpc.comm.net.secret import Secret
from gpipe_hpc.comm.transport.base import Message, PlacedChannel, Transport
from gpipe_hpc.comm.transport.lanes import TorchLane
from gpipe_hpc.comm.world.group_factory import ProcessGroupFactory
from gpipe_hpc.comm.world.processes import ProcessWorld
from gpipe_hpc.device.device import Device, HostDevice
from gpipe_hpc.pytree import Nest

T = TypeVar("T")

Others = Callable[[Secret, Any, Sequence[int]], Sequence[Any]]
"""Maps the secret, a value of this rank and some ranks to the values of these ranks."""


class Counts(NamedTuple):
    """Counters of what this rank did.

    Args:
        asked: keys that it read from the store or waited for
        told: keys that it wrote
        groups: for each group of torch that it formed, the number of its ranks that are connected
        pairs: ranks with which it is connected outside of these groups
        collectives: number of collectives by name
        num_bytes: bytes that it contributed, by name
        heard: bytes of object collectives that all ranks received; without those for rank 0 only
        messages: number and bytes of point-to-point messages that it sent
    """

    asked: set[str]
    told: set[str]
    groups: list[int]
    pairs: list[tuple[int, int]]
    collectives: Counter[str]
    num_bytes: Counter[str]
    heard: Counter[str]
    messages: Counter[str]


def no_counts() -> Counts:
    """Return counts of zero."""
    return Counts(set(), set(), [], [], Counter(), Counter(), Counter(), Counter())


class SimulatedStore(Store):
    """A store in which the other ranks have written the same keys as this rank."""

    def __init__(self, rank: int, counts: Counts) -> None:
        super().__init__()
        self._store: Any = HashStore()
        self._rank, self._counts = rank, counts

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        self._counts.told.add(key)
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """Return a value; for a key of another rank, the value of this rank."""
        self._counts.asked.add(key)
        found: bytes = self._store.get(self._own(key))
        return found

    def add(self, key: str, amount: int) -> int:
        """Add to a counter."""
        self._counts.told.add(key)
        answer: int = self._store.add(key, amount)
        return answer

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys exist; keys of this rank count for other ranks too."""
        self._counts.asked.update(keys)
        answer: bool = self._store.check([self._own(key) for key in keys])
        return answer

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return immediately, because all keys exist."""
        self._counts.asked.update(keys)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Write a value if the current one equals the expected one."""
        self._counts.told.add(key)
        found: bytes = self._store.compare_set(key, expected, desired)
        return found

    def set_timeout(self, timeout: timedelta) -> None:
        """Do nothing, because no call waits."""

    def has_extended_api(self) -> bool:
        """Return False: values are written and read one by one."""
        return False

    def clone(self) -> "SimulatedStore":
        """Return this store."""
        return self

    def _own(self, key: str) -> str:
        """Return the key of this rank that corresponds to a key of another rank."""
        head, _, last = key.rpartition("/")
        return f"{head}/{self._rank}" if "notice/" in head and last.isdigit() else key


class SimulatedGroup(SoloGroup):
    """A group of one real rank and simulated ones, whose values `others` returns."""

    def __init__(
        self,
        ranks: tuple[int, ...],
        rank: int,
        counts: Counts,
        others: Callable[[Any, Sequence[int]], Sequence[Any]],
    ) -> None:
        super().__init__(rank)
        self.ranks, self.size, self.position = ranks, len(ranks), ranks.index(rank)
        self.width = self.size
        self.sent = TrafficCounter()
        self._rank, self._counts, self._others = rank, counts, others
        self.num_calls = self.num_bytes = 0  # of this group

    def scatter_object(self, values: Sequence[Any] | None, root: int) -> Any:
        """Return the first value of the root, which is for this rank."""
        assert values is not None, "no other rank deals"
        self._count("scatter_object", sum(len(dumps(value, "dealing")) for value in values))
        return self._heard("scatter_object", values[self.position])

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the value of each rank."""
        return self._heard("all_gather_object", self._said("all_gather_object", value))

    def gather_object(self, value: Any, root: int) -> list[Any] | None:
        """Return the value of each rank on the root."""
        values = self._said("gather_object", value)
        return values if root == self._rank else None

    def merge_object(self, value: T, merge: Callable[[T, T], T]) -> T:
        """Return the merged values of all ranks."""
        return self._heard("merge_object", reduce(merge, self._said("merge_object", value)))

    def broadcast_object(self, value: Any, root: int) -> Any:
        """Return this rank's own value, which equals the root's."""
        self._count("broadcast_object", len(dumps(value, "a simulated collective")))
        return self._heard("broadcast_object", value)

    def _said(self, name: str, value: Any) -> list[Any]:
        self._count(name, len(dumps(value, "a simulated collective")))
        # Separate objects, as if received: pickle writes a repeated object only once.
        told = (dumps(each, "a simulated collective") for each in self._others(value, self.ranks))
        return [loads(each, "a simulated collective") for each in told]

    def _heard(self, name: str, value: T) -> T:
        self._counts.heard[name] += len(dumps(value, "a simulated collective"))
        return value

    def start_all_reduce(self, tensor: torch.Tensor) -> CollectiveHandle:
        """Leave `tensor` as it is."""
        self._count("all_reduce", tensor.nbytes)
        return CompletedHandle()

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Leave `tensor` as it is."""
        self._count("all_reduce", tensor.nbytes)

    def all_reduce_hierarchical(self, tensor: torch.Tensor, between: Callable[[int], None]) -> None:
        """Leave `tensor` as it is."""
        self._count("all_reduce", tensor.nbytes)

    def all_reduce_max(self, tensor: torch.Tensor) -> None:
        """Leave `tensor` as it is."""
        self._count("all_reduce", tensor.nbytes)

    def start_broadcast(self, tensor: torch.Tensor, root: int) -> CollectiveHandle:
        """Leave `tensor` as it is."""
        self._count("broadcast", tensor.nbytes)
        return CompletedHandle()

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Leave `tensor` as it is."""
        self._count("broadcast", tensor.nbytes)

    def start_exchange(
        self, sends: Sequence[PeerTensor], receives: Sequence[PeerTensor]
    ) -> CollectiveHandle:
        """Exchange nothing."""
        self._count("exchange", sum(piece.tensor.nbytes for piece in sends))
        return CompletedHandle()

    def start_plan(self, plan: Plan, tensor: torch.Tensor, what: str) -> CollectiveHandle:
        """Leave `tensor` as it is."""
        self._count("plan", tensor.nbytes)
        return CompletedHandle()

    def _count(self, name: str, num_bytes: int) -> None:
        self._counts.collectives[name] += 1
        self._counts.num_bytes[name] += num_bytes
        self.num_calls += 1
        self.num_bytes += num_bytes


class SimulatedTransport:
    """Channels on which peers send back the last message of this rank in the same lane."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._sent: dict[str, tuple[Nest, int]] = {}

    def send(
        self, channel: PlacedChannel, lane: str, microbatch: int, nest: Nest, num_samples: int
    ) -> None:
        """Count a message."""
        self._counts.messages["sent"] += 1
        self._counts.messages["bytes"] += nest.nbytes if isinstance(nest, torch.Tensor) else 0
        self._sent[lane] = nest, num_samples

    def post(self, channel: PlacedChannel, lane: str, microbatch: int) -> None:
        """Do nothing."""

    def wait(self, channel: PlacedChannel, lane: str, microbatch: int) -> Message:
        """Return the message that this rank has sent."""
        return Message(*self._sent[lane])

    def finish(self) -> None:
        """Do nothing, because nothing is pending."""


class StandIn:
    """A device with tensors on the host, whose backend opens no connections.

    Its ranks use Gloo and the store like ranks with NCCL.
    """

    is_accelerator, type, backend = True, "xpu", "fake"

    def __init__(self) -> None:
        self._host = HostDevice()

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the host device."""
        return getattr(self._host, name)


class CountingFormer(ProcessGroupFactory):
    """Forms groups through the store; opens no connections but counts them."""

    def __init__(self, counts: Counts, *given: Any) -> None:
        super().__init__(*given)
        self._counts = counts

    def _create_group(
        self, name: str, members: tuple[int, ...], backend: str, given: object = None
    ) -> dist.ProcessGroup:
        self._counts.groups.append(len(members) if "gloo" in backend else 1)
        register()
        return super()._create_group(name, members, FACE_NAME, None)

    def _connect_ready(self, name: str, pair: tuple[int, int], device: Any) -> Any:
        self._counts.pairs.append(pair)


class SimulatedWorld(ProcessWorld):
    """The real world of one process, with simulated groups."""

    store: SimulatedStore

    def __init__(self, device: Device, counts: Counts, others: Others, **options: Any) -> None:
        self._counts, self._others = counts, others
        super().__init__(device, 60.0, shares_memory=False, **options)

    def _make_former(self, *given: Any) -> ProcessGroupFactory:
        return CountingFormer(self._counts, *given)

    def _group_of(self, members: Sequence[int]) -> Group:
        formed = super()._group_of(members)
        if formed.size == 1:
            return formed
        return SimulatedGroup(
            formed.ranks, self.rank, self._counts, partial(self._others, self.secret)
        )

    def transport(
        self, channels: Sequence[PlacedChannel], device: Device | None = None
    ) -> Transport:
        """Open the channels; messages are then simulated."""
        super().transport(channels, device)
        return SimulatedTransport(self._counts)

    def _open_queue(self, ends: tuple[int, int], device: Device) -> TorchLane:
        return TorchLane(self._form(ends, self._own_backend), peer=int(self.rank == ends[0]))


def join(
    rank: int, size: int, counts: Counts, others: Others, device: Device
) -> tuple[SimulatedWorld, float]:
    """Return the world of one rank among `size`, and the seconds that joining took."""
    importlib.import_module("torch.testing._internal.distributed.fake_pg")
    began_s = time.perf_counter()
    store = SimulatedStore(rank, counts)
    backend = f"cpu:gloo,{device.type}:{device.backend}" if device.is_accelerator else "gloo"
    with default_group_settings():
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    world = SimulatedWorld(device, counts, others)
    world.store = store  # torch calls it from C++ without holding a reference
    return world, time.perf_counter() - began_s
