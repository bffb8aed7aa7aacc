"""Run a part: processes with a time limit that write their results and leave nothing behind."""

import argparse
import contextlib
import faulthandler
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TAIL_CHARACTERS = 6000
# Variables of launchers and users that would change a part.
UNWANTED = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_", "OMPI_", "PMI_", "SLURM_")
# Seconds before its limit at which a part prints the stacks of its threads.
DUMP_S = 8.0


@dataclass(frozen=True)
class Claim:
    """A claim: a measured value and its upper or lower bound."""

    what: str
    found: float | None
    limit: float
    at_least: bool = False

    @property
    def holds(self) -> bool | None:
        """Return whether the claim holds, or None without a value."""
        if self.found is None:
            return None
        return self.found >= self.limit if self.at_least else self.found <= self.limit

    def __str__(self) -> str:
        """Return one line of the summary."""
        verdict = {None: "NOT FOUND", True: "holds", False: "DOES NOT HOLD"}[self.holds]
        found = "nothing" if self.found is None else f"{self.found:.4g}"
        bound = "at least" if self.at_least else "at most"
        return f"{verdict}: {self.what}: {found}, {bound} {self.limit:.4g} wanted"


@dataclass(frozen=True)
class Part:
    """Processes of one module, `ranks` of them, each with its rank in the environment."""

    name: str
    what: str
    module: str
    limit_s: float
    arguments: tuple[str, ...] = ()
    ranks: int = 1
    needs_devices: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Outcome:
    """Result of a part: done, failed, timed out or skipped, and its output."""

    state: str
    seconds: float = 0.0
    found: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    tail: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the entry of the file; output is included only after an error."""
        kept = {"state": self.state, "seconds": round(self.seconds, 1), "found": self.found}
        if self.reason:
            kept["reason"] = self.reason
        if self.state != "done" and self.tail:
            kept["output"] = self.tail.splitlines()
        return kept


# The key that the part `memory` writes and a claim uses.
LEFT = "left by measuring layers, bytes"


class Findings:
    """The result file of a part, rewritten after each result so that a kill loses nothing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.found: dict[str, Any] = {}

    def add(self, name: str, value: Any) -> None:
        """Write one more result atomically."""
        self.found[name] = value
        write_json(self._path, self.found)

    @contextlib.contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """Context that records an error instead of raising it."""
        try:
            yield
        except Exception as error:
            self.add(name, {"failed": f"{type(error).__name__}: {error}"})


def write_json(path: Path, value: Any) -> None:
    """Replace a file atomically."""
    aside = path.with_name(path.name + ".part")
    aside.write_text(json.dumps(value, indent=1, default=str), encoding="utf-8")
    os.replace(aside, path)


def run_part(part: Part, limit_s: float) -> Outcome:
    """Run a part's processes to their end or the time limit; kill the remaining ones."""
    with tempfile.TemporaryDirectory(prefix="gpipe_hpc_gpu_") as name:
        folder = Path(name)
        result, logs = folder / "found.json", [folder / f"{r}.log" for r in range(part.ranks)]
        begin_s = time.monotonic()
        shared = {"GPU_PART_LIMIT_S": str(limit_s), **_launched(part.ranks)}
        processes = [
            _start(part, shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, result, log)
            for rank, log in enumerate(logs)
        ]
        state, reason = _await(processes, begin_s + limit_s)
        for process in processes:
            _kill(process)
        found: dict[str, Any] = {}
        if result.exists():
            found = json.loads(result.read_text(encoding="utf-8"))
        return Outcome(state, time.monotonic() - begin_s, found, reason, _tails(logs))


def _launched(ranks: int) -> dict[str, str]:
    """Return the environment that a launcher would set for ranks of one machine; empty for one."""
    if ranks == 1:
        return {}
    return {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }


def _start(
    part: Part, launched: Mapping[str, str], result: Path, log: Path
) -> "subprocess.Popen[bytes]":
    kept = {k: v for k, v in os.environ.items() if not k.startswith(UNWANTED)}
    own = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [kept.get("PYTHONPATH")])]),
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
        **{name: value for name, value in launched.items() if part.ranks > 1 or "RANK" not in name},
        **part.environment,
    }
    command = [sys.executable, "-m", part.module, *part.arguments]
    with log.open("wb") as output:
        return subprocess.Popen(
            [*command, "--found", str(result)],
            cwd=ROOT,
            env=kept | own,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _await(processes: Sequence["subprocess.Popen[bytes]"], deadline_s: float) -> tuple[str, str]:
    """Return the state once all processes have ended, one has failed, or the time is over."""
    while True:
        codes = [process.poll() for process in processes]
        bad = [(rank, code) for rank, code in enumerate(codes) if code]
        if bad:
            rank, code = bad[0]
            # Wait a moment for the messages of the other ranks.
            late_s = min(deadline_s, time.monotonic() + 5.0)
            while any(p.poll() is None for p in processes) and time.monotonic() < late_s:
                time.sleep(0.05)
            return "failed", f"rank {rank} ended with {_meaning(code)}"
        if all(code == 0 for code in codes):
            return "done", ""
        if time.monotonic() > deadline_s:
            left = [rank for rank, code in enumerate(codes) if code is None]
            return "out of time", f"ranks {left} had not ended"
        time.sleep(0.05)


def _meaning(code: int) -> str:
    if code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """End a process with all its descendants."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _tails(logs: Sequence[Path]) -> str:
    """Return the end of each rank's output."""
    told = []
    for rank, log in enumerate(logs):
        text = log.read_text(encoding="utf-8", errors="replace")[-TAIL_CHARACTERS // len(logs) :]
        told.append(f"--- rank {rank}\n{text}" if len(logs) > 1 else text)
    return "\n".join(told)


def options(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of a part's options, including those of every part."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", required=True)
    parser.add_argument("--found", type=Path, required=True, help="the file to write")
    return parser


def enter() -> float:
    """Start a process of a part; shortly before its time limit it prints its stack.

    Returns the seconds that it has.
    """
    limit_s = float(os.environ.get("GPU_PART_LIMIT_S", "inf"))
    if limit_s < 1e9:
        faulthandler.dump_traceback_later(max(1.0, limit_s - DUMP_S), exit=False)
    return limit_s


def free_port() -> int:
    """Return a port that is currently free."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def timed(run: Callable[[], object], synchronize: Callable[[], object]) -> float:
    """Return the seconds of a call, including the device work that it launched."""
    synchronize()
    begin_s = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - begin_s
