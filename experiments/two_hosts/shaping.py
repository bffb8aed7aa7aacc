"""Queue of one direction of a link: when each packet is delivered."""

from collections import deque
from dataclasses import dataclass, field
from typing import Final

_LATE_STEPS: Final = 24  # bins of the histogram of lateness: powers of two of microseconds


@dataclass
class Direction:
    """A queue that transmits `rate` bits per second and delivers each packet `delay_s` later.

    Like a port of a switch, it drops a packet that finds more than `queue_bytes` waiting. A rate of
    0 is unlimited. Times are seconds of one clock.
    """

    rate: float
    delay_s: float
    queue_bytes: int
    is_cut: bool = False
    passed_bytes: int = 0
    passed_packets: int = 0
    lost_packets: int = 0
    _free_s: float = 0.0  # end of the transmission of the last packet
    _waiting: deque[tuple[float, bytes]] = field(default_factory=deque)
    _late: list[int] = field(default_factory=lambda: [0] * _LATE_STEPS)

    def offer(self, packet: bytes, now_s: float) -> bool:
        """Enqueue a packet; return False if it is dropped (link cut, or queue full)."""
        behind_s = max(0.0, self._free_s - now_s)
        is_full = self.rate > 0 and behind_s * self.rate / 8 > self.queue_bytes
        if self.is_cut or is_full:
            self.lost_packets += 1
            return False
        wire_s = len(packet) * 8 / self.rate if self.rate else 0.0
        self._free_s = now_s + behind_s + wire_s
        self._waiting.append((self._free_s + self.delay_s, packet))
        return True

    def due(self, now_s: float) -> list[bytes]:
        """Return the packets delivered by now, in order, and count them."""
        found = []
        while self._waiting and self._waiting[0][0] <= now_s:
            due_s, packet = self._waiting.popleft()
            found.append(packet)
            self.passed_bytes += len(packet)
            self.passed_packets += 1
            step = int((now_s - due_s) * 1e6).bit_length()
            self._late[min(step, _LATE_STEPS - 1)] += 1
        return found

    @property
    def next_due_s(self) -> float | None:
        """Return the time of the next delivery, or None."""
        return self._waiting[0][0] if self._waiting else None

    def cut(self) -> None:
        """Drop all queued and further packets until `restore`."""
        self.is_cut = True
        self.lost_packets += len(self._waiting)
        self._waiting.clear()

    def restore(self) -> None:
        """Deliver packets again."""
        self.is_cut = False

    def late_s(self, share: float) -> float:
        """Return an upper bound of the lateness of this share of packets: a power of two of us."""
        rest = share * sum(self._late)
        for step, count in enumerate(self._late):
            rest -= count
            if rest <= 0:
                return (1 << step) * 1e-6 if step else 0.0
        return float(1 << _LATE_STEPS) * 1e-6
