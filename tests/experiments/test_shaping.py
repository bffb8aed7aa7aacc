"""When packets are due on a link, by a clock of the tests."""

import pytest

from experiments.two_hosts.probe import rate_of
from experiments.two_hosts.shaping import Direction

PACKET = bytes(1000)  # 1 ms at 8 Mbit/s


def direction(rate=8e6, delay_s=0.005, queue_bytes=10_000):
    return Direction(rate, delay_s, queue_bytes)


def arrivals(way):
    """Return when each waiting packet is due, by letting time pass from one to the next."""
    found = []
    while way.next_due_s is not None:
        due_s = way.next_due_s
        assert way.due(due_s - 1e-9) == []
        found += [due_s] * len(way.due(due_s))
    return found


def test_packets_follow_one_another_at_the_rate():
    way = direction()
    for _ in range(3):
        assert way.offer(PACKET, 10.0)
    assert arrivals(way) == pytest.approx([10.006, 10.007, 10.008])


def test_an_idle_link_saves_nothing_up():
    way = direction()
    way.offer(PACKET, 10.0)
    way.offer(PACKET, 20.0)
    assert arrivals(way) == pytest.approx([10.006, 20.006])


def test_packets_keep_their_order_and_content():
    way = direction()
    packets = [bytes([number]) * (number + 1) for number in range(20)]
    for packet in packets:
        way.offer(packet, 0.0)
    assert way.due(1.0) == packets
    assert way.passed_packets == 20 and way.passed_bytes == sum(map(len, packets))


def test_a_full_queue_loses_packets_and_has_room_again():
    way = direction(queue_bytes=3000)
    taken = [way.offer(PACKET, 0.0) for _ in range(6)]
    assert taken == [True, True, True, True, False, False]  # one on the wire, three waiting
    assert way.lost_packets == 2
    assert way.offer(PACKET, 0.002)
    assert len(way.due(1.0)) == 5


def test_no_rate_means_delay_alone():
    way = direction(rate=0.0, queue_bytes=0)
    for _ in range(100):
        assert way.offer(PACKET, 1.0)
    assert arrivals(way) == pytest.approx([1.005] * 100)


def test_a_cut_loses_what_is_under_way_and_what_comes():
    way = direction()
    way.offer(PACKET, 0.0)
    way.cut()
    assert not way.offer(PACKET, 0.001)
    assert way.due(1.0) == [] and way.next_due_s is None
    assert way.lost_packets == 2 and way.passed_bytes == 0
    way.restore()
    assert way.offer(PACKET, 2.0) and way.due(3.0) == [PACKET]


def test_lateness_is_bounded_by_what_99_of_100_keep():
    way = direction(rate=0.0, delay_s=0.0)
    for number in range(200):
        way.offer(PACKET, float(number))
        way.due(number + (0.010 if number == 7 else 0.0001))
    assert 0.0001 <= way.late_s(0.99) < 0.001
    assert 0.010 <= way.late_s(1.0) < 0.020


def test_a_stream_is_timed_by_its_second_half():
    """What fills the link at the start would make it look slower than it is."""
    moments = [(0.0, 0), (1.0, 10), (2.0, 1010), (3.0, 2010), (4.0, 3010)]
    assert rate_of(moments) == 8 * 1000
