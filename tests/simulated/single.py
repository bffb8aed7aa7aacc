"""A simulated device for the calling thread, without ranks."""

from collections.abc import Iterator
from contextlib import contextmanager

from tests.simulated.device import SimulatedDevice, Site
from tests.simulated.interpose import interposed
from tests.simulated.tracker import Tracker


@contextmanager
def single_device(ignores: frozenset[Site] = frozenset()) -> Iterator[SimulatedDevice]:
    """Context that simulates a device; its `host_waits` lists what the host has waited for.

    `ignores` names calls that have no effect.
    """
    with interposed():
        played = SimulatedDevice(Tracker(), ignores)
        with played.playing(), played.in_use():
            yield played
