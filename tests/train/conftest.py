"""Fixtures for tests of the train command."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def mine() -> dict[str, str]:
    """Return environment variables with which the user model in mine.py can be imported."""
    return {"PYTHONPATH": str(Path(__file__).parent)}
