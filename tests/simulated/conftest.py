"""Fixture: a simulated device on the test's thread."""

from collections.abc import Iterator

import pytest

from tests.simulated.device import SimulatedDevice
from tests.simulated.interpose import interposed
from tests.simulated.tracker import Tracker


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    """Return a simulated device for the test's thread."""
    with interposed():
        played = SimulatedDevice(Tracker())
        with played.playing(), played.in_use():
            yield played
