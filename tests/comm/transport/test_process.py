"""The protocol between processes, over networks that behave as Gloo and NCCL do."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpipe_hpc.comm.transport.base import PlacedChannel
from gpipe_hpc.comm.transport.outbox import Outbox
from gpipe_hpc.comm.transport.payload import Payload
from gpipe_hpc.comm.transport.process import ChannelEnd, ProcessTransport
from gpipe_hpc.device.device import HostDevice
from gpipe_hpc.schedule import Channel
from tests.comm.transport.networks import LateDevice, Network

CHANNEL = PlacedChannel(Channel(0, 1, 0), source_rank=0, destination_rank=1, tag=0)
PROMPT, LATE, DIRECT = ("prompt",), ("late",), ("device",)

# An accelerator whose boundaries go over Gloo, and one with a backend of its own.
STAGED, OWN = "staged", "own"


class Ends:
    """Two processes with one channel between them; their device has a backend if `kind` is OWN."""

    def __init__(self, kind=None, *of_the_host):
        self.network = Network(limit_s=5.0)
        self.devices = [
            HostDevice() if kind is None else LateDevice(*of_the_host) for _ in range(2)
        ]
        self.payloads = [Payload(device) for device in self.devices]
        lanes = [self.network.lane(*key) for key in (PROMPT, LATE, DIRECT)]
        self.source, self.destination = (
            ProcessTransport(
                [ChannelEnd(CHANNEL, 1 - rank, *(lanes if kind == OWN else lanes[:2]))],
                self.payloads[rank],
                Outbox(self.payloads[rank]),
            )
            for rank in range(2)
        )

    def send(self, nest, microbatch=0, lane="training", num_samples=2):
        """Move one nest; return it, and how many parts went on each lane from host to host."""
        nest, (prompt, late, _) = self.send_over(nest, microbatch, lane, num_samples)
        return nest, (prompt, late)

    def send_over(self, nest, microbatch=0, lane="training", num_samples=2):
        """Move one nest; return it, and how many parts went on each lane."""
        before = len(self.network.started)
        self.destination.post(CHANNEL, lane, microbatch)
        self.source.send(CHANNEL, lane, microbatch, nest, num_samples)
        got = self.destination.wait(CHANNEL, lane, microbatch)
        assert got.num_samples == num_samples
        self.source.finish()
        lanes = [key for key, _ in self.network.started[before:]]
        return got.nest, tuple(lanes.count(key) for key in (PROMPT, LATE, DIRECT))

    def sent_on(self, key):
        """Return the sizes in bytes of all that went on a lane."""
        return [size for lane, size in self.network.started if lane == key]


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


@pytest.mark.parametrize("kind", [None, STAGED, OWN])
@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).view(2, 3).t(),
        torch.arange(120.0).view(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.arange(6.0).view(2, 3, 1, 1).contiguous(memory_format=torch.channels_last),
        torch.arange(24.0).view(4, 6)[:, ::2],
        torch.arange(48.0).view(2, 3, 8).transpose(0, 2)[1:3],
        torch.ones(3).expand(2, 3),
    ],
    ids=["transposed", "channels_last", "channels_last_1x1", "slice", "cut", "expanded"],
)
def test_a_tensor_keeps_the_order_of_its_memory(kind, tensor):
    """Convolutions in channels_last got the other order, and so other kernels, behind a cut."""
    ends = Ends(kind)
    for step in range(3):
        nest, _ = ends.send(tensor + step)
        assert torch.equal(nest, tensor + step)
        assert nest.stride() == (tensor + step).stride()
    nest, _ = ends.send(tensor)
    assert torch.equal(nest, tensor)
    ends.network.assert_quiet()


@pytest.mark.parametrize("kind", [None, STAGED, OWN])
def test_what_has_no_elements_needs_no_message(kind):
    ends = Ends(kind)
    for _ in range(3):
        nest, parts = ends.send_over((torch.ones(0, 3), torch.ones(2)))
        assert nest[0].shape == (0, 3) and nest[1].tolist() == [1, 1]
    assert sum(parts) == 2
    ends.network.assert_quiet()


def test_a_device_with_a_backend_gets_what_it_has_posted_over_it_and_the_rest_by_way_of_hosts():
    ends = Ends(OWN)
    assert ends.send_over(torch.ones(3))[1] == (1, 2, 0)  # nobody could post it
    assert ends.send_over(torch.full((3,), 2.0))[1] == (1, 0, 1)
    nest, parts = ends.send_over(torch.full((5,), 4.0))
    assert nest.tolist() == [4.0] * 5
    assert parts == (1, 2, 1)  # the filler of what was posted keeps the queue in order
    nest, _ = ends.send_over(torch.full((5,), 6.0))
    assert nest.tolist() == [6.0] * 5
    ends.network.assert_quiet()


@pytest.mark.parametrize(
    "dtype", [torch.int16, torch.uint16, torch.uint32, torch.complex64, torch.bool, torch.bfloat16]
)
def test_a_backend_of_a_device_is_given_bytes(dtype):
    """NCCL has no type for int16 and the unsigned ones, so such a boundary was refused."""
    ends = Ends(OWN)
    for value in (0, 1, 1):
        nest, parts = ends.send_over(torch.full((3, 2), value).to(dtype))
        assert nest.dtype == dtype and torch.equal(nest, torch.full((3, 2), value).to(dtype))
    assert parts == (1, 0, 1)


@pytest.mark.parametrize(("kind", "own"), [(STAGED, 0), (OWN, 1)])
def test_a_message_says_which_of_its_tensors_lie_on_the_host(kind, own):
    """A layer that returns one sent it over Gloo, and the receiver waited for it over NCCL."""
    ends = Ends(kind, torch.int64)
    for step in range(4):
        boundary = (torch.full((3,), float(step)), torch.full((2,), step))
        nest, parts = ends.send_over(boundary)
        assert nest[0].tolist() == [step] * 3 and nest[1].tolist() == [step] * 2
    assert parts == (3 - own, 0, own)
    assert ends.payloads[0].pool.num_made == ends.payloads[1].pool.num_made == 1
    # The same shape and dtype, on the other side.
    ends.devices[0].of_the_host = (torch.float32,)
    assert ends.send_over((torch.zeros(3), torch.full((2,), 9)))[0][1].tolist() == [9, 9]
    ends.network.assert_quiet()


@pytest.mark.parametrize("kind", [STAGED, OWN])
def test_pinned_memory_is_used_again(kind):
    """It was allocated for each message."""
    ends = Ends(kind)
    for step in range(20):
        values = [torch.full((100,), float(step)), torch.full((50 + step,), float(step))]
        nest, _ = ends.send(values)
        assert [part.tolist() for part in nest] == [part.tolist() for part in values]
    assert max(payload.pool.num_made for payload in ends.payloads) <= 4


def test_no_more_streams_are_made_than_one_for_each_direction():
    ends = Ends(STAGED)
    for _ in range(3):
        ends.send(torch.ones(2))
    assert [len(device.streams) for device in ends.devices] == [1, 1]


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
    for kind in (None, STAGED, OWN):
        ends, seen = Ends(kind), set()
        for nest, microbatch, lane in messages:
            got, (_, late) = ends.send(nest, microbatch, lane)
            assert repr(got) == repr(nest)
            is_new = repr(structure_of(nest)) not in seen
            seen.add(repr(structure_of(nest)))
            assert late in range(is_new, is_new + 3)
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
    ends.source.send(CHANNEL, "training", 0, torch.ones(1), 1)
    for sends, _ in ends.network.waiting.values():
        for lost in sends:
            lost.is_done = True
        sends.clear()
    ends.source.send(CHANNEL, "training", 0, torch.ones(1), 1)
    ends.destination.post(CHANNEL, "training", 0)
    with pytest.raises(ConnectionError, match=r"expected message 1 .*same table"):
        ends.destination.wait(CHANNEL, "training", 0)


def test_another_microbatch_than_posted_is_noticed():
    ends = Ends()
    ends.destination.post(CHANNEL, "training", 0)
    ends.source.send(CHANNEL, "training", 1, torch.ones(1), 1)
    with pytest.raises(ConnectionError, match=r"micro-batch 0, got message 0 with micro-batch 1"):
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


@pytest.mark.parametrize(
    ("text", "kind"),
    [("Timed out waiting 600000ms", TimeoutError), ("Connection closed by peer", ConnectionError)],
)
def test_a_failed_wait_says_who_it_waited_for(text, kind, monkeypatch):
    def fail(work):
        raise RuntimeError(text)

    ends = Ends()
    ends.destination.post(CHANNEL, "training", 0)
    monkeypatch.setattr("tests.comm.transport.networks.NetworkWork.wait", fail)
    with pytest.raises(kind, match="rank 0.*" + text):
        ends.destination.wait(CHANNEL, "training", 0)
