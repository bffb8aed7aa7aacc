"""What a command tells its user on the standard streams, which the ranks of a run share.

A stream may go away: its reader has ended (``... | head``), its disk is full, or the shell has
closed it (``>&-``). No run depends on that: `keep_streams` lets a command go on without it.
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

_kept: list[Any] = []  # streams that outlast what they write to
_lost: dict[int, OSError] = {}  # by descriptor
_tellers: list[Callable[[str], object]] = []
_threads: list[threading.Thread] = []


def say(text: str) -> None:
    """Write a text and the end of its line in one piece, so no other rank's comes in between.

    `print` writes the end by itself where the text has several lines, or Python does not buffer:
    launchers that collect the output of all ranks then made one line of two. A text that cannot be
    written is dropped.
    """
    stream, piece = sys.stderr, f"{text}\n"
    if stream is None:
        return
    with contextlib.suppress(OSError, ValueError):
        stream.flush()
        is_collected = stream is not sys.__stderr__  # or a bar is drawn below
        if is_collected:
            stream.write(piece)
            stream.flush()
            return
        left = piece.encode(stream.encoding, "backslashreplace")
        while left:
            left = left[os.write(stream.fileno(), left) :]


def keep_streams() -> None:
    """Let this process go on without a standard stream that is closed or takes no more.

    What is written to it after that goes nowhere. To be called before any file is opened: a closed
    stream's descriptor would be given to that file, and what is printed would be written into it.
    """
    for descriptor, name in enumerate(_NAMES):
        try:
            os.fstat(descriptor)
        except OSError as error:
            _lose(descriptor, error)
        stream = getattr(sys, name)
        is_own = stream is None or stream is getattr(sys, f"__{name}__")
        if descriptor and is_own and stream not in _kept:
            _kept.append(_outlasting(stream, descriptor))
            setattr(sys, name, _kept[-1])
            setattr(sys, f"__{name}__", _kept[-1])


@contextlib.contextmanager
def telling_lost_streams(tell: Callable[[str], object]) -> Iterator[None]:
    """Call `tell` with a line about each stream that was lost before or is lost in the block."""
    for descriptor, error in _lost.items():
        tell(_told(descriptor, error))
    _tellers.append(tell)
    try:
        yield
    finally:
        while _threads:
            _threads.pop().join(_TELLING_S)
        _tellers.remove(tell)


def code_of_output(code: int) -> int:
    """Return the exit code of a command whose purpose is what it prints: 1 if that was lost.

    A reader that has left early (``... | head``) and a closed stream are what the user wants.
    """
    if sys.stdout is not None:
        sys.stdout.flush()
    error = _lost.get(_OUTPUT)
    if error is None or error.errno in (errno.EPIPE, errno.EBADF):
        return code
    say(f"gpipe_hpc: {_WORDS[_OUTPUT]}: expected to write there, got {error}; look at its disk")
    return code or 1


class _Outlasting(io.FileIO):
    """The descriptor of a standard stream; once that takes no more, writing does nothing."""

    def write(self, data: Any) -> int:
        try:
            while (written := super().write(data)) is None:
                select.select([], [self], [])  # somebody has made it one that does not wait
        except OSError as error:
            _lose(self.fileno(), error)
            return len(data)
        return written


def _outlasting(stream: Any, descriptor: int) -> Any:
    """Return a stream like the one that writes to a descriptor."""
    raw: Any = _Outlasting(descriptor, "w", closefd=False)
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


def _lose(descriptor: int, error: OSError) -> None:
    """Take note that a stream is lost, and give its descriptor to /dev/null."""
    null = os.open(os.devnull, os.O_RDWR)
    if null == descriptor:
        os.set_inheritable(null, True)
    else:
        os.dup2(null, descriptor)
        os.close(null)
    if descriptor == _INPUT:
        return
    _lost[descriptor] = error
    for tell in _tellers:
        # By another thread: this one may be in the lock of the stream or of a log.
        thread = threading.Thread(target=tell, args=(_told(descriptor, error),), daemon=True)
        with contextlib.suppress(RuntimeError):  # Python ends
            thread.start()
            _threads.append(thread)


def _told(descriptor: int, error: OSError) -> str:
    how = "is closed" if error.errno == errno.EBADF else f"takes no more ({error.strerror})"
    return f"{_WORDS[descriptor]} {how}"
