"""Ranks under mpiexec."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

_LIMIT_S = 110


class Ended(NamedTuple):
    """An mpiexec that has ended; `output` is both streams of all ranks."""

    code: int
    output: str


Mpiexec = Callable[..., Ended]


@pytest.fixture(scope="session")
def mpiexec(repository: Path) -> Iterator[Mpiexec]:
    """Return a function that runs Python on some ranks of the MPI that is installed beside it."""
    launcher = Path(sys.executable).with_name("mpiexec")
    assert launcher.exists(), "no mpiexec: pip install mpich, as requirements.lock says"
    unwanted = ("RANK", "WORLD_", "LOCAL_", "MASTER_", "TORCHELASTIC_", "PMI_", "MPI_", "SLURM_")
    environ = {k: v for k, v in os.environ.items() if not k.startswith(unwanted)}
    # The folder that the tests run in comes first, so the package is the one that is tested.
    environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(repository), "PYTHONWARNINGS": "ignore"}

    def run(size: int, *arguments: object, folder: Path | None = None) -> Ended:
        words = [str(launcher), "-n", str(size), sys.executable, *map(str, arguments)]
        done = subprocess.run(
            words,
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_LIMIT_S,
            check=False,
        )
        return Ended(done.returncode, done.stdout.decode(errors="replace"))

    yield run


@pytest.fixture(scope="session")
def parts_done(mpiexec: Mpiexec, repository: Path) -> Callable[..., list[dict[str, Any]]]:
    """Return a function that has ranks do parts of `program.py`; it returns what each has left."""

    def do(size: int, folder: Path, *parts: str) -> list[dict[str, Any]]:
        program = repository / "tests" / "comm" / "mpi" / "program.py"
        ended = mpiexec(size, program, folder, *parts)
        assert ended.code == 0, ended.output
        paths = [folder / f"rank{rank}.pt" for rank in range(size)]
        return [torch.load(path, weights_only=False) for path in paths]

    return do
