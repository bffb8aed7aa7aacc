"""Measure latency and bandwidth of a connection between two ranks, in both directions.

The lower rank leads and measures round trips with its own clock, so clocks need not agree. A
message of n bytes takes the latency plus n divided by the bandwidth; its answer takes the latency.
Sizes grow as long as messages are fast, so slow links are not busy for long.
"""

import math
import time
from collections.abc import Callable
from enum import IntEnum
from functools import partial
from typing import Final, NamedTuple

import torch

from gpipe_hpc.device.device import Device
from gpipe_hpc.preflight.connections import PairConnection

_NUM_WARMING: Final = 3
_LEAST_TIMED, _MOST_TIMED = 3, 25
_ENOUGH_S: Final = 0.03  # spent on more than the least
# An answer wakes several threads at both ends, so on a busy host few are undisturbed.
_MOST_ANSWERS: Final = 400
_ENOUGH_ANSWERS_S: Final = 0.25
_LONG_S: Final = 0.1  # no larger messages are sent after one that takes longer
_TOO_LONG_S: Final = 2.0  # a message that takes longer is not repeated
_STEP: Final = 8  # ratio between message sizes
_NUM_SIZES: Final = 3
_LEAST_S: Final = 1e-9


CHANNELS: Final = "boundaries"
SUMS: Final = "sums"


class TimedLink(NamedTuple):
    """Measured link from one rank to another.

    `carries` is ``boundaries`` (stage boundaries) or ``sums`` (all-reduces): two ranks of a host
    may use shared memory for one and a connection for the other.
    """

    source: int
    destination: int
    latency_s: float
    bytes_per_s: float
    carries: str = CHANNELS


class _LinkCommand(IntEnum):
    """Commands that the leading rank sends to the other rank."""

    END = 0
    ANSWER = 1
    TAKE = 2
    GIVE = 3


def sizes_up_to(most_bytes: int) -> list[int]:
    """Return the message sizes to measure in bytes, ascending."""
    found = {max(1, most_bytes // _STEP**step) for step in range(_NUM_SIZES)}
    return sorted(found)


def time_line(
    line: PairConnection, device: Device, own: int, peer: int, most_bytes: int
) -> tuple[TimedLink, TimedLink] | None:
    """Measure a connection in both directions; both ranks call it.

    Returns the two directions on the lower rank, and None on the other rank.
    """
    end = _ConnectionEnd(line, device)
    if own > peer:
        end.follow()
        return None
    latency_s, forth, back = end.lead(sizes_up_to(most_bytes))
    return TimedLink(own, peer, latency_s, forth), TimedLink(peer, own, latency_s, back)


def _quickest(
    timed: Callable[[], float], most: int = _MOST_TIMED, enough_s: float = _ENOUGH_S
) -> float:
    """Return the minimum of repeated measurements in seconds; other load only makes them longer."""
    began_s, times = time.perf_counter(), [timed()]
    while len(times) < _LEAST_TIMED or (
        len(times) < most and time.perf_counter() - began_s < enough_s
    ):
        times.append(timed())
    return min(times)


class _ConnectionEnd:
    """One end of a connection that is being measured."""

    def __init__(self, line: PairConnection, device: Device) -> None:
        self._line, self._device = line, device

    def lead(self, sizes: list[int]) -> tuple[float, float, float]:
        """Measure as the leading rank; return latency, and bandwidths to the peer and back."""
        for _ in range(_NUM_WARMING):
            self._timed(self._round_trip)
        ask = partial(self._timed, self._round_trip)
        latency_s = _quickest(ask, _MOST_ANSWERS, _ENOUGH_ANSWERS_S) / 2
        forth, back = (self._bandwidth(move, sizes, latency_s) for move in (self._push, self._pull))
        self._send_order(_LinkCommand.END, 0)
        return latency_s, forth, back

    def follow(self) -> None:
        """Execute the commands of the leading rank until it sends END."""
        while True:
            order, num_bytes = self._receive_order(self._expect_order())
            match _LinkCommand(order):
                case _LinkCommand.END:
                    return
                case _LinkCommand.ANSWER:
                    self._send_order(_LinkCommand.ANSWER, 0)
                case _LinkCommand.TAKE:
                    wait = self._line.expect(num_bytes, torch.uint8)
                    self._send_order(_LinkCommand.ANSWER, 0)
                    wait()
                    self._device.synchronize()
                    self._send_order(_LinkCommand.ANSWER, 0)
                case _LinkCommand.GIVE:
                    self._line.send(self._message(num_bytes))

    def _bandwidth(self, move: Callable[[int], float], sizes: list[int], latency_s: float) -> float:
        """Return the bytes/s measured with the largest message that is not too slow."""
        best = 0.0
        for size in sizes:
            # The first message of a size sends a header and allocates buffers.
            took_s = min(move(size), move(size))
            is_long = took_s - 2 * latency_s > _LONG_S
            is_last = is_long or size == sizes[-1]
            if is_last and took_s < _TOO_LONG_S:
                took_s = min(took_s, _quickest(partial(move, size)))
            # For a message hardly slower than the latency, only a lower bound is known.
            best = size / max(took_s - 2 * latency_s, took_s / 4, _LEAST_S)
            if is_last:
                break
        assert 0 < best < math.inf, f"{best} bytes a second"
        return best

    def _timed(self, work: Callable[[], None]) -> float:
        began_s = time.perf_counter()
        work()
        return time.perf_counter() - began_s

    def _round_trip(self) -> None:
        answer = self._expect_order()
        self._send_order(_LinkCommand.ANSWER, 0)
        self._receive_order(answer)

    def _push(self, num_bytes: int) -> float:
        """Send a message; return the seconds until the peer has acknowledged it."""
        ready = self._expect_order()
        self._send_order(_LinkCommand.TAKE, num_bytes)
        self._receive_order(ready)
        answer, message = self._expect_order(), self._message(num_bytes)
        self._device.synchronize()
        began_s = time.perf_counter()
        self._line.send(message)
        self._receive_order(answer)
        return time.perf_counter() - began_s

    def _pull(self, num_bytes: int) -> float:
        """Request a message from the peer; return the seconds until it has arrived."""
        wait = self._line.expect(num_bytes, torch.uint8)
        began_s = time.perf_counter()
        self._send_order(_LinkCommand.GIVE, num_bytes)
        wait()
        self._device.synchronize()
        return time.perf_counter() - began_s

    def _message(self, num_bytes: int) -> torch.Tensor:
        return self._device.empty((num_bytes,), torch.uint8).zero_()

    def _send_order(self, order: _LinkCommand, num_bytes: int) -> None:
        self._line.send(self._device.to_device(torch.tensor([order, num_bytes])))

    def _expect_order(self) -> Callable[[], torch.Tensor]:
        return self._line.expect(2, torch.int64)

    def _receive_order(self, wait: Callable[[], torch.Tensor]) -> tuple[int, int]:
        order, num_bytes = self._device.to_host(wait()).tolist()
        return order, num_bytes
