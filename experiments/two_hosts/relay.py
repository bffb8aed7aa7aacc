"""The link: forwards packets between two descriptors, with a rate and a delay in each direction.

    python relay.py FACTS        FACTS: JSON with control, ends, rate, delay_s, queue_bytes

Requests and answers are JSON, one per packet of the socket `control`; the process ends when it is
closed.
"""

import contextlib
import gc
import json
import os
import select
import socket
import sys
import time
from typing import Any, Final

from experiments.two_hosts.shaping import Direction

_BURST: Final = 32  # packets read from one end before the other end is served
_MOST_BYTES: Final = 1 << 16
_SYN, _ACK = 0x02, 0x10


def main() -> None:
    """Carry packets until the control socket is closed."""
    facts = json.loads(sys.argv[1])
    control = socket.socket(fileno=facts["control"])
    control.set_inheritable(False)
    gc.disable()
    _come_first()
    wire = Wire(facts["ends"], facts["rate"], facts["delay_s"], facts["queue_bytes"])
    control.send(b'{"up": true}')
    while wire.carry(control):
        pass


def _come_first() -> None:
    """Raise the scheduling priority if permitted, because a real link has no other load."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except OSError:
        with contextlib.suppress(OSError):
            os.nice(-10)


class Wire:
    """Both directions of the link; packets of end k leave at end 1 - k."""

    def __init__(self, ends: list[int], rate: float, delay_s: float, queue_bytes: int) -> None:
        self._ends = ends
        self._ways = [Direction(rate, delay_s, queue_bytes) for _ in ends]
        self._blocked = self._open = range(0)

    def carry(self, control: socket.socket) -> bool:
        """Wait for the next event and handle it; return False once `control` is closed."""
        due_s = [way.next_due_s for way in self._ways if way.next_due_s is not None]
        wait_s = max(0.0, min(due_s) - time.monotonic()) if due_s else None
        readable, _, _ = select.select([control.fileno(), *self._ends], [], [], wait_s)
        for end, way in zip(self._ends, self._ways, strict=True):
            if end in readable:
                self._take(end, way)
        now_s = time.monotonic()
        for way, far_end in zip(self._ways, reversed(self._ends), strict=True):
            for packet in way.due(now_s):
                # A host with a full receive queue drops the packet, like a real host.
                with contextlib.suppress(OSError):
                    os.write(far_end, packet)
        return control.fileno() not in readable or self._answer(control)

    def _take(self, end: int, way: Direction) -> None:
        for _ in range(_BURST):
            try:
                packet = os.read(end, _MOST_BYTES)
            except OSError:
                return
            if self._blocked and self._is_blocked(called_port(packet)):
                way.lost_packets += 1
            else:
                way.offer(packet, time.monotonic())

    def _is_blocked(self, port: int) -> bool:
        return port in self._blocked and port not in self._open

    def _answer(self, control: socket.socket) -> bool:
        packet = control.recv(1 << 16)
        if not packet:
            return False
        request: dict[str, Any] = json.loads(packet)
        if request["do"] == "block":
            self._blocked = range(request["first"], request["last"] + 1)
            self._open = range(request["open_first"], request["open_last"] + 1)
        for way in self._ways:
            match request["do"]:
                case "cut":
                    way.cut()
                case "restore":
                    way.restore()
                case "shape":
                    way.rate, way.delay_s = request["rate"], request["delay_s"]
        answer = [
            {
                "passed_bytes": way.passed_bytes,
                "passed_packets": way.passed_packets,
                "lost_packets": way.lost_packets,
                "late_s": way.late_s(0.99),
            }
            for way in self._ways
        ]
        control.send(json.dumps(answer).encode())
        return True


def called_port(packet: bytes) -> int:
    """Return the TCP port of an IPv4 packet that opens a connection; 0 for other packets."""
    if len(packet) < 40 or packet[0] >> 4 != 4 or packet[9] != socket.IPPROTO_TCP:
        return 0
    segment = packet[4 * (packet[0] & 0xF) :]
    if segment[13] & (_SYN | _ACK) != _SYN:
        return 0
    return int.from_bytes(segment[2:4], "big")


if __name__ == "__main__":
    main()
