"""The moments of a device's marks on the host's clock, by which ranks can be compared.

A device tells how long it took from mark to mark, in a number of 24 bits, by a clock of its own;
and it comes to a mark long after the host has put it there. So moments go from step to step, from
one mark to the next, and what the host knows by itself corrects them: a mark was not reached before
it was put there, nor after it was first seen to be done, which by a device without work is at once.
"""

import time
from collections import deque
from collections.abc import Callable

from gpipe_hpc.comm.device import Device, Event

Now = Callable[[], float]


class Beginning:
    """The first mark of a step, and the host's moment of it.

    `put_s`: when the host put it there. `before`: that of the step before, from which the moment is
    reckoned; None where the device had no work and came there at once.
    """

    def __init__(self, mark: Event, put_s: float, before: "Beginning | None", now: Now) -> None:
        self.mark = mark
        self._put_s, self._seen_s, self._before, self._now = put_s, float("inf"), before, now

    def look(self) -> bool:
        """Say whether the device has come to the mark; if so it was no later than now."""
        if self._seen_s == float("inf") and self.mark.query():
            self._seen_s = self._now()
        return self._seen_s < float("inf")

    def seconds(self) -> float:
        """Return the moment in seconds; the mark is done."""
        if self._before is not None:
            earlier = self._before
            self.look()
            reached_s = earlier.seconds() + earlier.mark.elapsed_ms(self.mark) / 1e3
            self._put_s = min(max(reached_s, self._put_s), self._seen_s)
            self._before = None
        return self._put_s


class DeviceClock:
    """Puts marks into the current stream, and knows the host's moments of those that begin a step.

    Waits for the device once, at the start.
    """

    def __init__(self, device: Device, now: Now = time.perf_counter) -> None:
        self._device, self._now = device, now
        device.synchronize()
        put_s = now()
        # Those that nobody may have read, the newest last.
        self._steps = deque([Beginning(self._marked(), put_s, None, now)])
        self._is_new = False

    def mark(self) -> Event:
        """Put a mark at the end of the current stream."""
        if self._is_new:
            self._is_new = False
            self._steps[-1].look()
        return self._marked()

    def begin(self) -> Beginning:
        """Begin a step."""
        while len(self._steps) > 1 and self._steps[1].look():
            self._steps.popleft()
            self._steps[0].seconds()  # lets go of the step before it
        put_s = self._now()
        self._steps.append(Beginning(self._marked(), put_s, self._steps[-1], self._now))
        self._is_new = True
        return self._steps[-1]

    def _marked(self) -> Event:
        mark = self._device.event(timing=True)
        mark.record()
        return mark


def await_mark(mark: Event) -> None:
    """Let the host wait for a mark, unless it is done."""
    if not mark.query():
        mark.synchronize()
