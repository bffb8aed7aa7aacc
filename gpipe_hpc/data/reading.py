"""Reading of batches in the training thread, or ahead of training in worker threads.

Threads suffice because file access, decoding, resizing and NumPy operations release the GIL. They
share an index of millions of samples, need no communication between processes, and leave no
processes behind. (Forking a multi-threaded process can deadlock the child.)
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
from gpipe_hpc.device.cores.inherited import use_inherited_cpus
from gpipe_hpc.errors import DataError
from gpipe_hpc.pytree import Nest

_CLOSING_S: Final = 5.0


class ReadRequest(NamedTuple):
    """The samples of a batch, by index, and their epoch."""

    indices: list[int]
    epoch: int


class BatchData(NamedTuple):
    """A batch: tensors, the sample indices actually used, and errors of corrupt samples by name."""

    inputs: Nest
    targets: Nest
    used: list[int]
    corrupt: Mapping[str, str]


@dataclass(frozen=True)
class BatchReader:
    """Reader of inputs, targets or both, that replaces corrupt samples.

    If `tolerance` > 0, a corrupt sample is replaced by the next one, by index, that can be decoded.
    The replacement depends on the data alone, so all ranks choose the same.
    """

    dataset: Dataset
    inputs: bool
    targets: bool
    tolerance: int = 0

    def read(self, request: ReadRequest) -> BatchData:
        """Read the samples of a request; raise DataError if one cannot be read or replaced."""
        used, corrupt = list(request.indices), dict[str, str]()
        inputs = targets = None
        if self.inputs and self.targets and not self.tolerance:
            inputs, targets = read_both(self.dataset, used, request.epoch)
            return BatchData(inputs, targets, used, corrupt)
        if self.inputs and not (self.tolerance and used):
            inputs = self.dataset.read_inputs(used, request.epoch)
        elif self.inputs:
            parts = [self._read_one(index, request.epoch) for index in used]
            inputs = torch.cat([part.tensor for part in parts])
            used = [part.index for part in parts]
            corrupt = {name: text for part in parts for name, text in part.corrupt.items()}
        if self.targets:
            targets = self.dataset.read_targets(used, request.epoch)
        return BatchData(inputs, targets, used, corrupt)

    def _read_one(self, index: int, epoch: int) -> "_SampleData":
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
                return _SampleData(tensor, index, corrupt)


@dataclass(frozen=True)
class _SampleData:
    tensor: Tensor
    index: int
    corrupt: Mapping[str, str]


class PendingBatch(NamedTuple):
    """A pending read request, and the future of its batch."""

    request: ReadRequest
    reading: "Future[BatchData]"


@dataclass
class Readers:
    """Iterator over the batches of requests, in order, optionally read ahead by worker threads.

    Args:
        reader: reads a batch.
        requests: the batches to read, in order.
        num_workers: number of threads; 0 reads in the calling thread.
        prefetch: number of batches per thread to read ahead.
        timeout_s: maximum seconds to wait for a batch; then DataError is raised.
    """

    reader: BatchReader
    requests: Iterable[ReadRequest]
    num_workers: int = 0
    prefetch: int = 2
    timeout_s: float = 600.0
    _left: Iterator[ReadRequest] = field(init=False, repr=False)
    _ahead: "deque[Future[BatchData]]" = field(default_factory=deque, init=False, repr=False)
    _tasks: "SimpleQueue[PendingBatch | None]" = field(
        default_factory=SimpleQueue, init=False, repr=False
    )
    _threads: list[threading.Thread] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        self._left = iter(self.requests)

    def __iter__(self) -> Iterator[BatchData]:
        return self

    def __next__(self) -> BatchData:
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
                f"data: no batch was read within comm.timeout_s={self.timeout_s:g} s; "
                f"check the file system"
            ) from error

    def close(self) -> None:
        """Stop the worker threads and discard batches read ahead."""
        self._left = iter(())
        while self._ahead:
            self._ahead.pop().cancel()
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            # With a timeout: a thread may be blocked by a file system.
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
            reading: Future[BatchData] = Future()
            self._ahead.append(reading)
            self._tasks.put(PendingBatch(request, reading))

    def _work(self) -> None:
        use_inherited_cpus()
        while (task := self._tasks.get()) is not None:
            if not task.reading.set_running_or_notify_cancel():
                continue
            try:
                task.reading.set_result(self.reader.read(task.request))
            except BaseException as error:
                task.reading.set_exception(error)
