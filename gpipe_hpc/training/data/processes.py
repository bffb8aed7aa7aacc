"""Reading ahead by processes: torch's DataLoader, for data sets that are code of the user's.

Each process starts anew (`spawn`), since one that is forked off from many threads may lock up. It
loads torch and the user's module, which takes seconds and some hundred megabytes.
"""

import os
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pickle import PicklingError
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from gpipe_hpc.comm.tracebacks import users_traceback
from gpipe_hpc.errors import DataError, GpipeError
from gpipe_hpc.training.data.reading import BatchReader, Reading, Request


class _Failed(NamedTuple):
    """What went wrong in a process that reads, told as text: its traceback stays behind."""

    text: str


class _Readings(Dataset[Any]):
    """What the loader takes for a data set: a request is an index, a reading its item."""

    def __init__(self, reader: BatchReader) -> None:
        self.reader = reader

    def __getitem__(self, request: Request) -> Reading | _Failed:
        try:
            return self.reader.read(request)
        except GpipeError as error:
            return _Failed(f"{error}\n{users_traceback(error)}".rstrip())


@dataclass
class ProcessReaders:
    """The readings of requests, in their order; `num_workers` processes read ahead.

    They keep up to `prefetch` batches each in work or ready. Raises DataError where one is not
    there within `timeout_s` seconds, or a process has died. `close` ends them all.
    """

    reader: BatchReader
    requests: Iterable[Request]
    num_workers: int
    prefetch: int = 2
    timeout_s: float = 600.0
    _left: Iterator[Reading | _Failed] | None = field(default=None, init=False, repr=False)

    def __iter__(self) -> Iterator[Reading]:
        return self

    def __next__(self) -> Reading:
        try:
            if self._left is None:
                self._left = iter(self._loader())
            found = next(self._left)
        except (PicklingError, AttributeError, TypeError) as error:
            raise DataError(
                f"data: the data set cannot be handed to processes that read ahead, expected one "
                f"that pickles, got {error}; define it at the top of a module, or set "
                f"data.workers=0"
            ) from error
        except RuntimeError as error:
            raise DataError(
                f"data: reading ahead failed, expected a batch within comm.timeout_s="
                f"{self.timeout_s:g} s, got {error}; look at the data set, or set data.workers=0"
            ) from error
        if isinstance(found, _Failed):
            raise DataError(found.text)
        return found

    def close(self) -> None:
        """End the processes; what they had read is dropped."""
        self._left = None

    def _loader(self) -> DataLoader[Any]:
        return DataLoader(
            _Readings(self.reader),
            batch_size=None,
            sampler=self.requests,
            num_workers=self.num_workers,
            collate_fn=_as_it_is,
            prefetch_factor=self.prefetch,
            timeout=self.timeout_s,
            worker_init_fn=_stay,
            multiprocessing_context="spawn",
            generator=torch.Generator(),  # it draws a seed: not from the generator of the run
        )


def _as_it_is(reading: Any) -> Any:
    return reading


def _stay(number: int) -> None:
    """Let this process outlive the signal by which a cluster asks the run to stop.

    The run needs it for the step that it finishes first, then ends it: by the second signal.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _next_one_ends)


def _next_one_ends(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
