"""The protocol between processes, over a network that behaves as Gloo does.

A posted receive matches the next send on its lane, and both must have the same size.
"""

from collections import defaultdict
from itertools import count

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpipe_hpc.comm.transport.base import PlacedChannel
from gpipe_hpc.comm.transport.payload import Lane
from gpipe_hpc.comm.transport.process import Link, ProcessTransport
from gpipe_hpc.schedule import Channel

CHANNEL = PlacedChannel(Channel(0, 1, 0), source_rank=0, destination_rank=1, tag=0)
PROMPT, LATE = Lane(None, 0), Lane(None, 1)


class Network:
    """Lanes in memory: the outbox of the sender and the payload of the receiver."""

    def __init__(self):
        self.sent = defaultdict(list)
        self.num_posted = defaultdict(count)
        self.message = []  # (lane, bytes) of each part of the last message

    def put(self, peer, parts, payload):
        assert peer == 1 and payload is self
        self.message = [(lane, tensor.nbytes) for lane, tensor in parts]
        for lane, tensor in parts:
            assert tensor.is_contiguous()
            self.sent[lane].append(tensor.clone())

    def drain(self):
        pass

    def receive_word(self, lane, peer, length, dtype=torch.int64):
        return self._post(lane, peer, (length,), dtype)

    def receive(self, lane, peer, meta):
        return self._post(lane, peer, meta.shape, meta.dtype)

    def _post(self, lane, peer, shape, dtype):
        assert peer == 0
        return Posted(self, lane, next(self.num_posted[lane]), torch.Size(shape), dtype)

    def assert_quiet(self):
        """Everything that was sent has been received."""
        for lane, tensors in self.sent.items():
            assert next(self.num_posted[lane]) == len(tensors)


class Posted:
    def __init__(self, network, lane, place, shape, dtype):
        self.network, self.lane, self.place = network, lane, place
        self.shape, self.dtype = shape, dtype

    def wait(self):
        tensor = self.network.sent[self.lane][self.place]
        assert (tensor.shape, tensor.dtype) == (self.shape, self.dtype), "Gloo would abort here"
        return tensor


class Ends:
    """Two processes with one channel between them."""

    def __init__(self):
        self.network = Network()
        self.source, self.destination = (
            ProcessTransport(
                rank,
                [Link(CHANNEL, 1 - rank, PROMPT, LATE)],
                self.network,
                self.network,
                torch.device("cpu"),
            )
            for rank in range(2)
        )

    def send(self, nest, microbatch=0, lane="training", num_samples=2):
        """Move one nest; return it, and how many parts went on each lane."""
        self.destination.post(CHANNEL, lane, microbatch)
        self.source.send(CHANNEL, lane, microbatch, nest, num_samples)
        got = self.destination.wait(CHANNEL, lane, microbatch)
        assert got.num_samples == num_samples
        lanes = [lane for lane, _ in self.network.message]
        return got.nest, (lanes.count(PROMPT), lanes.count(LATE))


def test_header_travels_once_and_then_everything_is_prompt():
    ends = Ends()
    nest, parts = ends.send(torch.ones(2, 3))
    assert nest.tolist() == torch.ones(2, 3).tolist()
    assert parts == (1, 2)  # the word; header and tensor
    for _ in range(3):
        assert ends.send(torch.zeros(2, 3))[1] == (2, 0)  # word and tensor, both posted ahead


def test_structure_that_another_microbatch_has_shown_needs_no_header():
    ends = Ends()
    assert ends.send(torch.ones(2), microbatch=0)[1] == (1, 2)
    assert ends.send(torch.ones(2), microbatch=1)[1] == (1, 1)
    assert ends.send(torch.ones(2), microbatch=1, lane="evaluation")[1] == (1, 1)
    assert ends.send(torch.ones(2), microbatch=1)[1] == (2, 0)


def test_change_fills_what_was_posted_and_then_nothing_is_posted_in_vain():
    ends = Ends()
    for _ in range(2):
        ends.send((torch.ones(2), torch.ones(3)))
    nest, parts = ends.send(torch.full((4,), 7.0))
    assert nest.tolist() == [7.0] * 4
    assert parts == (3, 2)  # word and two fillers; header and tensor
    sizes = range(5, 9)
    assert [ends.send(torch.ones(n))[1] for n in sizes] == [(1, 2)] * 4  # new each time: no filler
    assert [ends.send(torch.ones(n))[1] for n in sizes] == [(1, 1)] * 4  # known: no header either
    assert [ends.send(torch.ones(8))[1] for _ in range(3)] == [(1, 1), (2, 0), (2, 0)]
    ends.network.assert_quiet()


def test_empty_microbatch_is_a_word():
    ends = Ends()
    assert ends.send(None, num_samples=0) == (None, (1, 0))
    assert ends.send(torch.ones(2), microbatch=1)[1] == (1, 2)
    assert ends.send(None, microbatch=1, num_samples=0) == (None, (2, 0))  # word and filler
    ends.network.assert_quiet()


def test_values_come_as_they_were_sent():
    ends = Ends()
    for step in range(3):
        nest, _ = ends.send({"step": step, "flag": step > 1, "none": None, "x": torch.ones(1)})
        assert (nest["step"], nest["flag"], nest["none"]) == (step, step > 1, None)
    ends.network.assert_quiet()


def test_what_is_not_contiguous_arrives_whole():
    tensor = torch.arange(6.0).view(2, 3).t()
    assert torch.equal(Ends().send(tensor)[0], tensor)


@st.composite
def nests(draw):
    shape = draw(st.sampled_from([(), (1,), (2, 2), (0, 3)]))
    tensor = torch.full(shape, draw(st.integers(0, 9)), dtype=draw(st.sampled_from(DTYPES)))
    return draw(st.sampled_from([tensor, (tensor, None), {"x": tensor, "n": 1}, [tensor, tensor]]))


DTYPES = [torch.float32, torch.int64]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.tuples(nests(), st.integers(0, 2), st.sampled_from(["training", "evaluation"])),
        max_size=20,
    )
)
def test_any_sequence_arrives_and_nothing_is_left(messages):
    ends, seen = Ends(), set()
    for nest, microbatch, lane in messages:
        got, _ = ends.send(nest, microbatch, lane)
        assert repr(got) == repr(nest)
        headers = [tensor for tensor in ends.network.sent[LATE] if tensor.dtype == torch.uint8]
        seen.add(repr(structure_of(nest)))
        assert len(headers) == len(seen)
    ends.network.assert_quiet()
    ends.source.finish()
    ends.destination.finish()


def structure_of(nest):
    if isinstance(nest, torch.Tensor):
        return "tensor", nest.shape, nest.dtype
    if isinstance(nest, dict):
        return {key: structure_of(value) for key, value in nest.items()}
    if isinstance(nest, tuple | list):
        return type(nest), [structure_of(value) for value in nest]
    return nest


def test_a_lost_message_is_noticed():
    ends = Ends()
    ends.send(torch.ones(1))
    arrived = {lane: len(tensors) for lane, tensors in ends.network.sent.items()}
    ends.source.send(CHANNEL, "training", 0, torch.ones(1), 1)
    for lane, number in arrived.items():
        del ends.network.sent[lane][number:]
    ends.source.send(CHANNEL, "training", 0, torch.ones(1), 1)
    ends.destination.post(CHANNEL, "training", 0)
    with pytest.raises(ConnectionError, match=r"expected message 1 .*same table"):
        ends.destination.wait(CHANNEL, "training", 0)


def test_another_microbatch_than_posted_is_noticed():
    ends = Ends()
    ends.destination.post(CHANNEL, "training", 0)
    ends.source.send(CHANNEL, "training", 1, torch.ones(1), 1)
    with pytest.raises(ConnectionError, match=r"micro-batch 0, got message 0 with 1"):
        ends.destination.wait(CHANNEL, "training", 0)


def test_waiting_out_of_order_is_a_broken_invariant():
    ends = Ends()
    ends.destination.post(CHANNEL, "training", 0)
    with pytest.raises(AssertionError, match="oldest receive is posted for 0"):
        ends.destination.wait(CHANNEL, "training", 1)


def test_a_receive_that_nobody_waits_for_is_a_broken_invariant():
    ends = Ends()
    ends.destination.post(CHANNEL, "training", 0)
    with pytest.raises(AssertionError, match="1 receives left over"):
        ends.destination.finish()


class Failing(Posted):
    def wait(self):
        raise RuntimeError(self.dtype)


@pytest.mark.parametrize(
    ("text", "kind"),
    [("Timed out waiting 600000ms", TimeoutError), ("Connection closed by peer", ConnectionError)],
)
def test_a_failed_wait_says_who_it_waited_for(text, kind):
    ends = Ends()
    ends.network._post = lambda *_: Failing(None, None, 0, None, text)
    ends.destination.post(CHANNEL, "training", 0)
    with pytest.raises(kind, match="rank 0.*" + text):
        ends.destination.wait(CHANNEL, "training", 0)
