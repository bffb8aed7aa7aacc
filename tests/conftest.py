"""Fixtures that several folders of tests use."""

import os
from pathlib import Path

import pytest

# Two cores and many small tensors: threads only get in each other's way.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def repository() -> Path:
    """Return the folder of the repository."""
    return Path(__file__).resolve().parent.parent
