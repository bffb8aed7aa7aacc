"""Fixture for tests of ranks started by mpiexec."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import Mpiexec


@pytest.fixture(scope="session")
def parts_done(mpiexec: Mpiexec, repository: Path) -> Callable[..., list[dict[str, Any]]]:
    """Return a function that runs parts of `program.py` under mpiexec; it returns their results."""

    def do(size: int, folder: Path, *parts: str) -> list[dict[str, Any]]:
        program = repository / "tests" / "comm" / "world" / "mpi" / "program.py"
        ended = mpiexec(size, program, folder, *parts)
        assert ended.code == 0, ended.output
        paths = [folder / f"rank{rank}.pt" for rank in range(size)]
        return [torch.load(path, weights_only=False) for path in paths]

    return do
