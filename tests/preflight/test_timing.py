"""What two ranks time of the line between them."""

import time
from collections import deque
from threading import Condition

import pytest

from gpipe_hpc.comm.transport.base import PlacedChannel
from gpipe_hpc.comm.world.threads import run_on_threads
from gpipe_hpc.device.device import HostDevice
from gpipe_hpc.preflight.connections import ChannelConnection, GroupConnection
from gpipe_hpc.preflight.timing import sizes_up_to, time_line
from gpipe_hpc.schedule import Channel

MOST = 1_000_000


class SlowLine:
    """A line in memory with a latency, and a bandwidth of its own for each direction."""

    def __init__(self, latency_s, bytes_per_s, out, into, changed):
        self.latency_s, self.bytes_per_s = latency_s, bytes_per_s
        self.out, self.into, self.changed = out, into, changed
        self.sizes = []

    def send(self, message):
        self.sizes.append(message.nbytes)
        due_s = time.monotonic() + self.latency_s + message.nbytes / self.bytes_per_s
        with self.changed:
            self.out.append((due_s, message.clone()))
            self.changed.notify_all()

    def expect(self, num_elements, dtype):
        def wait():
            with self.changed:
                assert self.changed.wait_for(lambda: self.into, 30)
                due_s, message = self.into.popleft()
            assert (message.numel(), message.dtype) == (num_elements, dtype)
            time.sleep(max(0.0, due_s - time.monotonic()))
            return message

        return wait


def pair_of_lines(latency_s, forth, back):
    one, other, changed = deque(), deque(), Condition()
    return [
        SlowLine(latency_s, forth, one, other, changed),
        SlowLine(latency_s, back, other, one, changed),
    ]


def test_latency_and_both_bandwidths_are_found():
    """Sleeps are never shorter than asked for: a busy machine makes the line slower, not faster."""
    lines = pair_of_lines(0.02, 5e6, 2e7)

    def task(world):
        return time_line(lines[world.rank], HostDevice(), world.rank, 1 - world.rank, MOST)

    (forth, back), nothing = run_on_threads(2, task)
    assert nothing is None
    assert (forth.source, forth.destination, back.source, back.destination) == (0, 1, 1, 0)
    assert forth.latency_s == back.latency_s
    assert 0.02 <= forth.latency_s < 0.04
    assert 0.3 * 5e6 < forth.bytes_per_s < 1.1 * 5e6
    assert 0.3 * 2e7 < back.bytes_per_s < 1.1 * 2e7


class BusyLine(SlowLine):
    """A line whose host is busy: its messages are late, except few of them."""

    num_sent = 0

    def send(self, message):
        self.num_sent += 1
        self.latency_s = 0.0 if self.num_sent % 8 == 0 else 0.02
        super().send(message)


def test_one_answer_that_comes_undisturbed_tells_the_latency():
    """After 30 ms of answers that were late, the latency of a loopback was 2.39 ms.

    Here that would be three answers, and half of the 20 ms by which each is late.
    """
    one, other, changed = deque(), deque(), Condition()
    lines = [
        SlowLine(0.0, 1e9, one, other, changed),
        BusyLine(0.02, 1e9, other, one, changed),
    ]

    def task(world):
        return time_line(lines[world.rank], HostDevice(), world.rank, 1 - world.rank, MOST)

    (forth, _), _ = run_on_threads(2, task)
    assert forth.latency_s < 0.009


def test_a_slow_line_is_not_kept_busy_for_long():
    lines = pair_of_lines(0.0, 1e5, 1e9)
    run_on_threads(2, lambda w: time_line(lines[w.rank], HostDevice(), w.rank, 1 - w.rank, MOST))
    assert max(lines[0].sizes) == sizes_up_to(MOST)[0]
    assert max(lines[1].sizes) == MOST


@pytest.mark.parametrize("most", [1, 7, 100, 4_000_000])
def test_sizes_grow_to_the_greatest(most):
    sizes = sizes_up_to(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    assert sizes[0] >= 1


def channels():
    return [
        PlacedChannel(Channel(0, 1, 0), 0, 1, tag=0),
        PlacedChannel(Channel(1, 0, 0), 1, 0, tag=1),
    ]


def time_both(world):
    """Time a pair's channels and its group, one after the other."""
    there, back = channels()
    transport = world.transport([there, back])
    ends = (there, back) if world.rank == 0 else (back, there)
    peer = 1 - world.rank
    found = [time_line(ChannelConnection(transport, *ends), world.device, world.rank, peer, MOST)]
    transport.finish()
    group = world.group([(0, 1)])
    line = GroupConnection(group, peer, world.device)
    found.append(time_line(line, world.device, world.rank, peer, MOST))
    return found


def test_channels_and_groups_are_lines():
    (of_channels, of_group), others = run_on_threads(2, time_both)
    assert others == [None, None]
    for forth, back in (of_channels, of_group):
        assert (forth[:2], back[:2]) == ((0, 1), (1, 0))
        assert forth.latency_s > 0
        assert min(forth.bytes_per_s, back.bytes_per_s) > 1e5
