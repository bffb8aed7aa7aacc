"""What tests of the command that trains share."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def mine() -> dict[str, str]:
    """Return the environment in which the user's model of mine.py is found."""
    return {"PYTHONPATH": str(Path(__file__).parent)}
