"""Control of the link between two hosts: count packets, cut it, restore it."""

import os
import sys
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from experiments.two_hosts.machine import start_asked

_LEAST_QUEUE_BYTES: Final = 128_000
_RELAY: Final = "experiments.two_hosts.relay"


class OneWay(NamedTuple):
    """Traffic in one direction, packet headers included.

    `late_s` is an upper bound of the lateness of 99 of 100 packets relative to the rate and delay:
    a power of two of microseconds. Lateness is caused by other load.
    """

    passed_bytes: int
    passed_packets: int
    lost_packets: int
    late_s: float

    def since(self, before: "OneWay") -> "OneWay":
        """Return the traffic after `before`; the lateness is that of all packets."""
        return OneWay(
            self.passed_bytes - before.passed_bytes,
            self.passed_packets - before.passed_packets,
            self.lost_packets - before.lost_packets,
            self.late_s,
        )


class Counts(NamedTuple):
    """Traffic from the first host to the second, and back."""

    there: OneWay
    back: OneWay

    def since(self, before: "Counts") -> "Counts":
        """Return the traffic after `before`."""
        return Counts(self.there.since(before.there), self.back.since(before.back))


class Link:
    """A process that forwards packets between the ends of two hosts.

    Args:
        rate: bits per second in each direction, packet headers included; 0 for no limit
        delay_s: seconds in each direction, in addition to the transmission time
        queue_bytes: bytes that may wait before packets are dropped; None for the bandwidth-delay
            product of the round trip, at least 128 kB
    """

    def __init__(
        self, ends: Sequence[int], rate: float, delay_s: float, queue_bytes: int | None
    ) -> None:
        least = max(_LEAST_QUEUE_BYTES, int(2 * rate / 8 * delay_s))
        self.rate, self.delay_s = rate, delay_s
        self._asker = start_asked(
            [sys.executable, "-m", _RELAY],
            kept=ends,
            ends=list(ends),
            rate=rate,
            delay_s=delay_s,
            queue_bytes=least if queue_bytes is None else queue_bytes,
        )
        for end in ends:
            os.close(end)
        try:
            self._asker.first_answer()
        except BaseException:
            self._asker.end()
            raise

    def counts(self) -> Counts:
        """Return the traffic so far."""
        return _counts(self._asker.ask(do="count"))

    def cut(self) -> None:
        """Drop all packets in both directions from now on; interfaces stay up."""
        self._asker.ask(do="cut")

    def restore(self) -> None:
        """Deliver packets again."""
        self._asker.ask(do="restore")

    def block(self, first: int, last: int, *, open_first: int = 1, open_last: int = 0) -> None:
        """Drop connections to the given TCP ports from now on, like a firewall; 1, 0 for none.

        Connections to ports from `open_first` to `open_last` are allowed. Existing connections
        continue.
        """
        self._asker.ask(
            do="block", first=first, last=last, open_first=open_first, open_last=open_last
        )

    def shape(self, rate: float, delay_s: float) -> None:
        """Change rate and delay from now on."""
        self.rate, self.delay_s = rate, delay_s
        self._asker.ask(do="shape", rate=rate, delay_s=delay_s)

    def end(self) -> None:
        """End the process; the interfaces of both hosts are removed."""
        self._asker.end()


def _counts(answer: list[dict[str, Any]]) -> Counts:
    there, back = (OneWay(**way) for way in answer)
    return Counts(there, back)
