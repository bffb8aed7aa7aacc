"""A simulated device for the calling thread, without ranks."""

from collections.abc import Iterator
from contextlib import contextmanager

from tests.played.device import PlayedDevice, Site
from tests.played.interpose import interposed
from tests.played.tracker import Tracker


@contextmanager
def alone(ignores: frozenset[Site] = frozenset()) -> Iterator[PlayedDevice]:
    """Context that simulates a device; its `host_waits` lists what the host has waited for.

    `ignores` names calls that have no effect.
    """
    with interposed():
        played = PlayedDevice(Tracker(), ignores)
        with played.playing(), played.in_use():
            yield played
