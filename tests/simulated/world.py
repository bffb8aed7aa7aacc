"""Thread worlds in which each rank simulates a device."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gpipe_hpc import run_on_threads
from tests.simulated.device import SimulatedDevice, Site
from tests.simulated.interpose import interposed
from tests.simulated.tracker import HostWait, Tracker


@dataclass
class SimulatedRank:
    """Results of a run on simulated devices: each rank's result, and the waits of its host."""

    results: list[Any]
    devices: list[SimulatedDevice]

    @property
    def sites(self) -> set[Site]:
        """Return the recorded calls of streams, events and the device, with their locations."""
        return set().union(*(device.sites for device in self.devices))


def run_simulated(
    size: int,
    body: Callable[[Any], Any],
    *,
    ignores: frozenset[Site] = frozenset(),
    timeout_s: float = 60.0,
) -> SimulatedRank:
    """Run `body(world)` on `size` ranks as threads, each with a simulated device.

    `ignores` names calls without effect. Raises the first fault that the tracker detected,
    including those that were caught.
    """
    tracker = Tracker()
    devices = [SimulatedDevice(tracker, ignores) for _ in range(size)]

    def played(world: Any) -> Any:
        with world.device.playing():
            return body(world)

    with interposed():
        try:
            results = run_on_threads(size, played, timeout_s=timeout_s, device=devices.__getitem__)
        finally:
            if tracker.faults:
                raise tracker.faults[0]
    return SimulatedRank(results, devices)


def between(device: SimulatedDevice, call: Callable[[], Any]) -> tuple[Any, list[HostWait]]:
    """Return the result of a call, and the waits of this thread meanwhile."""
    start, own = len(device.host_waits), threading.get_ident()
    result = call()
    return result, [wait for wait in device.host_waits[start:] if wait.thread == own]
