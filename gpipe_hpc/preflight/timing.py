"""How long a line between two ranks takes: the latency, and the bandwidth each way.

The lower rank leads and reads its own clock alone, so clocks need not agree: what it times goes
there and back. A message of n bytes takes a latency and n over the bandwidth; the answer to it, a
latency. Sizes grow as long as the line is quick, so a slow one is not kept busy for long.
"""

import math
import time
from collections.abc import Callable
from enum import IntEnum
from functools import partial
from typing import Final, NamedTuple

import torch

from gpipe_hpc.device.device import Device
from gpipe_hpc.preflight.lines import Line

_NUM_WARMING: Final = 3
_LEAST_TIMED, _MOST_TIMED = 3, 25
_ENOUGH_S: Final = 0.03  # spent on more than the least
# An answer has to wake several threads at both ends: on a busy host few of them come undisturbed.
_MOST_ANSWERS: Final = 400
_ENOUGH_ANSWERS_S: Final = 0.25
_LONG_S: Final = 0.1  # a message that takes so long is the greatest
_TOO_LONG_S: Final = 2.0  # one that takes so long is not sent again
_STEP: Final = 8  # from one size to the next
_NUM_SIZES: Final = 3
_LEAST_S: Final = 1e-9


CHANNELS: Final = "boundaries"
SUMS: Final = "sums"


class Way(NamedTuple):
    """What one way from a rank to another takes; `carries`: boundaries or sums.

    Two ranks of a host may share memory for the one and have a connection for the other.
    """

    source: int
    destination: int
    latency_s: float
    bytes_per_s: float
    carries: str = CHANNELS


class _Order(IntEnum):
    """What the leading rank tells the other to do."""

    END = 0
    ANSWER = 1
    TAKE = 2
    GIVE = 3


def sizes_up_to(most_bytes: int) -> list[int]:
    """Return the sizes of messages that are tried, ascending."""
    found = {max(1, most_bytes // _STEP**step) for step in range(_NUM_SIZES)}
    return sorted(found)


def time_line(
    line: Line, device: Device, own: int, peer: int, most_bytes: int
) -> tuple[Way, Way] | None:
    """Time a line at both of its ends; return the ways there and back at the lower rank."""
    end = _End(line, device)
    if own > peer:
        end.follow()
        return None
    latency_s, forth, back = end.lead(sizes_up_to(most_bytes))
    return Way(own, peer, latency_s, forth), Way(peer, own, latency_s, back)


def _quickest(
    timed: Callable[[], float], most: int = _MOST_TIMED, enough_s: float = _ENOUGH_S
) -> float:
    """Return the least of several times: what else a host does makes them longer, never shorter."""
    began_s, times = time.perf_counter(), [timed()]
    while len(times) < _LEAST_TIMED or (
        len(times) < most and time.perf_counter() - began_s < enough_s
    ):
        times.append(timed())
    return min(times)


class _End:
    """One end of a line."""

    def __init__(self, line: Line, device: Device) -> None:
        self._line, self._device = line, device

    def lead(self, sizes: list[int]) -> tuple[float, float, float]:
        """Return the latency, and the bandwidths there and back."""
        for _ in range(_NUM_WARMING):
            self._timed(self._ask)
        ask = partial(self._timed, self._ask)
        latency_s = _quickest(ask, _MOST_ANSWERS, _ENOUGH_ANSWERS_S) / 2
        forth, back = (self._bandwidth(move, sizes, latency_s) for move in (self._push, self._pull))
        self._tell(_Order.END, 0)
        return latency_s, forth, back

    def follow(self) -> None:
        """Do as the leading rank tells, until it tells the end."""
        while True:
            order, num_bytes = self._hear(self._expect_word())
            match _Order(order):
                case _Order.END:
                    return
                case _Order.ANSWER:
                    self._tell(_Order.ANSWER, 0)
                case _Order.TAKE:
                    wait = self._line.expect(num_bytes, torch.uint8)
                    self._tell(_Order.ANSWER, 0)
                    wait()
                    self._device.synchronize()
                    self._tell(_Order.ANSWER, 0)
                case _Order.GIVE:
                    self._line.send(self._message(num_bytes))

    def _bandwidth(self, move: Callable[[int], float], sizes: list[int], latency_s: float) -> float:
        """Return the bytes a second of messages of the greatest size that is not too long."""
        best = 0.0
        for size in sizes:
            # The first of a size says what it is, and makes room.
            took_s = min(move(size), move(size))
            is_long = took_s - 2 * latency_s > _LONG_S
            is_last = is_long or size == sizes[-1]
            if is_last and took_s < _TOO_LONG_S:
                took_s = min(took_s, _quickest(partial(move, size)))
            # Of a message that is hardly more than a latency, little more is known than a bound.
            best = size / max(took_s - 2 * latency_s, took_s / 4, _LEAST_S)
            if is_last:
                break
        assert 0 < best < math.inf, f"{best} bytes a second"
        return best

    def _timed(self, work: Callable[[], None]) -> float:
        began_s = time.perf_counter()
        work()
        return time.perf_counter() - began_s

    def _ask(self) -> None:
        answer = self._expect_word()
        self._tell(_Order.ANSWER, 0)
        self._hear(answer)

    def _push(self, num_bytes: int) -> float:
        """Send a message, and wait until the other end says that it is there."""
        ready = self._expect_word()
        self._tell(_Order.TAKE, num_bytes)
        self._hear(ready)
        answer, message = self._expect_word(), self._message(num_bytes)
        self._device.synchronize()
        began_s = time.perf_counter()
        self._line.send(message)
        self._hear(answer)
        return time.perf_counter() - began_s

    def _pull(self, num_bytes: int) -> float:
        """Let the other end send a message."""
        wait = self._line.expect(num_bytes, torch.uint8)
        began_s = time.perf_counter()
        self._tell(_Order.GIVE, num_bytes)
        wait()
        self._device.synchronize()
        return time.perf_counter() - began_s

    def _message(self, num_bytes: int) -> torch.Tensor:
        return self._device.empty((num_bytes,), torch.uint8).zero_()

    def _tell(self, order: _Order, num_bytes: int) -> None:
        self._line.send(self._device.bring(torch.tensor([order, num_bytes])))

    def _expect_word(self) -> Callable[[], torch.Tensor]:
        return self._line.expect(2, torch.int64)

    def _hear(self, wait: Callable[[], torch.Tensor]) -> tuple[int, int]:
        order, num_bytes = self._device.fetch(wait()).tolist()
        return order, num_bytes
