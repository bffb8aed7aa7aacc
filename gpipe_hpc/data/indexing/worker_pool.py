"""Indexing tasks run in parallel worker processes, or in this process if the files are small.

Workers are spawned, not forked: a fork of a multi-threaded process that has open connections to
other ranks may deadlock or keep the connections open.
"""

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import gpipe_hpc
from gpipe_hpc.data.indexing.parts import IndexPart, read_part
from gpipe_hpc.data.indexing.worker import do
from gpipe_hpc.device.cores.inherited import inherited_cpus
from gpipe_hpc.errors import DataError

log = logging.getLogger("gpipe_hpc.train")

_WORTH_PROCESSES: Final = 2**26  # bytes; less is indexed before a process has started
_MOST_PROCESSES: Final = 32
_SAY_EVERY_S: Final = 5.0


class IndexingTask(NamedTuple):
    """An indexing task: the arguments of `worker.do`, the file to read, and the number of bytes."""

    words: dict[str, Any]
    path: Path
    num_bytes: int


def in_order(tasks: Sequence[IndexingTask]) -> Iterator[IndexPart]:
    """Run tasks and yield their results in order, logging progress every few seconds.

    Raises OSError if a file cannot be read.
    """
    progress = IndexingProgress(sum(task.num_bytes for task in tasks))
    num_processes = min(_MOST_PROCESSES, len(inherited_cpus() or {0}), len(tasks))
    if progress.total_bytes < _WORTH_PROCESSES or num_processes < 2:
        for task in tasks:
            try:
                part = do(task.words)
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(task.path)) from error
            progress.add(task.num_bytes)
            yield part
        return
    pool = _WorkerPool(tasks, progress)
    try:
        pool.start(num_processes)
        for number, task in enumerate(tasks):
            part = pool.take(number)
            if "error" in part.facts:
                raise OSError(part.facts["errno"], part.facts["error"], str(task.path))
            yield part
    finally:
        pool.stop()


class IndexingProgress:
    """Progress in bytes, logged every few seconds."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self._done_bytes = 0
        self._began_s = self._said_s = time.monotonic()
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> None:
        """Add completed bytes, and log the progress if the last message is a few seconds old."""
        now_s = time.monotonic()
        with self._lock:
            self._done_bytes += num_bytes
            if now_s - self._said_s < _SAY_EVERY_S:
                return
            self._said_s = now_s
            done, per_s = self._done_bytes, self._done_bytes / (now_s - self._began_s)
        log.info(
            "indexing data: %.1f of %.1f GB, %.0f MB/s, %.0f s left",
            done / 1e9,
            self.total_bytes / 1e9,
            per_s / 1e6,
            (self.total_bytes - done) / max(1.0, per_s),
        )


class _WorkerPool:
    """Worker processes, each with a daemon thread that sends tasks and receives results."""

    def __init__(self, tasks: Sequence[IndexingTask], progress: IndexingProgress) -> None:
        self._tasks, self._progress = tasks, progress
        self._left = iter(range(len(tasks)))
        self._parts: dict[int, IndexPart | BaseException] = {}
        self._changed = threading.Condition()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._stopped = False

    def start(self, num_processes: int) -> None:
        package = Path(gpipe_hpc.__file__).parents[1]
        inherited = os.environ.get("PYTHONPATH")
        path = f"{package}{os.pathsep}{inherited}" if inherited else str(package)
        for number in range(num_processes):
            process = subprocess.Popen(
                [sys.executable, "-m", "gpipe_hpc.data.indexing.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                process_group=0,  # Ctrl-C must reach only this process, which stops the workers
                env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            )
            self._processes.append(process)
            name = f"indexing{number}"
            threading.Thread(target=self._serve, args=(process,), name=name, daemon=True).start()

    def take(self, number: int) -> IndexPart:
        """Wait for task `number` to finish; return its result or raise its error."""
        with self._changed:
            self._changed.wait_for(lambda: number in self._parts)
            part = self._parts.pop(number)
        if isinstance(part, BaseException):
            raise part
        return part

    def stop(self) -> None:
        """Kill the worker processes."""
        with self._changed:
            self._stopped = True
        for process in self._processes:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                # Closing flushes data to a process that no longer exists.
                with contextlib.suppress(OSError):
                    assert stream is not None, "both are pipes"
                    stream.close()

    def _serve(self, process: subprocess.Popen[bytes]) -> None:
        tasks, parts = process.stdin, process.stdout
        assert tasks is not None and parts is not None, "both are pipes"
        while True:
            with self._changed:
                number = None if self._stopped else next(self._left, None)
            if number is None:
                return
            task = self._tasks[number]
            found: IndexPart | BaseException
            try:
                tasks.write(json.dumps(task.words).encode() + b"\n")
                tasks.flush()
                found = read_part(parts)
            except (OSError, EOFError, ValueError) as error:
                found = DataError(
                    f"data: the process that indexes {task.path} has died "
                    f"({type(error).__name__}: {error}; exit code {process.poll()}); read its "
                    f"messages above, and check the free memory of the machine"
                )
            self._progress.add(task.num_bytes)
            with self._changed:
                self._parts[number] = found
                self._changed.notify_all()
            if isinstance(found, BaseException):
                return
