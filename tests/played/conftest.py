"""Fixture: a simulated device on the test's thread."""

from collections.abc import Iterator

import pytest

from tests.played.device import PlayedDevice
from tests.played.interpose import interposed
from tests.played.tracker import Tracker


@pytest.fixture
def device() -> Iterator[PlayedDevice]:
    """Return a simulated device for the test's thread."""
    with interposed():
        played = PlayedDevice(Tracker())
        with played.playing(), played.in_use():
            yield played
