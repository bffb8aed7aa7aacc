"""Reading batches one after the other: in this process when asked, or ahead in others.

The others are torch's DataLoader's: it hands out requests in turn, keeps their order, and its
workers end with this process, however it ends. They are forked: an index of millions of samples
is inherited, not copied, and what they do (files, Pillow, numpy) touches no device and no
process group.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as MapDataset

from gpipe_hpc.errors import DataError
from gpipe_hpc.training.data.corruption import beyond
from gpipe_hpc.training.data.dataset import CorruptSampleError, Dataset
from gpipe_hpc.training.signals import STOP_SIGNALS

T = TypeVar("T")


class Request(NamedTuple):
    """Samples to read, as they are in an epoch."""

    indices: list[int]
    epoch: int


class Reading(NamedTuple):
    """What was read: `used` are the samples themselves, `corrupt` those that could not be."""

    inputs: Tensor | None
    targets: Tensor | None
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

    def read(self, request: Request) -> Reading:
        """Return the samples of a request; raise DataError where one cannot be had."""
        used, corrupt = list(request.indices), dict[str, str]()
        inputs = targets = None
        if self.inputs and not (self.tolerance and used):
            inputs = self.dataset.read_inputs(used, request.epoch)
        elif self.inputs:
            parts = [self._read_one(index, request.epoch) for index in used]
            inputs = torch.cat([part.tensor for part in parts])
            used = [part.index for part in parts]
            corrupt = {name: text for part in parts for name, text in part.corrupt.items()}
        if self.targets:
            targets = self.dataset.read_targets(used)
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


@dataclass
class Readers:
    """The readings of requests, in their order; `num_workers` processes read ahead, or none.

    Each keeps up to `prefetch` batches ready. Raises DataError where nothing comes within
    `timeout_s` seconds, or a worker ends. `close` ends them all.
    """

    reader: BatchReader
    requests: Iterable[Request]
    num_workers: int = 0
    prefetch: int = 2
    timeout_s: float = 600.0
    _readings: Iterator[Reading | DataError] | None = field(default=None, init=False)

    def __iter__(self) -> Iterator[Reading]:
        return self

    def __next__(self) -> Reading:
        if self._readings is None:
            self._readings = self._start()
        try:
            reading = next(self._readings)
        except RuntimeError as error:
            # Raised below, without the loader's traceback, which would keep its workers alive.
            reading = self._explained(error)
        if isinstance(reading, DataError):
            raise reading
        return reading

    def close(self) -> None:
        """End the processes that read ahead; what they had read is dropped."""
        # The loader's iterator ends its workers when nobody holds it any more.
        self._readings = iter(())

    def _start(self) -> Iterator[Reading | DataError]:
        if not self.num_workers:
            return map(self.reader.read, self.requests)
        loader: DataLoader[Reading | DataError] = DataLoader(
            _Requested(self.reader),
            batch_size=None,
            sampler=self.requests,
            num_workers=self.num_workers,
            prefetch_factor=self.prefetch,
            collate_fn=_as_it_is,
            timeout=self.timeout_s,
            worker_init_fn=_prepare_worker,
            multiprocessing_context=multiprocessing.get_context("fork"),
            # Its own: the process's generator belongs to the layers.
            generator=torch.Generator(),
        )
        return iter(loader)

    def _explained(self, error: RuntimeError) -> DataError:
        return DataError(
            f"data: reading ahead failed, expected a batch within {self.timeout_s:g} s from "
            f"{self.num_workers} processes, got {type(error).__name__}: {error}; read with "
            f"data.workers=0 to see more, or give the node more memory"
        )


@dataclass(frozen=True)
class _Requested(MapDataset[Reading | DataError]):
    """What the loader takes for its data set: a request is an index."""

    reader: BatchReader

    def __getitem__(self, request: Request) -> Reading | DataError:
        try:
            return self.reader.read(request)
        except DataError as error:
            # As a value, and without what cannot travel: the loader would wrap it in a traceback.
            return DataError(str(error))


def _as_it_is(value: T) -> T:
    return value


def _prepare_worker(number: int) -> None:
    """Leave signals from elsewhere to the process that trains, and end when that one says so.

    Schedulers and terminals signal every process of a job, while the trainer finishes its step,
    for which it needs its readers.
    """
    trainer = os.getppid()

    def await_end() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != trainer:
            pass
        os._exit(0)

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, *STOP_SIGNALS})
    threading.Thread(target=await_end, name="await-end", daemon=True).start()
