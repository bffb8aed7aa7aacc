"""Start ranks on this machine, wait for them, and end them."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final

_ROOT: Final = Path(__file__).resolve().parents[3]
_OF_LAUNCHERS: Final = (
    *("RANK", "WORLD_", "LOCAL_", "MASTER_", "TORCHELASTIC_"),
    *("OMPI_", "PMI_", "MV2_", "MPI_", "SLURM_"),
)


def run_ranks(
    module: str, size: int, words: Sequence[str], *, backend: str = "gloo", limit_s: float = 600.0
) -> Any:
    """Run `python -m MODULE WORDS --out FILE` on `size` ranks; return the JSON that rank 0 wrote.

    Each rank has one CPU thread. With the backend mpi, ranks are started by mpiexec. Exits with the
    output of the ranks if they fail.
    """
    with tempfile.TemporaryDirectory(prefix="collectives_") as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-m", module, *words, "--backend", backend, "--out", str(result)]
        kept = {k: v for k, v in os.environ.items() if not k.startswith(_OF_LAUNCHERS)}
        path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH", "")]))
        common = kept | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        if backend == "mpi":
            places = [common]
            command = [_mpiexec(), "-n", str(size), *command]
        else:
            port = _free_port()
            places = [common | _place(rank, size, port) for rank in range(size)]
        logs = [Path(folder) / f"log_{number}" for number in range(len(places))]
        processes = [_start(command, place, log) for place, log in zip(places, logs, strict=True)]
        try:
            _wait(processes, limit_s)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if any(process.returncode for process in processes) or not result.exists():
            said = [log.read_text(errors="replace").strip() for log in logs]
            sys.exit("collectives: ranks failed:\n" + "\n".join(filter(None, said)))
        return json.loads(result.read_text())


def _start(command: Sequence[str], environ: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def _wait(processes: Sequence[subprocess.Popen[bytes]], limit_s: float) -> None:
    """Wait until all processes have ended, one has failed, or the time limit is reached."""
    until_s = time.monotonic() + limit_s
    while time.monotonic() < until_s:
        codes = [process.poll() for process in processes]
        if all(code is not None for code in codes) or any(codes):
            return
        time.sleep(0.02)
    sys.exit(f"collectives: ranks took longer than {limit_s:g} s; use fewer sizes or repeats")


def _place(rank: int, size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        return int(server.getsockname()[1])


def _mpiexec() -> str:
    """Return the mpiexec of this environment, for example of the mpich wheel, or of the PATH."""
    own = Path(sys.executable).with_name("mpiexec")
    return str(own) if own.exists() else "mpiexec"
