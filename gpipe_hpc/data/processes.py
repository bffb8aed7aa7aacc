"""Batches of user data sets, read ahead in worker processes by torch's DataLoader.

Processes are spawned, since forking a multi-threaded process may deadlock. Each imports torch and
the user's module, which takes seconds and some hundred megabytes.
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

from gpipe_hpc.comm.watchdog.output_streams import protect_streams
from gpipe_hpc.comm.watchdog.tracebacks import users_traceback
from gpipe_hpc.data.reading import BatchData, BatchReader, ReadRequest
from gpipe_hpc.device.cores.inherited import use_inherited_cpus
from gpipe_hpc.errors import DataError, GpipeError
from gpipe_hpc.trainer.signals import STOP_SIGNALS


class _WorkerError(NamedTuple):
    """An error raised in a worker process, as text with the traceback of the user's code."""

    text: str


class _Readings(Dataset[Any]):
    """A torch Dataset whose indices are read requests and whose items are the batches read."""

    def __init__(self, reader: BatchReader) -> None:
        self.reader = reader

    def __getitem__(self, request: ReadRequest) -> BatchData | _WorkerError:
        try:
            return self.reader.read(request)
        except GpipeError as error:
            return _WorkerError(f"{error}\n{users_traceback(error)}".rstrip())


@dataclass
class ProcessReaders:
    """Iterator over the batches of requests, in order, read ahead by worker processes.

    Args:
        reader: reads a batch.
        requests: the batches to read, in order.
        num_workers: number of processes.
        prefetch: number of batches per process to read ahead.
        timeout_s: maximum seconds to wait for a batch.

    Raises:
        DataError: if a batch does not arrive in time, or if a process has died.
    """

    reader: BatchReader
    requests: Iterable[ReadRequest]
    num_workers: int
    prefetch: int = 2
    timeout_s: float = 600.0
    _left: Iterator[BatchData | _WorkerError] | None = field(default=None, init=False, repr=False)

    def __iter__(self) -> Iterator[BatchData]:
        return self

    def __next__(self) -> BatchData:
        try:
            if self._left is None:
                with _blocked_stop_signals(), warnings.catch_warnings():
                    # The error below reports what cannot be pickled.
                    warnings.filterwarnings("ignore", "Got pickle error")
                    self._left = iter(self._loader())
            found = next(self._left)
        except (PicklingError, AttributeError, TypeError) as error:
            raise DataError(
                f"data: the data set cannot be pickled for worker processes: {error}; "
                f"define it at the top level of a module, or set data.workers=0"
            ) from error
        except RuntimeError as error:
            raise DataError(
                f"data: worker processes delivered no batch (time limit comm.timeout_s="
                f"{self.timeout_s:g} s): {error}; check the data set, or set data.workers=0"
            ) from error
        if isinstance(found, _WorkerError):
            raise DataError(found.text)
        return found

    def close(self) -> None:
        """Stop the worker processes and discard batches read ahead."""
        self._left = None

    def _loader(self) -> DataLoader[Any]:
        return DataLoader(
            _Readings(self.reader),
            batch_size=None,
            sampler=self.requests,
            num_workers=self.num_workers,
            collate_fn=_identity,
            prefetch_factor=self.prefetch,
            timeout=self.timeout_s,
            worker_init_fn=_init_worker,
            multiprocessing_context=_KillingSpawnContext(),
            generator=torch.Generator(),  # DataLoader draws a seed: keep torch's default generator
        )


def _identity(reading: Any) -> Any:
    return reading


@contextmanager
def _blocked_stop_signals() -> Iterator[None]:
    """Block the signals that stop a run while workers start.

    Workers inherit the signal mask, so a signal to the whole job cannot end them before they have
    set their own handlers.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        # Starting Python's resource tracker unblocks some signals.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _KillingPopen(Popen):
    """Process handle that kills instead of terminating, as workers ignore SIGTERM."""

    def terminate(self) -> None:
        self.kill()


class _KillableProcess(SpawnProcess):
    @staticmethod
    def _Popen(process_obj: BaseProcess) -> Popen:
        return _KillingPopen(process_obj)


class _KillingSpawnContext(SpawnContext):
    """Multiprocessing context that spawns processes and kills them instead of terminating."""

    Process = _KillableProcess


def _init_worker(number: int) -> None:
    """Initialize a worker: ignore signals that stop the run, and exit with the run.

    After a signal, the run finishes its current step, which needs the worker, and then stops the
    worker. Standard output is protected, since the data set may print after the run has closed it.
    """
    protect_streams()
    use_inherited_cpus()
    for each in STOP_SIGNALS:
        signal.signal(each, signal.SIG_IGN)  # also discards signals pending since the start
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    threading.Thread(target=_leave_with_run, name="leaves-with-run", daemon=True).start()


def _leave_with_run() -> None:
    """Exit this worker process when the run ends, even during a long read.

    DataLoader checks for the end only between reads, and misses a run that ended before the worker
    was ready.
    """
    run = parent_process()
    assert run is not None, "a worker process has a parent"
    run.join()
    os._exit(1)
