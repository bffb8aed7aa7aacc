"""Reading ahead by processes: torch's DataLoader, for data sets that are code of the user's.

Each process starts anew (`spawn`), since one that is forked off from many threads may lock up. It
loads torch and the user's module, which takes seconds and some hundred megabytes.
"""

import os
import signal
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import parent_process, resource_tracker
from multiprocessing.context import SpawnContext, SpawnProcess
from multiprocessing.popen_spawn_posix import Popen
from multiprocessing.process import BaseProcess
from pickle import PicklingError
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from gpipe_hpc.comm.watchdog.saying import keep_streams
from gpipe_hpc.comm.watchdog.tracebacks import users_traceback
from gpipe_hpc.data.reading import BatchReader, Reading, ReadRequest
from gpipe_hpc.device.cores.given import go_everywhere
from gpipe_hpc.errors import DataError, GpipeError
from gpipe_hpc.trainer.signals import STOP_SIGNALS


class _Failed(NamedTuple):
    """What went wrong in a process that reads, told as text: its traceback stays behind."""

    text: str


class _Readings(Dataset[Any]):
    """What the loader takes for a data set: a request is an index, a reading its item."""

    def __init__(self, reader: BatchReader) -> None:
        self.reader = reader

    def __getitem__(self, request: ReadRequest) -> Reading | _Failed:
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
    requests: Iterable[ReadRequest]
    num_workers: int
    prefetch: int = 2
    timeout_s: float = 600.0
    _left: Iterator[Reading | _Failed] | None = field(default=None, init=False, repr=False)

    def __iter__(self) -> Iterator[Reading]:
        return self

    def __next__(self) -> Reading:
        try:
            if self._left is None:
                with _signals_wait(), warnings.catch_warnings():
                    # Of what cannot be pickled: the error below says so.
                    warnings.filterwarnings("ignore", "Got pickle error")
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
            multiprocessing_context=_Spawning(),
            generator=torch.Generator(),  # it draws a seed: not from the generator of the run
        )


def _as_it_is(reading: Any) -> Any:
    return reading


@contextmanager
def _signals_wait() -> Iterator[None]:
    """Return a block in which the signals that stop a run wait: none is lost.

    Processes that start in it are born so, and a signal to the whole job does not end them before
    they can say for themselves that they outlive it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        # Where it starts Python's process that tracks resources, it lets some of them through.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Handle(Popen):
    """How the run holds a process that reads: one that ignores SIGTERM has to be killed."""

    def terminate(self) -> None:
        self.kill()


class _Process(SpawnProcess):
    @staticmethod
    def _Popen(process_obj: BaseProcess) -> Popen:
        return _Handle(process_obj)


class _Spawning(SpawnContext):
    """Starts processes anew, as `spawn` does, and kills them where it should terminate them."""

    Process = _Process


def _stay(number: int) -> None:
    """Let this process outlive the signals by which a cluster asks the run to stop, not the run.

    The run needs it for the step that it finishes first, and ends it then. Nor does it end because
    nobody reads what a data set prints.
    """
    keep_streams()
    go_everywhere()
    for each in STOP_SIGNALS:
        signal.signal(each, signal.SIG_IGN)  # what waited since the start is dropped
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    threading.Thread(target=_leave_with_run, name="leaves-with-run", daemon=True).start()


def _leave_with_run() -> None:
    """End this process with the one that started it, also in the midst of a long read.

    torch looks only between reads, and not for a run that ended before this process was ready.
    """
    run = parent_process()
    assert run is not None, "a process that reads was not started by a run"
    run.join()
    os._exit(1)
