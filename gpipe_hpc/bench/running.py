"""Start and end the processes that measure one point."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from gpipe_hpc.bench.figures import PointResult
from gpipe_hpc.bench.sweep import Point
from gpipe_hpc.config import ExitCode, print_error
from gpipe_hpc.errors import GpipeError, PeerError
from gpipe_hpc.settings import Config

_POINT: Final = "gpipe_hpc.bench.point"
_CODE: Final = "exit_code"
LIMIT_S: Final = 3600.0  # for one point; waiting ranks exit after comm.timeout_s
_GRACE_S: Final = 45.0  # torchrun waits 30 s for its ranks before it kills them


class PointFailure(NamedTuple):
    """The reason why a measurement failed."""

    why: str


def measure(point: Point, words: Sequence[str], limit_s: float = LIMIT_S) -> PointResult:
    """Measure a point in new processes; `words` are the user's overrides."""
    own = [*words, *point.overrides]
    told = run_ranks(_POINT, point.ranks, point.threads, own, limit_s)
    return (
        PointResult(point, failed=told.why)
        if isinstance(told, PointFailure)
        else PointResult(point, **told)
    )


def run_ranks(
    module: str, ranks: int, threads: int, words: Sequence[str], limit_s: float = LIMIT_S
) -> dict[str, Any] | PointFailure:
    """Run a module on ranks of this machine; return the JSON that rank 0 writes to bench.out."""
    with tempfile.TemporaryDirectory(prefix="gpipe_hpc_bench_") as folder:
        result, log = Path(folder) / "point.json", Path(folder) / "log"
        own = [*_without_sweep(words), f"bench.out={result}"]
        launch = [sys.executable, "-m", module]
        if ranks > 1 and "comm.backend=mpi" in own:
            launch = [_mpiexec(), "-n", str(ranks), *launch]
        elif ranks > 1:
            torchrun = ("torch.distributed.run", "--standalone", "--nproc_per_node")
            launch = [sys.executable, "-m", *torchrun, str(ranks), "-m", module]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*launch, *own],
                env={**os.environ, "OMP_NUM_THREADS": str(threads)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                return PointFailure(f"took longer than {limit_s:g} s")
            finally:
                _end(process)
        told: dict[str, Any] = json.loads(result.read_text()) if result.exists() else {}
        if code or _CODE in told or not told:
            # torchrun exits with 1 for any exit code of its ranks.
            return PointFailure(_reason(log.read_text(errors="replace"), told.get(_CODE, code)))
        return told


def print_failure(error: GpipeError, config: Config) -> int:
    """Print the error of a rank of `run_ranks`, write its exit code to bench.out, and return it."""
    code = print_error(error)
    if config.bench.out is not None and not isinstance(error, PeerError):
        Path(config.bench.out).write_text(json.dumps({_CODE: code}))
    return code


def refusal(error: GpipeError) -> str:
    """Return the reason for not measuring a point whose settings cannot work."""
    return _failure(f"gpipe_hpc: {error}", ExitCode.BAD_CONFIG)


def code_of(is_any: bool, failures: Sequence[str]) -> int:
    """Return a sweep's exit code: 0 if any point was measured, 2 if all were invalid, or 1."""
    if is_any:
        return ExitCode.DONE
    are_refused = all(each.startswith(_failure("", ExitCode.BAD_CONFIG)) for each in failures)
    return ExitCode.BAD_CONFIG if are_refused else ExitCode.FAILED


def _mpiexec() -> str:
    """Return the path of mpiexec in this environment, or the one in PATH."""
    own = Path(sys.executable).with_name("mpiexec")
    return str(own) if own.exists() else "mpiexec"


def _without_sweep(words: Sequence[str]) -> list[str]:
    lists = ("ranks", "threads", "batch_sizes", "microbatches", "backends", "out")
    return [word for word in words if word.lstrip("+").split("=")[0] not in _named(lists)]


def _named(settings: Sequence[str]) -> set[str]:
    return {f"bench.{name}" for name in settings}


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the processes of a point; torchrun ends its ranks, which have their own sessions."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_S)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _reason(output: str, code: int) -> str:
    """Return the error message that gpipe_hpc printed, or the last line of the output."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("gpipe_hpc: ")]
    said = (ours or lines[-1:] or ["no output"])[0]
    return _failure(said, code)


def _failure(said: str, code: int) -> str:
    return f"exit code {code}, {said}"
