"""A device that the calling thread plays, without any ranks."""

from collections.abc import Iterator
from contextlib import contextmanager

from tests.played.device import PlayedDevice, Site
from tests.played.interpose import interposed
from tests.played.tracker import Tracker


@contextmanager
def alone(ignores: frozenset[Site] = frozenset()) -> Iterator[PlayedDevice]:
    """Play a device within the block; `host_waits` says what the host has waited for.

    `ignores`: calls that do nothing.
    """
    with interposed():
        played = PlayedDevice(Tracker(), ignores)
        with played.playing(), played.in_use():
            yield played
