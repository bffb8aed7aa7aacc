"""Detection of accesses that no wait orders, and count of the host's waits for the device."""

import threading
import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from tests.simulated.clocks import Clock, Line
from tests.simulated.errors import PinnedError, PlaceError, RaceError, ReuseError, SimulationError
from tests.simulated.locations import Where, where
from tests.simulated.storages import Freed, Kind, Memory, Span, Use, parts_of, span_of, storage_of


class Access(NamedTuple):
    """A tensor that an operator reads or writes."""

    tensor: Tensor
    is_write: bool


@dataclass
class Tracker:
    """State shared by all ranks of a simulated world: memory and detected faults.

    A fault is raised where it is detected and also stored, so that a caught exception still counts.
    """

    faults: list[SimulationError] = field(default_factory=list)
    num_works: int = 0
    allocated: int = 0
    peak: int = 0

    def __post_init__(self) -> None:
        self.lock = threading.RLock()
        self._num_lines = 0
        # Storages die in any thread, amid anything: what that means is found out later.
        self._dead: deque[Memory] = deque()
        self._suspects: dict[int, list[Freed]] = {}

    def next_line(self) -> int:
        with self.lock:
            self._num_lines += 1
            return self._num_lines

    def memory_of(self, tensor: Tensor) -> Memory | None:
        """Return the state of a tensor's memory, or None for plain host memory."""
        storage = storage_of(tensor)
        return None if storage is None else storage.__dict__.get("played")

    def kind_of(self, tensor: Tensor) -> Kind:
        for part in parts_of(tensor):
            memory = self.memory_of(part)
            if memory is not None:
                return memory.kind
        return Kind.HOST

    def mark(
        self, tensor: Tensor, kind: Kind, line: Line | None = None, operator: str = ""
    ) -> None:
        """Register a new tensor's memory; device memory counts as written on its stream."""
        for part in parts_of(tensor):
            storage = storage_of(part)
            if storage is None or kind is Kind.HOST:
                continue
            memory = Memory(kind, storage.nbytes(), line)
            storage.played = memory
            if kind is Kind.DEVICE:
                assert line is not None
                self._allocate(memory, storage, line, operator)

    def adopt(self, tensor: Tensor, line: Line, operator: str) -> None:
        """Register memory that torch allocated without a known location as device memory."""
        for part in parts_of(tensor):
            memory = self.memory_of(part)
            if memory is not None and memory.kind in (Kind.UNKNOWN, Kind.DATA):
                memory.kind, memory.owner = Kind.DEVICE, line
                self._allocate(memory, storage_of(part), line, operator)

    def _allocate(self, memory: Memory, storage: Any, line: Line, operator: str) -> None:
        with self.lock:
            self.hear_of_deaths()
            line.hear()
            use = Use(line.number, line.time, Span(0, memory.size), True, operator, where())
            for freed in self._suspects.pop(line.number, ()) if memory.size else ():
                for old in freed.uses:
                    if not line.knows(old.line, old.time):
                        self.found(
                            ReuseError(
                                f"memory: expected it to be kept while it is used, got it back at "
                                f"{freed.where} and {operator} at {use.where} may be given it on "
                                f"stream {line.number}, while {old}; lend it to that stream"
                            )
                        )
            memory.born = use
            memory.uses[line.number, use.span, True] = use
            self.allocated += memory.size
            self.peak = max(self.peak, self.allocated)
        weakref.finalize(storage, self._dead.append, memory).atexit = False

    def hear_of_deaths(self) -> None:
        """Release memory of tensors that no longer exist."""
        while self._dead:
            memory = self._dead.popleft()
            owner = memory.owner
            assert owner is not None, "the device's memory has an owner"
            self.allocated -= memory.size
            owner.hear()
            outstanding = [
                use
                for use in memory.uses.values()
                if use.line != owner.number
                and use.line not in memory.lent
                and not any(
                    line.knows(use.line, use.time) for line in (owner, *memory.lent.values())
                )
            ]
            if outstanding:
                freed = Freed(outstanding, where())
                self._suspects.setdefault(owner.number, []).append(freed)

    def work(self, line: Line, operator: str, accesses: Iterable[Access]) -> int:
        """Run a work on a stream; raise if it conflicts with work not known to be complete."""
        with self.lock:
            self.hear_of_deaths()
            time = line.launch()
            self.num_works += 1
            place = where()
            for tensor, is_write in accesses:
                for part in parts_of(tensor):
                    memory = self.memory_of(part)
                    if memory is None or memory.kind not in (Kind.DEVICE, Kind.PINNED):
                        continue
                    use = Use(line.number, time, span_of(part), is_write, operator, place)
                    # Pinned memory goes from thread to thread: what one has waited for, is over.
                    host = line.host.clock if memory.kind is Kind.PINNED else {}
                    for old in memory.conflicts(use):
                        is_over = host.get(old.line, 0) >= old.time
                        if not is_over and not line.knows(old.line, old.time):
                            self.found(
                                RaceError(
                                    f"{operator} at {place}: expected a wait for what {old}, got "
                                    f"none on stream {line.number}, which "
                                    f"{'writes' if is_write else 'reads'} it; let the stream wait "
                                    f"for an event behind that"
                                )
                            )
                    memory.note(use)
            return time

    def host_uses(self, clock: Clock, operator: str, tensor: Tensor, *, is_write: bool) -> None:
        """Raise if the host uses pinned memory while a copy from or to it is running."""
        memory = self.memory_of(tensor)
        if memory is None or memory.kind is not Kind.PINNED:
            return
        with self.lock:
            place = where()
            use = Use(0, 0, span_of(tensor), is_write, operator, place)
            for old in memory.conflicts(use):
                if clock.get(old.line, 0) < old.time:
                    self.found(
                        PinnedError(
                            f"{operator} at {place}: expected the host to wait for what {old}, "
                            f"got none before the host {'writes' if is_write else 'reads'} that "
                            f"pinned memory; wait for an event behind the copy"
                        )
                    )

    def found(self, fault: SimulationError) -> None:
        self.faults.append(fault)
        raise fault

    def misplaced(self, operator: str, what: str) -> None:
        """Raise for a tensor that is not where the operator needs it."""
        self.found(PlaceError(f"{operator} at {where()}: {what}"))


class HostWait(NamedTuple):
    """A point at which the host waited for the device or read a device value."""

    operator: str
    where: Where
    thread: int

    def __str__(self) -> str:
        return f"{self.operator} at {self.where}"
