"""Output of a command's messages to standard streams that all ranks of a run share.

A stream can be lost: its reader has ended (``... | head``), its disk is full, or the shell has
closed it (``>&-``). With `protect_streams` a command continues without the stream.
"""

import contextlib
import errno
import io
import os
import select
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

_NAMES: Final = ("stdin", "stdout", "stderr")
_WORDS: Final = ("standard input", "standard output", "standard error")
_INPUT: Final = 0
_OUTPUT: Final = 1
_TELLING_S: Final = 2.0


def print_line(text: str) -> None:
    """Write a line to stderr in a single call, so that lines of different ranks are not mixed.

    `print` writes the line end separately if the text has several lines or Python does not buffer;
    launchers that collect the output of all ranks then join two lines. Text that cannot be written
    is dropped.
    """
    stream, piece = sys.stderr, f"{text}\n"
    if stream is None:
        return
    with contextlib.suppress(OSError, ValueError):
        stream.flush()
        is_collected = stream is not sys.__stderr__  # or a progress bar wraps it
        if is_collected:
            stream.write(piece)
            stream.flush()
            return
        left = piece.encode(stream.encoding, "backslashreplace")
        while left:
            left = left[os.write(stream.fileno(), left) :]


class _Streams:
    """The standard streams of this process, those that are lost, and callbacks for losses."""

    def __init__(self) -> None:
        self._kept: list[Any] = []
        self._tellers: list[Callable[[str], object]] = []
        self._threads: list[threading.Thread] = []
        self.lost: dict[int, OSError] = {}  # by descriptor

    def keep(self, descriptor: int) -> None:
        """Open a descriptor if it is closed; let its stream continue after a failed write."""
        try:
            os.fstat(descriptor)
        except OSError as error:
            self.lose(descriptor, error)
        name = _NAMES[descriptor]
        stream = getattr(sys, name)
        is_own = stream is None or stream is getattr(sys, f"__{name}__")
        if descriptor != _INPUT and is_own and stream not in self._kept:
            self._kept.append(_resilient_stream(stream, descriptor))
            setattr(sys, name, self._kept[-1])
            setattr(sys, f"__{name}__", self._kept[-1])

    def lose(self, descriptor: int, error: OSError) -> None:
        """Record that a stream is lost, and open /dev/null in its place."""
        null = os.open(os.devnull, os.O_RDWR)
        if null == descriptor:
            os.set_inheritable(null, True)
        else:
            os.dup2(null, descriptor)
            os.close(null)
        if descriptor == _INPUT:
            return
        self.lost[descriptor] = error
        for tell in self._tellers:
            # On another thread: this one may hold the lock of the stream or of a log.
            thread = threading.Thread(target=tell, args=(_told(descriptor, error),), daemon=True)
            with contextlib.suppress(RuntimeError):  # the interpreter is shutting down
                thread.start()
                self._threads.append(thread)

    @contextlib.contextmanager
    def reporting_lost(self, tell: Callable[[str], object]) -> Iterator[None]:
        """Call `tell` with a line about each stream that is lost already or during this context."""
        for descriptor, error in self.lost.items():
            tell(_told(descriptor, error))
        self._tellers.append(tell)
        try:
            yield
        finally:
            while self._threads:
                self._threads.pop().join(_TELLING_S)
            self._tellers.remove(tell)


_STREAMS: Final = _Streams()


def protect_streams() -> None:
    """Let this process continue if a standard stream is closed or cannot be written.

    Later output to that stream is dropped. Call it before any file is opened: a file would get the
    descriptor of a closed stream, and what is printed would be written into that file.
    """
    for descriptor in range(len(_NAMES)):
        _STREAMS.keep(descriptor)


def reporting_lost_streams(
    tell: Callable[[str], object],
) -> contextlib.AbstractContextManager[None]:
    """Return a context that calls `tell` with a line about each stream lost before or within it."""
    return _STREAMS.reporting_lost(tell)


def output_exit_code(code: int) -> int:
    """Return the exit code of a command whose purpose is its output: 1 if the output was lost."""
    if sys.stdout is not None:
        sys.stdout.flush()
    error = _STREAMS.lost.get(_OUTPUT)
    if error is None or error.errno in (errno.EPIPE, errno.EBADF):
        return code
    print_line(f"gpipe_hpc: cannot write to {_WORDS[_OUTPUT]}: {error}; check its disk")
    return code or 1


class _ResilientFile(io.FileIO):
    """File object of a standard stream that ignores further writes after one has failed."""

    def write(self, data: Any) -> int:
        try:
            while (written := super().write(data)) is None:
                select.select([], [self], [])  # another process has made it non-blocking
        except OSError as error:
            _STREAMS.lose(self.fileno(), error)
            return len(data)
        return written


def _resilient_stream(stream: Any, descriptor: int) -> Any:
    """Return a text stream like `stream` that ignores writes after one has failed."""
    raw: Any = _ResilientFile(descriptor, "w", closefd=False)
    if stream is None:
        return io.TextIOWrapper(io.BufferedWriter(raw), "utf-8", "backslashreplace")
    with contextlib.suppress(OSError):
        stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(raw) if isinstance(stream.buffer, io.BufferedIOBase) else raw,
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _told(descriptor: int, error: OSError) -> str:
    how = "is closed" if error.errno == errno.EBADF else f"cannot be written ({error.strerror})"
    return f"{_WORDS[descriptor]} {how}"
