"""Processes from /proc: descendants, also in other namespaces."""

import contextlib
import os
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple


class ProcessInfo(NamedTuple):
    """A process; `began` distinguishes processes that reuse a PID."""

    pid: int
    began: int

    @property
    def lives(self) -> bool:
        """Return whether the process exists and is not a zombie."""
        stat = _stat(self.pid)
        return stat is not None and stat.began == self.began and stat.state not in "ZX"

    @property
    def is_stopped(self) -> bool:
        """Return whether the process is stopped by SIGSTOP."""
        stat = _stat(self.pid)
        return stat is not None and stat.began == self.began and stat.state == "T"

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        if self.lives:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def words(self) -> str:
        """Return the command line."""
        with contextlib.suppress(OSError):
            return Path(f"/proc/{self.pid}/cmdline").read_text(errors="replace").replace("\0", " ")
        return ""


class _Stat(NamedTuple):
    state: str
    parent: int
    began: int


def _stat(pid: int) -> _Stat | None:
    try:
        behind_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return _Stat(behind_name[0], int(behind_name[1]), int(behind_name[19]))


def seen(pid: int) -> ProcessInfo | None:
    """Return the process with a PID, or None if there is none."""
    stat = _stat(pid)
    return None if stat is None else ProcessInfo(pid, stat.began)


def families(roots: Iterable[ProcessInfo]) -> set[ProcessInfo]:
    """Return these processes and all their living descendants."""
    children: dict[int, list[ProcessInfo]] = {}
    for pid in _numbers():
        stat = _stat(pid)
        if stat is not None:
            children.setdefault(stat.parent, []).append(ProcessInfo(pid, stat.began))
    found: set[ProcessInfo] = set()
    waiting = [root for root in roots if root.lives]
    while waiting:
        each = waiting.pop()
        if each not in found:
            found.add(each)
            waiting += children.get(each.pid, [])
    return found


def inside(namespace: str, number: int) -> ProcessInfo | None:
    """Return the process with a PID in a PID namespace (named as in /proc)."""
    for pid in _numbers():
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{pid}/ns/pid") != namespace:
                continue
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            own = next(line.split()[-1] for line in lines if line.startswith("NSpid:"))
            if int(own) == number:
                return seen(pid)
    return None


def marked(variable: str, value: str) -> ProcessInfo | None:
    """Return a process that was started with the given variable in its environment."""
    wanted = f"{variable}={value}".encode()
    for pid in _numbers():
        with contextlib.suppress(OSError):
            if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                return seen(pid)
    return None


def _numbers() -> Iterator[int]:
    for name in os.listdir("/proc"):
        if name.isdigit():
            yield int(name)
