"""Ranks of gpipe_hpc on two hosts without a launcher."""

import os
import secrets
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from experiments.two_hosts.hosts import TwoHosts
from experiments.two_hosts.machine import Job

_ROOT: Final = Path(__file__).resolve().parents[2]
_PORT: Final = 29_500
_OF_LAUNCHERS: Final = (
    *("RANK", "WORLD_", "LOCAL_", "MASTER_", "TORCHELASTIC_", "GROUP_", "ROLE_"),
    *("OMPI_", "PMI_", "MV2_", "MPI_", "SLURM_", "GLOO_", "GPIPE_HPC_SECRET"),
)
_LOOK_S: Final = 0.1


class Ranks:
    """Running ranks, in order."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs = tuple(jobs)

    @property
    def codes(self) -> list[int | None]:
        """Return the exit codes; None for running ranks."""
        return [job.code for job in self.jobs]

    @property
    def outputs(self) -> list[str]:
        """Return the output of the ranks so far."""
        return [job.output for job in self.jobs]

    def wait(self, limit_s: float) -> list[int]:
        """Return the exit codes once all have ended; raises TimeoutError."""
        deadline_s = time.monotonic() + limit_s
        return [job.wait(max(0.0, deadline_s - time.monotonic())) for job in self.jobs]

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all running ranks."""
        for job in self.jobs:
            job.signal(number)

    def end(self, patience_s: float = 20.0) -> None:
        """End running ranks with SIGTERM, and later with SIGKILL."""
        self.signal(signal.SIGTERM)
        deadline_s = time.monotonic() + patience_s
        while None in self.codes and time.monotonic() < deadline_s:
            time.sleep(_LOOK_S)
        self.signal(signal.SIGKILL)


def start_ranks(
    pair: TwoHosts,
    places: Sequence[Sequence[int]],
    words: Sequence[str],
    *,
    folder: Path,
    logs: Path,
    port: int = _PORT,
    environ: Mapping[str, str] | None = None,
) -> Ranks:
    """Start `python WORDS` as each rank, with the environment that torchrun would set.

    Args:
        places: world ranks on each host, for example [[0, 1], [2, 3]]
        folder: working folder
        logs: folder for the output of the ranks, rank_R.txt
        port: port of rank 0; use another one while an earlier run may still hold it
        environ: variables in addition to those of this process
    """
    logs.mkdir(parents=True, exist_ok=True)
    at_home = next(host for host, own in zip(pair.hosts, places, strict=True) if 0 in own)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_OF_LAUNCHERS)}
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH", "")]))
    common = kept | {
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "GPIPE_HPC_SECRET": secrets.token_hex(32),
        "MASTER_ADDR": at_home.address,
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(sum(map(len, places))),
        **(environ or {}),
    }
    jobs: dict[int, Job] = {}
    for host, own in zip(pair.hosts, places, strict=True):
        for local_rank, rank in enumerate(own):
            place = {"RANK": rank, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": len(own)}
            jobs[rank] = host.start(
                [sys.executable, *words],
                output=logs / f"rank_{rank}.txt",
                folder=folder,
                environ=common | {name: str(value) for name, value in place.items()},
            )
    return Ranks([jobs[rank] for rank in sorted(jobs)])
