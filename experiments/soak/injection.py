"""Injection of each kind of fault into a run, with its required consequences."""

import contextlib
import json
import os
import re
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from experiments.soak.hosts import Place, Process, RunHosts, SimulatedHosts
from experiments.soak.model import BLAME
from experiments.soak.plan import Fault, Kind
from experiments.soak.processes import ProcessInfo, families

FILLER: Final = "filler"
_KILLED: Final = -signal.SIGKILL
_REPLACED_S: Final = 20.0
_STOPPED_BY_SIGNAL: Final = 75
_FILE_LIMIT_BYTES: Final = 100_000
_ORDER_S: Final = 60.0  # seconds in which a command is executed on an idle machine
_LOOK_S: Final = 0.02


@dataclass(frozen=True)
class ActiveRun:
    """A run in progress; `can_fill`: its run folder is on a small disk."""

    hosts: RunHosts
    ranks: list[Process]
    folder: Path
    order: Path
    can_fill: bool

    def host_of(self, rank: int) -> str:
        """Return the name of a rank's host."""
        return self.hosts.place_of(rank, len(self.ranks)).name

    def on_host(self, number: int) -> list[int]:
        """Return the ranks of a host."""
        name = self.hosts.places[number].name
        return [rank for rank in range(len(self.ranks)) if self.host_of(rank) == name]


@dataclass(frozen=True)
class InjectedFault:
    """An injected fault, its time (time.time()), and the required consequences.

    `names` maps surviving ranks to patterns that must appear in their output. `remedy` must appear
    in it after the end. `codes` are the allowed exit codes of the other ranks; survivors exit with
    1. `form` describes the injection if it depends on the machine.
    """

    since_s: float
    names: Mapping[int, tuple[str, ...]]
    codes: Mapping[int, frozenset[int]] = field(default_factory=dict)
    remedy: str = ""
    form: str = ""


def inject(fault: Fault, live: ActiveRun) -> InjectedFault:
    """Inject a fault."""
    return _STRIKES[fault.kind](fault, live)


def _named(fault: Fault, live: ActiveRun, *patterns: str) -> dict[int, tuple[str, ...]]:
    """Return the consequence that all other ranks name the victim and its host, with a pattern."""
    named = rf"rank {fault.victim} on {live.host_of(fault.victim)}\b"
    others = (rank for rank in range(len(live.ranks)) if rank != fault.victim)
    return dict.fromkeys(others, (named, *patterns))


def _code(fault: Fault, *codes: int) -> dict[int, frozenset[int]]:
    return {fault.victim: frozenset(codes)}


_LOOK_AT_LOG: Final = "look at its log"


def _kill(fault: Fault, live: ActiveRun) -> InjectedFault:
    since_s = time.time()
    live.ranks[fault.victim].process.signal(signal.SIGKILL)
    names = _named(fault, live, "SIGKILL")
    return InjectedFault(since_s, names, _code(fault, _KILLED), remedy=_LOOK_AT_LOG)


def _stop(fault: Fault, live: ActiveRun) -> InjectedFault:
    since_s = time.time()
    live.ranks[fault.victim].process.signal(signal.SIGSTOP)
    names = _named(fault, live, "stopped")
    return InjectedFault(since_s, names, _code(fault, _KILLED), remedy="resume it sooner")


def _exception(fault: Fault, live: ActiveRun) -> InjectedFault:
    since_s = _obeyed(fault, live)
    return InjectedFault(since_s, _named(fault, live, BLAME), _code(fault, 1))


def _exit(fault: Fault, live: ActiveRun) -> InjectedFault:
    since_s = _obeyed(fault, live)
    code = int(fault.way.partition("(")[2].rstrip(")"))
    # The exit code is lost once a parent has read it; this process or torchrun may be first.
    how = f"with code {code}|SystemExit: {code}|ended without a report"
    return InjectedFault(since_s, _named(fault, live, how), _code(fault, code, 1))


def _disk(fault: Fault, live: ActiveRun) -> InjectedFault:
    everybody = range(len(live.ranks))
    # A rank that detects the failure itself does not print its own name.
    some = rf"(?m)rank \d+ on {live.host_of(0)}\b|^gpipe_hpc: RunFolderError: metrics: "
    if live.can_fill:
        since_s = time.time()
        _fill(live.folder.parent / FILLER)
        names = dict.fromkeys(everybody, (some, "No space left"))
        return InjectedFault(since_s, names, remedy="free some space", form="tmpfs")
    limit = (_FILE_LIMIT_BYTES, _FILE_LIMIT_BYTES)
    since_s = time.time()
    resource.prlimit(live.ranks[fault.victim].process.pid, resource.RLIMIT_FSIZE, limit)
    names = dict.fromkeys(everybody, (some, "File too large"))
    return InjectedFault(since_s, names, remedy="ulimit", form="RLIMIT_FSIZE")


def _kill_in_save(fault: Fault, live: ActiveRun) -> InjectedFault:
    _obeyed(fault, live)
    return _kill(fault, live)


def _preempt(fault: Fault, live: ActiveRun) -> InjectedFault:
    since_s = time.time()
    name, _, whom = fault.way.partition(" to ")
    number = signal.Signals[name]
    told = live.ranks if whom == "all" else [live.ranks[fault.victim]]
    for rank in told:
        rank.process.signal(number)
    codes = {rank: frozenset({_STOPPED_BY_SIGNAL}) for rank in range(len(live.ranks))}
    return InjectedFault(since_s, {}, codes)


def _lose(fault: Fault, live: ActiveRun) -> InjectedFault:
    since_s = time.time()
    for rank in live.ranks:
        rank.process.signal(signal.SIGKILL)
    return InjectedFault(
        since_s, {}, {rank: frozenset({_KILLED}) for rank in range(len(live.ranks))}
    )


def _kill_watcher(fault: Fault, live: ActiveRun) -> InjectedFault:
    """Kill a rank's watcher, then the rank, which the replacement of the watcher must report."""
    victim = live.ranks[fault.victim].process
    (watcher,) = _watchers(victim)
    watcher.signal(signal.SIGKILL)
    until_s = time.monotonic() + _REPLACED_S
    while {*_watchers(victim)} <= {watcher}:
        if time.monotonic() > until_s:
            break  # no watcher is left to report the rank; the verdict says so
        time.sleep(0.1)
    return _kill(fault, live)


def _watchers(rank: ProcessInfo) -> list[ProcessInfo]:
    return [each for each in families([rank]) if "gpipe_hpc.comm.watchdog" in each.words()]


def _cut(fault: Fault, live: ActiveRun) -> InjectedFault:
    assert isinstance(live.hosts, SimulatedHosts)
    since_s = time.time()
    live.hosts.pair.link.cut()
    names: dict[int, tuple[str, ...]] = {}
    for own in (0, 1):
        other = live.hosts.places[1 - own]
        gone = _any_of(live.on_host(1 - own), other)
        names |= dict.fromkeys(live.on_host(own), (gone,))
    return InjectedFault(since_s, names, remedy="its link is cut")


def _any_of(ranks: Sequence[int], place: Place) -> str:
    """Return a pattern that names a rank of a host, with its address."""
    return rf"rank ({'|'.join(map(str, ranks))}) on {place.name} \({re.escape(place.address)}\)"


def _power_off(fault: Fault, live: ActiveRun) -> InjectedFault:
    assert isinstance(live.hosts, SimulatedHosts)
    lost = 0 if fault.victim in live.on_host(0) else 1
    place = live.hosts.places[lost]
    gone = _any_of(live.on_host(lost), place)
    since_s = time.time()
    live.hosts.pair.hosts[lost].power_off()
    names = dict.fromkeys(live.on_host(1 - lost), (gone,))
    codes = dict.fromkeys(live.on_host(lost), frozenset({_KILLED}))
    return InjectedFault(since_s, names, codes, remedy=f"its host is down|{_LOOK_AT_LOG}")


_STRIKES: Final[Mapping[Kind, Callable[[Fault, ActiveRun], InjectedFault]]] = {
    Kind.KILL: _kill,
    Kind.STOP: _stop,
    Kind.EXCEPTION: _exception,
    Kind.EXIT: _exit,
    Kind.DISK: _disk,
    Kind.KILL_IN_SAVE: _kill_in_save,
    Kind.PREEMPTION: _preempt,
    Kind.CORRUPTION: _lose,
    Kind.LOSS: _lose,
    Kind.WATCHER: _kill_watcher,
    Kind.CUT: _cut,
    Kind.HOST: _power_off,
}


def _obeyed(fault: Fault, live: ActiveRun) -> float:
    """Send a command to the victim; return the time when it was executed."""
    aside = live.order.with_suffix(".new")
    aside.write_text(json.dumps({"rank": fault.victim, "what": fault.way}))
    aside.rename(live.order)
    done = Path(f"{live.order}.done")
    deadline_s = time.monotonic() + _ORDER_S * patience()
    while True:
        # Before reading the note: a rank may execute it and end between two polls.
        said = [rank.output for rank in live.ranks if rank.code is not None]
        if done.exists() and (noted := done.read_text()):
            return float(noted)
        if said or time.monotonic() > deadline_s:
            raise TimeoutError(f"rank {fault.victim} did not execute its command: {said}")
        time.sleep(_LOOK_S)


def undo_fault(live: ActiveRun) -> None:
    """Remove the cause of a fault: the command, the filler file, the cut link."""
    for left in (live.order, Path(f"{live.order}.done"), live.folder.parent / FILLER):
        left.unlink(missing_ok=True)
    if isinstance(live.hosts, SimulatedHosts):
        live.hosts.mend()


def _fill(path: Path) -> None:
    """Write a file until the disk is full."""
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"\0" * size)


def corrupt(way: str, newest: Path, which: int) -> str:
    """Damage a checkpoint in one of four ways; return which file."""
    files = sorted(newest.glob("*.distcp"))
    path = newest / "gpipe_hpc.json" if way == "an empty manifest" else files[which % len(files)]
    match way:
        case "a flipped byte":
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
        case "a short file":
            os.truncate(path, path.stat().st_size // 2)
        case "a missing file":
            path.unlink()
        case "an empty manifest":
            path.write_bytes(b"")
        case _:
            raise AssertionError(f"no such damage: {way}")
    return path.name


def forget_copies(shared: Iterable[Path]) -> None:
    """Remove in-memory checkpoints of hosts, as after a reboot."""
    for folder in shared:
        for own in folder.glob(f"gpipe_hpc_{os.getuid()}"):
            shutil.rmtree(own)


def patience() -> float:
    """Return the number of runnable processes per processor, 1 on an idle machine."""
    average, _, _, running, _ = Path("/proc/loadavg").read_text().split()
    wanted = max(float(average), int(running.partition("/")[0]))
    return max(1.0, wanted / len(os.sched_getaffinity(0)))
