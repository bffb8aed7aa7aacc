"""Reading batches one after the other: by the thread that trains when it asks, or ahead by others.

Threads, since what takes time releases the interpreter: files, decoding, scaling, arithmetic on
arrays. An index of millions of samples is shared, nothing travels between processes, and there is
no process to start, to signal or to leave behind. (Forking one that already computes on several
threads can lock up the child for good.)
"""

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Final, NamedTuple

import torch
from torch import Tensor

from gpipe_hpc.data.corruption import beyond
from gpipe_hpc.data.dataset import CorruptSampleError, Dataset, read_both
from gpipe_hpc.device.cores.given import go_everywhere
from gpipe_hpc.errors import DataError
from gpipe_hpc.pytree import Nest

_CLOSING_S: Final = 5.0


class ReadRequest(NamedTuple):
    """Samples to read, as they are in an epoch."""

    indices: list[int]
    epoch: int


class Reading(NamedTuple):
    """What was read: `used` are the samples themselves, `corrupt` those that could not be."""

    inputs: Nest
    targets: Nest
    used: list[int]
    corrupt: Mapping[str, str]


@dataclass(frozen=True)
class BatchReader:
    """Reads inputs, targets or both, and finds something for samples that are corrupt.

    Where it bears corrupt samples (`tolerance` > 0), the next one by number that can be decoded
    takes the place of each: a rule of the data alone, the same wherever it is applied.
    """

    dataset: Dataset
    inputs: bool
    targets: bool
    tolerance: int = 0

    def read(self, request: ReadRequest) -> Reading:
        """Return the samples of a request; raise DataError where one cannot be had."""
        used, corrupt = list(request.indices), dict[str, str]()
        inputs = targets = None
        if self.inputs and self.targets and not self.tolerance:
            inputs, targets = read_both(self.dataset, used, request.epoch)
            return Reading(inputs, targets, used, corrupt)
        if self.inputs and not (self.tolerance and used):
            inputs = self.dataset.read_inputs(used, request.epoch)
        elif self.inputs:
            parts = [self._read_one(index, request.epoch) for index in used]
            inputs = torch.cat([part.tensor for part in parts])
            used = [part.index for part in parts]
            corrupt = {name: text for part in parts for name, text in part.corrupt.items()}
        if self.targets:
            targets = self.dataset.read_targets(used, request.epoch)
        return Reading(inputs, targets, used, corrupt)

    def _read_one(self, index: int, epoch: int) -> "_Sample":
        corrupt: dict[str, str] = {}
        while True:
            try:
                tensor = self.dataset.read_inputs([index], epoch)
            except CorruptSampleError as error:
                corrupt[error.sample] = str(error)
                if len(corrupt) > min(self.tolerance, self.dataset.num_samples - 1):
                    raise DataError(beyond(self.tolerance, str(error))) from error
                index = (index + 1) % self.dataset.num_samples
            else:
                return _Sample(tensor, index, corrupt)


@dataclass(frozen=True)
class _Sample:
    tensor: Tensor
    index: int
    corrupt: Mapping[str, str]


class Task(NamedTuple):
    """A request on its way, and where its reading will be."""

    request: ReadRequest
    reading: "Future[Reading]"


@dataclass
class Readers:
    """The readings of requests, in their order; `num_workers` threads read ahead, or none.

    They keep up to `prefetch` batches each in work or ready. Raises DataError where one is not
    there within `timeout_s` seconds. `close` ends them all.
    """

    reader: BatchReader
    requests: Iterable[ReadRequest]
    num_workers: int = 0
    prefetch: int = 2
    timeout_s: float = 600.0
    _left: Iterator[ReadRequest] = field(init=False, repr=False)
    _ahead: "deque[Future[Reading]]" = field(default_factory=deque, init=False, repr=False)
    _tasks: "SimpleQueue[Task | None]" = field(default_factory=SimpleQueue, init=False, repr=False)
    _threads: list[threading.Thread] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        self._left = iter(self.requests)

    def __iter__(self) -> Iterator[Reading]:
        return self

    def __next__(self) -> Reading:
        if not self.num_workers:
            return self.reader.read(next(self._left))
        self._read_ahead()
        if not self._ahead:
            raise StopIteration
        if not self._threads:
            self._start()
        reading = self._ahead.popleft()
        try:
            return reading.result(self.timeout_s)
        except TimeoutError as error:
            raise DataError(
                f"data: reading ahead takes too long, expected a batch within comm.timeout_s="
                f"{self.timeout_s:g} s, got none; look at the file system"
            ) from error

    def close(self) -> None:
        """End the threads that read ahead; what they had read is dropped."""
        self._left = iter(())
        while self._ahead:
            self._ahead.pop().cancel()
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            # Not forever: one that waits for a file system must not hold up the rest.
            thread.join(_CLOSING_S)
        self._threads.clear()

    def _start(self) -> None:
        for number in range(self.num_workers):
            thread = threading.Thread(target=self._work, name=f"reader{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _read_ahead(self) -> None:
        while len(self._ahead) < self.num_workers * self.prefetch:
            request = next(self._left, None)
            if request is None:
                return
            reading: Future[Reading] = Future()
            self._ahead.append(reading)
            self._tasks.put(Task(request, reading))

    def _work(self) -> None:
        go_everywhere()
        while (task := self._tasks.get()) is not None:
            if not task.reading.set_running_or_notify_cancel():
                continue
            try:
                task.reading.set_result(self.reader.read(task.request))
            except BaseException as error:
                task.reading.set_exception(error)
