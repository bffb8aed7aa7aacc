"""Keep the activations of a micro-batch in host memory between its forward and its backward.

The host memory is pinned, and the buffers are reused in every step: pinning memory takes longer
than a copy, and torch's own cache rounds sizes up to powers of two.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
from torch.autograd.graph import saved_tensors_hooks

from gpipe_hpc.device.device import Device, Event

_Free = tuple[torch.Tensor, int]
"""A free buffer, and the number of the last fetch that reads it."""


class PinnedBufferPool:
    """Pinned buffers of a rank by size, and two streams for copies to and from them.

    Each direction has a stream, as links transfer in both at once: if a schedule moves one
    micro-batch out while another returns, neither waits for the other. A buffer is written again
    after the copy from it has ended; the stream of copies out waits for that, not the host.

    One action of compute overlaps with a copy out. Before the next action, and before a fetch,
    `free_offloaded` lets the compute stream wait for the copy and frees the device memory. So no
    more memory waits for copies than a plan counts, and it is freed in the order of the compute
    stream: no other stream uses it. Receives do not wait for copies, as sends after them would wait
    too.
    """

    def __init__(self, device: Device) -> None:
        self.device, self.out, self.back = device, device.stream(), device.stream()
        self._free: dict[int, deque[_Free]] = defaultdict(deque)
        self._unused: dict[int, deque[_Free]] = defaultdict(deque)  # in this step so far
        self._num_fetches = self._num_awaited = 0
        self._ends: dict[int, Event] = {}  # of fetches that copies out have not waited for
        # Copies out that no action of compute has overlapped so far, and those that one has.
        self._leaving: list[tuple[HostCopy, Event]] = []
        self._left: list[tuple[HostCopy, Event]] = []

    @contextmanager
    def going_out(self, who: "HostCopy") -> Iterator[None]:
        """Return a block for copies to the host, after the current stream's work so far."""
        self.out.wait_stream(self.device.current_stream())
        try:
            with self.device.on(self.out):
                yield
        finally:  # earlier copies may be running, even if starting one has failed
            self._leaving.append((who, self.out.record_event()))

    @contextmanager
    def coming_back(self) -> Iterator[None]:
        """Return a block for copies to the device, after the current stream's work so far."""
        self.back.wait_stream(self.device.current_stream())
        with self.device.on(self.back):
            yield

    def before_compute(self) -> None:
        """Free memory of overlapped copies before an action of compute, which overlaps others."""
        self.free_offloaded()
        self._left, self._leaving = self._leaving, []

    def free_offloaded(self) -> None:
        """Let the compute stream wait for copies that an action overlapped; free their memory."""
        going, self._left = self._left, []
        current = self.device.current_stream()
        for who, is_gone in going:
            current.wait_event(is_gone)
            who.let_go()

    def take_back(self, who: "HostCopy") -> Event | None:
        """Return the end event of a copy out whose device memory was not freed yet, else None."""
        for going in self._leaving:
            if going[0] is who:
                self._leaving.remove(going)
                return going[1]
        return None

    def give_back(self, buffers: Iterable[torch.Tensor]) -> None:
        """Return buffers to the pool that no copy to the device reads."""
        for buffer in buffers:
            self._free[buffer.numel()].append((buffer, 0))

    def take(self, num_bytes: int) -> torch.Tensor:
        """Return a pinned buffer, uint8[num_bytes], for a copy on the stream of copies out."""
        for known in (self._free, self._unused):
            if known[num_bytes]:
                buffer, fetch = known[num_bytes].popleft()
                self._await(fetch)
                return buffer
        return self.device.pinned((num_bytes,), torch.uint8)

    def end_fetch(self, buffers: list[torch.Tensor]) -> Event:
        """Return buffers to the pool after the copies that read them; return the end event."""
        self._num_fetches += 1
        end = self._ends[self._num_fetches] = self.back.record_event()
        for buffer in buffers:
            self._free[buffer.numel()].append((buffer, self._num_fetches))
        return end

    def end(self) -> None:
        """End a step, also one that failed.

        Memory that copies read or write is freed after them. Buffers of sizes that the step did not
        use are released.
        """
        self._left += self._leaving
        self._leaving = []
        self.free_offloaded()
        for copies in (self.out, self.back):  # also copies out whose memory was kept by a fetch
            self.device.current_stream().wait_stream(copies)
        self._unused, self._free = self._free, defaultdict(deque)
        readers = {fetch for known in self._unused.values() for _, fetch in known}
        self._ends = {number: end for number, end in self._ends.items() if number in readers}

    def _await(self, fetch: int) -> None:
        # Fetches end in their order.
        if fetch > self._num_awaited:
            self.out.wait_event(self._ends[fetch])
            self._ends = {number: end for number, end in self._ends.items() if number > fetch}
            self._num_awaited = fetch


@dataclass(eq=False)
class _SavedStorage:
    """One storage of saved tensors: on the device, on the host, or being copied."""

    device: torch.UntypedStorage | None
    host: torch.Tensor | None = None


class _SavedView(NamedTuple):
    """A saved tensor, as a view of a storage that may be moved to the host and back."""

    memory: _SavedStorage
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    def tensor(self) -> torch.Tensor:
        """Return the tensor, whose storage must be on the device."""
        storage = self.memory.device
        assert storage is not None, "a tensor is used between OFFLOAD and FETCH"
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


class HostCopy:
    """The saved tensors of one micro-batch of a stage, moved to the host and back as a whole.

    Args:
        lasting: Parameters and buffers, which are not moved.
        device: Where the stage runs.
        pinned: Pinned buffers, and the streams of the copies. `PinnedBufferPool.free_offloaded`
            frees the device memory of tensors that are moved out.
    """

    def __init__(
        self, lasting: Iterable[torch.Tensor], device: Device, pinned: PinnedBufferPool
    ) -> None:
        self._lasting = {tensor.untyped_storage().data_ptr() for tensor in lasting}
        self._device, self._pinned = device, pinned
        self._memories: dict[int, _SavedStorage] = {}
        self._held: list[tuple[ReferenceType[torch.Tensor], _SavedView]] = []
        self._is_here: Event | None = None
        self._is_back = False

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Collect all tensors that autograd saves within the block."""
        with saved_tensors_hooks(self._pack, _unpack):
            yield

    def forget(self) -> None:
        """Release all tensors, because the forward runs once more."""
        self._memories.clear()
        self._held.clear()

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """Collect tensors that stay as objects, such as inputs, which get gradients.

        Does nothing in a recomputation after `wait`, when nothing is moved any more.
        """
        for tensor in () if self._is_back else tensors:
            view = self._pack(tensor)
            if isinstance(view, _SavedView):
                self._held.append((ref(tensor), view))

    def offload(self) -> None:
        """Start moving everything to the host; the pool frees the device memory later."""
        for tensor, _ in self._living():
            # The tensor object stays, for its gradient; only its memory is freed.
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        with self._pinned.going_out(self):
            for memory in self._memories.values():
                assert memory.device is not None, "offloaded twice"
                source = _bytes_of(memory.device)
                memory.host = self._pinned.take(source.numel())
                self._device.copy_to_host(memory.host, source)

    def let_go(self) -> None:
        """Free the device memory, after the compute stream has waited for the copies."""
        for memory in self._memories.values():
            memory.device = None

    def fetch(self) -> None:
        """Start moving everything back; device memory that was not freed yet is used again."""
        self._pinned.free_offloaded()
        is_gone = self._pinned.take_back(self)
        if is_gone is not None:
            self._keep(is_gone)
        else:
            self._fetch()
        for tensor, view in self._living():
            tensor.data = view.tensor()

    def _keep(self, is_gone: Event) -> None:
        memories = self._memories.values()
        self._pinned.give_back([each.host for each in memories if each.host is not None])
        for memory in memories:
            memory.host = None
        self._is_here = is_gone

    def _fetch(self) -> None:
        arriving = []
        for memory in self._memories.values():
            assert memory.host is not None, "fetched without having been offloaded"
            # Allocated on the compute stream, so that memory which it has freed can be reused.
            arriving.append(self._device.empty((memory.host.numel(),), torch.uint8))
        read = []
        with self._pinned.coming_back():
            for memory, own in zip(self._memories.values(), arriving, strict=True):
                assert memory.host is not None
                self._device.copy_to_device(own, memory.host)
                read.append(memory.host)
                memory.device, memory.host = own.untyped_storage(), None
            self._is_here = self._pinned.end_fetch(read)

    def wait(self) -> None:
        """Let the compute stream wait for the copies back, and release all references to them.

        Then only autograd's graph refers to the tensors, and a backward frees them one by one.
        """
        if self._is_here is not None:
            self._device.current_stream().wait_event(self._is_here)
            self._is_here, self._is_back = None, True
            self._memories.clear()
            self._held.clear()

    def _pack(self, tensor: torch.Tensor) -> Any:
        """Return a tensor as a view of a movable storage; itself if it cannot be moved."""
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
            return tensor
        if not self._device.holds(tensor):
            return tensor  # it is on the host already
        storage = tensor.untyped_storage()
        pointer = storage.data_ptr()
        if pointer == 0 or pointer in self._lasting or tensor.is_conj() or tensor.is_neg():
            return tensor
        # No other storage can have this address, as this one is kept alive here.
        memory = self._memories.setdefault(pointer, _SavedStorage(storage))
        offset = int(tensor.storage_offset())
        return _SavedView(memory, tensor.dtype, offset, tensor.shape, tensor.stride())

    def _living(self) -> list[tuple[torch.Tensor, _SavedView]]:
        found = ((reference(), view) for reference, view in self._held)
        return [(tensor, view) for tensor, view in found if tensor is not None]


def _unpack(packed: Any) -> torch.Tensor:
    tensor: torch.Tensor = packed.tensor() if isinstance(packed, _SavedView) else packed
    return tensor


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
