"""A device simulated on CPU tensors: work runs immediately, but is tracked as asynchronous.

It replaces `gpipe_hpc.device.device.Accelerator`. Not simulated: other algorithms of device
kernels, and slow work.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Final

import torch
from torch import Generator, Tensor, nn

from gpipe_hpc.device.device import HostDevice
from tests.simulated.clocks import Clock, Host, learn
from tests.simulated.engine import EngineThread
from tests.simulated.errors import LateError, ThreadError
from tests.simulated.interpose import PLAYED, kind_of, local, playing
from tests.simulated.locations import Where, where
from tests.simulated.operators import SimulationMode
from tests.simulated.storages import Kind
from tests.simulated.streams import SimulatedEvent, SimulatedStream
from tests.simulated.tracker import Access, HostWait, Tracker

Site = tuple[str, Where]
"""A method of a stream, a mark or the device, and the line that calls it."""


class _Current(threading.local):
    now: SimulatedStream | None = None
    waits_for: int | None = None  # the thread that waits for what this one does
    is_in_use: bool = False  # this thread has made the device its own


class SimulatedDevice:
    """The simulated device of one rank; `ignores` names calls that have no effect."""

    torch: Final = PLAYED
    type: Final = "cpu"
    is_accelerator: Final = True
    name: Final = "played"
    backend: Final = "gloo"
    identity: Final = "played"
    is_slice: Final = False
    numa_node: Final = None
    library_bytes: Final = 0

    def __init__(self, tracker: Tracker, ignores: frozenset[Site] = frozenset()) -> None:
        self.tracker = tracker
        self.host = Host()
        self.host_waits: list[HostWait] = []
        self.sites: set[Site] = set()
        self._ignores = ignores
        self._num_ticks = 0
        self._refusal: Exception | None = None
        self._default = SimulatedStream(self)
        self._streams = _Current()
        self._all = [self._default]
        self.engine = EngineThread()
        # As a device has, though on the CPU nothing draws from it.
        self._generator = torch.Generator()

    # What the package asks for.

    def holds(self, tensor: Tensor) -> bool:
        return kind_of(tensor) is Kind.DEVICE

    def is_astray(self, tensor: Tensor) -> bool:
        return kind_of(tensor) is Kind.ELSEWHERE

    def to_device(self, tensor: Tensor, *, non_blocking: bool = False) -> Tensor:
        return tensor.to(self.torch, non_blocking=non_blocking)

    def copy_to_device(self, own: Tensor, host: Tensor) -> None:
        own.copy_(host, non_blocking=True)

    def to_host(self, tensor: Tensor) -> Tensor:
        return tensor.to("cpu")

    def copy_to_host(self, pinned: Tensor, tensor: Tensor) -> None:
        pinned.copy_(tensor, non_blocking=True)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        self._refuse_unused("pinned")
        tensor = torch.empty(shape, dtype=dtype, device="cpu")
        self.tracker.mark(tensor, Kind.PINNED)
        return tensor

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.torch)

    def place(self, module: nn.Module) -> nn.Module:
        return module.to(self.torch)

    def stream(self) -> SimulatedStream:
        self._refuse_unused("stream")
        stream = SimulatedStream(self)
        self._all.append(stream)
        return stream

    def current_stream(self) -> SimulatedStream:
        self._refuse_unused("current_stream")
        return self._streams.now or self._default

    @contextmanager
    def on(self, stream: SimulatedStream) -> Iterator[None]:
        before, self._streams.now = self._streams.now, stream
        try:
            with self.playing():
                yield
        finally:
            self._streams.now = before

    def event(self, *, timing: bool = False) -> SimulatedEvent:
        return SimulatedEvent(self, timing=timing)

    def keep_for_stream(self, tensor: Tensor, stream: SimulatedStream) -> None:
        memory = self.tracker.memory_of(tensor)
        if memory is None or memory.kind is not Kind.DEVICE:
            self.tracker.misplaced(
                "keep_for_stream", "expected a tensor of the device, got one of the host"
            )
        elif self.does("keep_for_stream"):
            memory.lent[stream.line.number] = stream.line

    def synchronize(self) -> None:
        if self.does("synchronize"):
            everything: Clock = {}
            for stream in self._all:
                stream.line.hear()
                learn(everything, stream.line.clock)
            self.waits("synchronize", everything)
            refusal, self._refusal = self._refusal, None
            if refusal is not None:
                raise refusal

    def use(self) -> None:
        if self.does("use"):
            self._streams.is_in_use = True

    def deterministic(self) -> AbstractContextManager[None]:
        return HostDevice().deterministic()

    def generators(self) -> list[Generator]:
        return [torch.default_generator, self._generator]

    def memory_allocated(self) -> int:
        with self.tracker.lock:
            self.tracker.hear_of_deaths()
        return self.tracker.allocated

    def memory_peak(self) -> int:
        return self.tracker.peak

    def memory_reserved(self) -> int:
        return self.tracker.peak

    def memory_total(self) -> int | None:
        return 2**40

    def memory_free(self) -> int | None:
        return 2**40 - self.memory_allocated()

    def trim(self) -> None:
        pass

    def reset_peak(self) -> None:
        self.tracker.peak = self.tracker.allocated

    def out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, torch.OutOfMemoryError)

    # What the tracker and the tests ask for.

    def does(self, method: str) -> bool:
        """Record a call; return whether it is to have an effect."""
        if method != "use":
            self._refuse_unused(method)
        site = method, where()
        self.sites.add(site)
        return site not in self._ignores

    def waits(self, operator: str, clock: Clock) -> None:
        """Make the host wait for the works of a clock; record the wait if it is needed."""
        if self.host.own.knows(clock):
            return
        self.host.learn(clock)
        thread = self._streams.waits_for or threading.get_ident()
        self.host_waits.append(HostWait(operator, where(), thread))

    @contextmanager
    def waiting_for(self, thread: int) -> Iterator[None]:
        """Context in which another thread waits for this one."""
        before, self._streams.waits_for = self._streams.waits_for, thread
        try:
            yield
        finally:
            self._streams.waits_for = before

    def refuse_later(self, refusal: Exception) -> None:
        """Fail the last work of the device once the host waits for all of it."""
        self._refusal = refusal

    def reads(self, operator: str, tensor: Tensor) -> None:
        """Let the host read a device tensor; failures of other work must not be reported here."""
        if self._refusal is not None:
            self.tracker.found(LateError(f"{operator} at {where()}: {self._refusal}"))
        line = self.current_stream().line
        self.tracker.work(line, operator, [Access(tensor, False)])
        self.waits(operator, line.clock)

    def host_uses(self, operator: str, tensor: Tensor, *, is_write: bool) -> None:
        """Record that the host uses one of its own tensors, which may be pinned."""
        self.tracker.host_uses(self.host.clock, operator, tensor, is_write=is_write)

    def tick(self) -> int:
        self._num_ticks += 1
        return self._num_ticks

    def _refuse_unused(self, what: str) -> None:
        if not self._streams.is_in_use:
            thread = threading.current_thread().name
            self.tracker.found(
                ThreadError(
                    f"{what} at {where()}: expected the thread {thread!r} to have called use(), "
                    f"got one that is on the first device of its kind; let it begin with that"
                )
            )

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Context in which the device is current for the calling thread, as with `use`."""
        before, self._streams.is_in_use = self._streams.is_in_use, True
        try:
            yield
        finally:
            self._streams.is_in_use = before

    @contextmanager
    def playing(self) -> Iterator[None]:
        """Context in which the calling thread simulates this device."""
        if playing.device is self:
            yield
            return
        before, playing.device = playing.device, self
        try:
            with SimulationMode(self, local):
                yield
        finally:
            playing.device = before
