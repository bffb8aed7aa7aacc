"""A torch process group whose messages are sent by MPI.

It is registered as a backend, so code that uses torch groups works unchanged: stage boundaries,
all-reduces, objects of a checkpoint, fairscale's OSS. Only point-to-point messages use MPI.
Collectives are built from them with the plans of `comm.collectives`: MPI's own collectives would
block inside MPI, where the failure of another rank does not end the wait, and their order of
summation depends on the library. The order used here is the same for any tensor size and position:
by halves, on four ranks (0 + 2) + (1 + 3).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from gpipe_hpc.comm.collectives.collective_queue import CollectiveQueue
from gpipe_hpc.comm.collectives.halving import (
    butterfly_all_reduce,
    halving_reduce_scatter,
    rabenseifner_all_reduce,
)
from gpipe_hpc.comm.collectives.plan import Plan, PlanPosition
from gpipe_hpc.comm.collectives.plan_executor import copy_back, flattened
from gpipe_hpc.comm.collectives.run_plan import Combine, plus, run_plan
from gpipe_hpc.comm.collectives.tree import binomial_broadcast, scatter_ring_broadcast
from gpipe_hpc.comm.watchdog.wait_listener import WaitListener
from gpipe_hpc.comm.world.mpi.library import MpiLibrary
from gpipe_hpc.comm.world.mpi.progress import MpiMessage
from gpipe_hpc.comm.world.mpi.staging import BLOCK_BYTES, HostStaging, Job, StagingState
from gpipe_hpc.comm.world.mpi.works import MessageWork, QueuedWork
from gpipe_hpc.device.device import Accelerator, Device, HostDevice, on_host

NAME: Final = "mpi4py"
"""Name of this backend in torch; `mpi` is the one with which torch may have been built."""
SHORT_BYTES: Final = 16 * 1024
"""Tensors up to this size are exchanged as a whole, with fewer messages."""

Parts = Sequence[tuple[int, torch.Tensor]]
Tensors = list[torch.Tensor]


def register(library: MpiLibrary, device: Device) -> None:
    """Register the backend with torch; its groups use `library`."""

    def create(options: Any, _: object) -> "MpiGroup":
        return MpiGroup(library, options, device)

    # It accepts tensors of any device, and copies them through the host if MPI requires that.
    kinds = sorted({"cpu", "cuda", "xpu", device.type})
    dist.Backend.register_backend(NAME, create, extended_api=True, devices=kinds)


class MpiGroup(dist.ProcessGroup):
    """A torch process group over MPI.

    Its methods have the names and arguments with which torch calls them.
    """

    def __init__(
        self, library: MpiLibrary, options: Any, device: Device, block_bytes: int = BLOCK_BYTES
    ) -> None:
        rank, size = options.group_rank, options.group_size
        # torch's type stubs do not declare this constructor, the only one usable from Python.
        initialise: Any = super().__init__
        initialise(rank, size)
        self._library = library
        self._limit_s = options.timeout.total_seconds()
        # torch passes no ranks for the default group.
        self._ranks = tuple(options.global_ranks_in_group or range(size))
        self._place = PlanPosition(size, rank)
        self._number = _agreed_number(library, options.store, self._place)
        self._own_tag = library.tags.own(self._number)
        self._set_group_name(options.group_id)
        self._set_group_desc("undefined")
        self._turns = CollectiveQueue(f"mpi of {size} ranks")
        # Queues of device messages by direction, peer and tag; each keeps its order.
        self._lines: dict[tuple[str, int, int], CollectiveQueue] = {}
        self._stager = HostStaging(device if device.is_accelerator else HostDevice(), block_bytes)

    def abort(self) -> None:
        """End all waits of this process in MPI."""
        self._library.progress.break_off("another rank has failed")

    # Point-to-point messages.

    def send(self, tensors: Tensors, dstRank: int, tag: int) -> dist.Work:
        """Start sending a tensor to the rank at a position of the group."""
        return self._message("send", tensors, dstRank, tag)

    def recv(self, tensors: Tensors, srcRank: int, tag: int) -> dist.Work:
        """Start receiving into a tensor from the rank at a position of the group."""
        return self._message("receive", tensors, srcRank, tag)

    def _message(self, way: str, tensors: Tensors, peer: int, tag: int) -> dist.Work:
        (tensor,) = tensors
        start = self._library.send if way == "send" else self._library.receive
        begin = partial(start, rank=self._ranks[peer], tag=self._library.tags.of(self._number, tag))
        if not self._is_apart(tensor):
            return MessageWork(begin(tensor), tensor, self._limit_s)
        line = self._lines.setdefault(
            (way, peer, tag), CollectiveQueue(f"mpi {way} {self._ranks[peer]}")
        )
        stager = self._stager_of(tensor)
        stage = stager.begin()
        job = partial(self._carry_block, begin)
        turn = line.start(
            self._over_device(stager, tensor, stage, job, way == "send", way != "send")
        )
        return QueuedWork(turn, tensors, stager.device, stage)

    def _carry_block(
        self, begin: Callable[[torch.Tensor], MpiMessage], block: torch.Tensor
    ) -> None:
        begin(block).wait(self._limit_s)

    def _over_device(
        self,
        stager: HostStaging,
        tensor: torch.Tensor,
        stage: StagingState,
        job: Job,
        reads: bool,
        writes: bool,
    ) -> Callable[[WaitListener], None]:
        """Return a job for a device tensor, in blocks on the host unless MPI uses device memory."""
        if self._library.takes_device_pointers:
            return lambda note: stager.directly(tensor, stage, job)
        return lambda note: stager.through(tensor, stage, job, reads=reads, writes=writes)

    def _exchange(self, sends: Parts, receives: Parts) -> None:
        """Send and receive tensors, each with the position of a rank; block until complete."""
        library, tag = self._library, self._own_tag
        if any(self._is_apart(tensor) for _, tensor in (*sends, *receives)):
            # MPI does not support streams, so pending work on these tensors must be complete.
            self._stager.device.current_stream().synchronize()
        under_way = [
            start(tensor, self._ranks[position], tag)
            for start, parts in ((library.receive, receives), (library.send, sends))
            for position, tensor in parts
            if tensor.numel()
        ]
        for message in under_way:
            message.wait(self._limit_s)

    # Reductions.

    def allreduce(self, *given: Any, **named: Any) -> dist.Work:
        """Reduce a tensor in place over all ranks."""
        (tensor,), options = given[0], _options(given, named)
        if tensor.layout is not torch.strided:
            return self._start(partial(self._sum_sparse, tensor), [tensor])
        job = partial(self._reduce_host, *_reduction_functions(options.reduceOp, self.size()))
        return self._in_place(tensor, job, reads=True)

    def reduce(self, *given: Any, **named: Any) -> dist.Work:
        """Reduce a tensor as `allreduce` does; only the root gets the result."""
        (tensor,), options = given[0], _options(given, named)
        job = partial(self._reduce_host, *_reduction_functions(options.reduceOp, self.size()))

        def run(read: Tensors, written: Tensors) -> None:
            job(read[0])
            for each in written:
                each.copy_(read[0])

        into = [tensor] if options.rootRank == self.rank() else []
        return self._by_host([tensor], into, run, copies=True)

    def reduce_scatter(self, *given: Any, **named: Any) -> dist.Work:
        """Reduce a list of equally sized tensors, one for each rank; each rank gets its result."""
        (own,), (tensors,), options = given[0], given[1], _options(given, named, 2)
        return self._reduce_scatter(own, tensors, options)

    def _reduce_scatter_base(self, *given: Any, **named: Any) -> dist.Work:
        own, whole, options = given[0], given[1], _options(given, named, 2)
        return self._reduce_scatter(own, list(whole.view(-1).split(own.numel())), options)

    reduce_scatter_single = _reduce_scatter_base

    def _reduce_scatter(self, own: torch.Tensor, tensors: Tensors, options: Any) -> dist.Work:
        combine, finish = _reduction_functions(options.reduceOp, self.size())

        def run(read: Tensors, written: Tensors) -> None:
            counts = tuple(each.numel() for each in read)
            flat = torch.cat([each.reshape(-1) for each in read])
            plan = halving_reduce_scatter(self._place, counts)
            run_plan(plan, flat, self.rank(), self._exchange, combine)
            shard = torch.split(flat, list(counts))[self.rank()]
            finish(shard)
            written[0].copy_(shard.view_as(written[0]))

        return self._by_host(tensors, [own], run)

    def _reduce_host(
        self, combine: Combine, finish: Callable[[torch.Tensor], object], flat: torch.Tensor
    ) -> None:
        """Reduce flat host elements in place."""
        plan = _all_reduce_plan(self._place, flat.numel(), flat.element_size())
        run_plan(plan, flat, self.rank(), self._exchange, combine)
        finish(flat)

    def _sum_sparse(self, tensor: torch.Tensor) -> None:
        """Sum a sparse tensor: all ranks receive all entries and add them in rank order."""
        own = tensor.coalesce()
        indices, values = own.indices().contiguous(), own.values().contiguous()
        counts = [torch.zeros(1, dtype=torch.int64) for _ in self._ranks]
        counts[self.rank()][0] = indices.shape[1]
        self._give_all(counts)
        all_indices = [indices.new_empty((indices.shape[0], int(each))) for each in counts]
        all_values = [values.new_empty((int(each), *values.shape[1:])) for each in counts]
        for parts, mine in ((all_indices, indices), (all_values, values)):
            parts[self.rank()] = mine
            self._give_all(parts)
        parts = [
            torch.sparse_coo_tensor(at, each, tensor.shape)
            for at, each in zip(all_indices, all_values, strict=True)
        ]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        tensor.copy_(total.coalesce())

    # Data movement.

    def broadcast(self, *given: Any, **named: Any) -> dist.Work:
        """Overwrite a tensor with that of the root."""
        (tensor,), options = given[0], _options(given, named)
        root = options.rootRank

        def job(flat: torch.Tensor) -> None:
            flat = flat.view(torch.uint8)
            plan = _broadcast_plan(self._place, root, flat.numel())
            run_plan(plan, flat, self.rank(), self._exchange)

        return self._in_place(tensor, job, reads=root == self.rank())

    def allgather(self, *given: Any, **named: Any) -> dist.Work:
        """Fill a list of tensors with those of all ranks."""
        (outputs,), (own,) = given[0], given[1]
        return self._all_gather(outputs, own)

    def _allgather_base(self, *given: Any, **named: Any) -> dist.Work:
        whole, own = given[0], given[1]
        return self._all_gather(list(whole.view(-1).split(own.numel())), own)

    all_gather_single = _allgather_base

    def _all_gather(self, outputs: Tensors, own: torch.Tensor) -> dist.Work:
        def run(read: Tensors, written: Tensors) -> None:
            written[self.rank()].copy_(read[0].view_as(written[self.rank()]))
            self._give_all(written)

        return self._by_host([own], outputs, run)

    def _give_all(self, tensors: Tensors) -> None:
        """Send this rank's tensor to all other ranks and receive the tensors of those."""
        mine = tensors[self.rank()]
        others = [position for position in range(self.size()) if position != self.rank()]
        self._exchange([(p, mine) for p in others], [(p, tensors[p]) for p in others])

    def gather(self, *given: Any, **named: Any) -> dist.Work:
        """Fill a list of tensors on the root with those of all ranks."""
        (own,), options = given[1], _options(given, named, 2)
        root, is_root = options.rootRank, options.rootRank == self.rank()

        def run(read: Tensors, written: Tensors) -> None:
            if not is_root:
                self._exchange([(root, read[0])], ())
                return
            written[root].copy_(read[0])
            self._exchange((), [(p, t) for p, t in enumerate(written) if p != root])

        return self._by_host([own], given[0][0] if is_root else [], run)

    def scatter(self, *given: Any, **named: Any) -> dist.Work:
        """Send each rank its tensor of the root's list."""
        (own,), options = given[0], _options(given, named, 2)
        root, is_root = options.rootRank, options.rootRank == self.rank()

        def run(read: Tensors, written: Tensors) -> None:
            if not is_root:
                self._exchange((), [(root, written[0])])
                return
            written[0].copy_(read[root])
            self._exchange([(p, t) for p, t in enumerate(read) if p != root], ())

        return self._by_host(given[1][0] if is_root else [], [own], run)

    def alltoall(self, *given: Any, **named: Any) -> dist.Work:
        """Send each rank the tensor at its position in the list."""

        def run(read: Tensors, written: Tensors) -> None:
            own = self.rank()
            written[own].copy_(read[own])
            self._exchange(
                [(p, t) for p, t in enumerate(read) if p != own],
                [(p, t) for p, t in enumerate(written) if p != own],
            )

        return self._by_host(given[1], given[0], run)

    def alltoall_base(self, *given: Any, **named: Any) -> dist.Work:
        """All-to-all with the parts of one tensor, of equal size if no sizes are given."""
        into, out = given[0], given[1]
        parts = [
            list(tensor.split(list(sizes) or tensor.shape[0] // self.size()))
            for tensor, sizes in ((into, given[2]), (out, given[3]))
        ]
        return self.alltoall(*parts)

    all_to_all_single = alltoall_base

    def barrier(self, *given: Any, **named: Any) -> dist.Work:
        """Start a barrier."""
        token = torch.zeros(1, dtype=torch.uint8)
        return self._in_place(token, partial(self._reduce_host, plus, _leave), reads=True)

    # Execution: in order, on the background thread or by a thread that waits.

    def _start(self, job: Callable[[], None], tensors: Tensors) -> dist.Work:
        return QueuedWork(self._turns.start(lambda note: job()), tensors)

    def _in_place(
        self, tensor: torch.Tensor, job: Callable[[torch.Tensor], None], *, reads: bool
    ) -> dist.Work:
        """Start a job that changes a tensor elementwise; device tensors are processed in blocks."""
        if self._is_apart(tensor) and not tensor.is_contiguous():

            def whole(read: Tensors, written: Tensors) -> None:
                flat = flattened(read[0])
                job(flat)
                written[0].copy_(flat.view_as(written[0]))

            return self._by_host([tensor], [tensor], whole, copies=True)
        if not self._is_apart(tensor):
            flat = flattened(tensor)

            def run(note: WaitListener) -> None:
                job(flat)
                copy_back(flat, tensor)

            return QueuedWork(self._turns.start(run), [tensor])
        stager = self._stager_of(tensor)
        stage = stager.begin()
        turn = self._turns.start(
            self._over_device(stager, tensor.detach(), stage, job, reads, True)
        )
        return QueuedWork(turn, [tensor], stager.device, stage)

    def _by_host(
        self,
        reads: Tensors,
        writes: Tensors,
        run: Callable[[Tensors, Tensors], None],
        *,
        copies: bool = False,
    ) -> dist.Work:
        """Start a job that needs whole tensors on the host; device tensors are copied.

        `copies` is true if the job modifies the tensors that it reads, which are then copied in any
        case.
        """
        apart = [tensor for tensor in (*reads, *writes) if self._is_apart(tensor)]
        stager = self._stager_of(apart[0]) if apart else self._stager
        stage = stager.begin() if apart else None

        def job(note: WaitListener) -> None:
            if stage is not None:
                stager.device.use()
                stage.behind.synchronize()
            read = [stager.device.to_host(tensor.detach()).contiguous() for tensor in reads]
            if copies:
                read = [tensor.clone() for tensor in read]
            direct = [not self._is_apart(t) and t.is_contiguous() for t in writes]
            written = [
                tensor.detach() if same else torch.empty(tensor.shape, dtype=tensor.dtype)
                for tensor, same in zip(writes, direct, strict=True)
            ]
            run(read, written)
            for tensor, host, same in zip(writes, written, direct, strict=True):
                if not same:
                    tensor.detach().copy_(host)
            if stage is not None:
                stage.done = stager.device.current_stream().record_event()

        device = None if stage is None else stager.device
        return QueuedWork(self._turns.start(job), writes, device, stage)

    def _is_apart(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is in device memory, which MPI cannot access directly."""
        device = self._stager.device
        return not on_host(tensor) or (device.is_accelerator and device.holds(tensor))

    def _stager_of(self, tensor: torch.Tensor) -> HostStaging:
        if self._stager.device.holds(tensor):
            return self._stager
        return HostStaging(Accelerator(tensor.device))


def _agreed_number(library: MpiLibrary, store: Store, place: PlanPosition) -> int:
    """Return the number of a new group, unused by all of its members.

    Each member publishes its lowest unused number; the highest of them is chosen.
    """
    size, position = place
    if not library.num_groups:  # the default group, created by all ranks
        number = 0
    else:
        store.set(f"free/{position}", str(library.num_groups))
        number = max(int(store.get(f"free/{each}")) for each in range(size))
    library.num_groups = number + 1
    return number


@lru_cache(maxsize=64)
def _all_reduce_plan(place: PlanPosition, count: int, element_bytes: int) -> Plan:
    if count * element_bytes <= SHORT_BYTES:
        return butterfly_all_reduce(place, count)
    return rabenseifner_all_reduce(place, count)


@lru_cache(maxsize=64)
def _broadcast_plan(place: PlanPosition, root: int, num_bytes: int) -> Plan:
    if num_bytes <= SHORT_BYTES or place.size == 2:
        return binomial_broadcast(place, root, num_bytes)
    return scatter_ring_broadcast(place, root, num_bytes)


def _leave(tensor: torch.Tensor) -> None:
    """Do nothing: the final result needs no further operation."""


def _reduction_functions(
    operation: Any, size: int
) -> tuple[Combine, Callable[[torch.Tensor], object]]:
    """Return the function that combines two tensors, and the one applied to the final result."""
    kind = getattr(operation, "op", operation)
    if kind == dist.ReduceOp.AVG:
        return plus, lambda total: total.div_(size)
    if kind not in _COMBINES:
        raise RuntimeError(
            f"MPI: expected a sum, average, product, minimum, maximum or bitwise operation, "
            f"got {kind}"
        )
    return _COMBINES[kind], _leave


_COMBINES: Final[Mapping[Any, Combine]] = MappingProxyType(
    {
        dist.ReduceOp.SUM: plus,
        dist.ReduceOp.PRODUCT: lambda own, other: own.mul_(other),
        dist.ReduceOp.MIN: lambda own, other: torch.minimum(own, other, out=own),
        dist.ReduceOp.MAX: lambda own, other: torch.maximum(own, other, out=own),
        dist.ReduceOp.BAND: lambda own, other: own.bitwise_and_(other),
        dist.ReduceOp.BOR: lambda own, other: own.bitwise_or_(other),
        dist.ReduceOp.BXOR: lambda own, other: own.bitwise_xor_(other),
    }
)


def _options(given: Sequence[Any], named: Mapping[str, Any], position: int = 1) -> Any:
    """Return the options of a call, which torch passes by position or by name."""
    return given[position] if len(given) > position else named["opts"]
