"""Shared memory in which a rank publishes its current activity for its watcher process.

Messages sent once a second would be out of date when the rank dies, and would stop during a call
that does not release the GIL. The shared memory always contains the last action.
"""

import contextlib
import mmap
import os
import struct
import tempfile
import threading
from typing import Final, NamedTuple

# Number of actions, bytes of both texts, whether all ranks do the phase together.
_HEADER: Final = struct.Struct("=qHH?")
_PHASE: Final = 16
_MAX_TEXT: Final = 240
_ACTION: Final = _PHASE + _MAX_TEXT
_SIZE: Final = _ACTION + _MAX_TEXT


class PublishedStatus(NamedTuple):
    """The published activity of a rank."""

    num_actions: int
    text: str
    is_together: bool  # whether all ranks do the phase together


class StatusPublisher:
    """Writer of the shared memory, used by the rank; publishing takes about half a microsecond."""

    def __init__(self) -> None:
        self.descriptor, path = tempfile.mkstemp(prefix="gpipe_hpc_")
        os.unlink(path)
        os.ftruncate(self.descriptor, _SIZE)
        self._memory = mmap.mmap(self.descriptor, _SIZE)
        self._lock = threading.Lock()
        self._phase_bytes, self._is_together = 0, False
        # Keyed by identity: steps repeat the same action objects, but not the same strings.
        self._texts: dict[int, tuple[object, bytes]] = {}

    def show_phase(self, count: int, phase: object, *, is_together: bool) -> None:
        """Publish the start of a phase; `is_together` is whether all ranks are in it."""
        text = _encoded(phase)
        self._memory[_PHASE : _PHASE + len(text)] = text
        self._phase_bytes, self._is_together = len(text), is_together
        _HEADER.pack_into(self._memory, 0, count, len(text), 0, is_together)

    def show_action(self, count: int, action: object) -> None:
        """Publish an action within the phase."""
        known = self._texts.get(id(action))
        if known is None or known[0] is not action:
            known = action, _encoded(action)
            if not isinstance(action, str):
                self._texts[id(action)] = known
        text = known[1]
        self._memory[_ACTION : _ACTION + len(text)] = text
        _HEADER.pack_into(self._memory, 0, count, self._phase_bytes, len(text), self._is_together)

    def close(self) -> None:
        """Close the file; later activities are not visible to the watcher."""
        with self._lock:
            if self.descriptor >= 0:
                os.close(self.descriptor)
                self.descriptor = -1


class StatusReader:
    """Reader of the shared memory, in the watcher; works even after the rank has died."""

    def __init__(self, path: str) -> None:
        self._descriptor: int | None = None
        with contextlib.suppress(OSError):
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self) -> PublishedStatus | None:
        """Return the published activity; None if there is none."""
        data = b"" if self._descriptor is None else os.pread(self._descriptor, _SIZE, 0)
        if len(data) < _SIZE:
            return None
        count, phase_bytes, action_bytes, is_together = _HEADER.unpack_from(data)
        phase = data[_PHASE : _PHASE + phase_bytes].decode(errors="replace")
        action = data[_ACTION : _ACTION + action_bytes].decode(errors="replace")
        return PublishedStatus(count, " in ".join(filter(None, (action, phase))), is_together)

    def close(self) -> None:
        """Close the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _encoded(text: object) -> bytes:
    return str(text).encode()[:_MAX_TEXT]
