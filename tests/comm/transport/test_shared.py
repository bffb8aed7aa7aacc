"""Channels in shared memory, both ends in one process."""

import gc
import os
import resource
import socket
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe_hpc.comm.transport.base import PlacedChannel
from gpipe_hpc.comm.transport.shared import SharedTransport, open_shared_transport
from gpipe_hpc.comm.transport.shared_channel import SharedReceiver, SharedSender
from gpipe_hpc.comm.world.threads import run_on_threads
from gpipe_hpc.schedule import Channel

FORWARD = PlacedChannel(Channel(0, 1, 0), source_rank=0, destination_rank=1, tag=0)
BACKWARD = PlacedChannel(Channel(1, 0, 0), source_rank=1, destination_rank=0, tag=1)


class Ends:
    """Two ranks with a channel each way, in one process."""

    def __init__(self, timeout_s=10.0):
        senders, receivers = ([], []), ([], [])
        for channel in (FORWARD, BACKWARD):
            source, destination = socket.socketpair()
            for connection in (source, destination):
                connection.settimeout(timeout_s)
            senders[channel.source_rank].append(SharedSender(channel, source))
            receivers[channel.destination_rank].append(SharedReceiver(channel, destination))
        self.sender, self.receiver = senders[0][0], receivers[1][0]
        self.ranks = [
            SharedTransport(mine, theirs) for mine, theirs in zip(senders, receivers, strict=True)
        ]

    def send(self, nest, microbatch=0, num_samples=2):
        self.ranks[0].send(FORWARD, "training", microbatch, nest, num_samples)

    def get(self, microbatch=0):
        self.ranks[1].post(FORWARD, "training", microbatch)
        return self.ranks[1].wait(FORWARD, "training", microbatch)

    def move(self, nest):
        self.send(nest)
        return self.get().nest

    @property
    def num_slots(self):
        """Return how many slots the receiver has mapped."""
        return len(self.receiver._slots)


@pytest.fixture
def ends():
    made = Ends()
    yield made
    for rank in made.ranks:
        rank.close()


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.bool, torch.int64, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (4, 5)], ids=str)
def test_every_kind_of_tensor_arrives_again_and_again(ends, dtype, shape):
    """A tensor without elements arrived once only: the second had no slot to be found in."""
    for value in range(3):
        sent = torch.full(shape, value, dtype=dtype)
        got = ends.move(sent)
        assert (got.dtype, got.shape) == (dtype, sent.shape)
        assert torch.equal(got, sent)


@pytest.mark.parametrize("size", [1, 4])
def test_a_tensor_keeps_the_order_of_its_memory(ends, size):
    """Convolutions in channels_last got the other order, and so other kernels, behind a cut."""
    sent = torch.arange(6.0 * size**2).view(2, 3, size, size)
    sent = sent.contiguous(memory_format=torch.channels_last)
    for other in (sent, sent.contiguous(), sent[:, :2], sent):
        got = ends.move(other)
        assert torch.equal(got, other)
        assert (
            got.is_contiguous(memory_format=torch.channels_last) or other.stride() != sent.stride()
        )
        assert got.stride() == other.clone().stride()
        assert got._base is None


def test_nests_keep_their_values_and_what_requires_grad(ends):
    for step in range(3):
        sent = {
            "x": torch.full((2,), float(step), requires_grad=True),
            "mask": torch.tensor(step > 0),
            "more": (None, [torch.zeros(0), "text"], step),
        }
        got = ends.move(sent)
        assert got["x"].requires_grad and got["x"].is_leaf and not got["mask"].requires_grad
        assert got["x"].tolist() == [step, step] and got["mask"].item() == (step > 0)
        assert got["more"][0] is None and got["more"][1][1:] == ["text"] and got["more"][2] == step


def test_empty_micro_batches_take_no_slot(ends):
    for microbatch in range(3):
        ends.send(torch.ones(4), microbatch, num_samples=0)
        assert ends.get(microbatch) == (None, 0)
    assert ends.num_slots == 0
    assert ends.move(torch.ones(4)).sum() == 4


structures = st.sampled_from(
    [
        lambda v: torch.full((2, 3), v),
        lambda v: torch.full((700,), v),
        lambda v: (torch.full((1,), v), None),
        lambda v: {"x": torch.full((3000,), v), "flag": True},
        lambda v: torch.zeros(0, 2),
        lambda v: None,
    ]
)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.one_of(st.tuples(structures, st.integers(0, 9)), st.just("get")), max_size=40))
def test_any_sequence_arrives_in_order(events):
    """Sends run ahead as far as they like; what was received is held to the end."""
    ends, sent, got = Ends(), [], []
    for event in events:
        if event != "get":
            sent.append(event[0](float(event[1])))
            ends.send(sent[-1], microbatch=len(sent))
        elif len(got) < len(sent):
            got.append(ends.get(len(got) + 1).nest)
    got += [ends.get(place + 1).nest for place in range(len(got), len(sent))]
    assert [repr(nest) for nest in got] == [repr(nest) for nest in sent]
    for rank in ends.ranks:
        rank.finish()
        rank.close()


def test_a_header_travels_once(ends):
    with_headers = []
    learn = ends.receiver._catalogue.learn
    ends.receiver._catalogue.learn = lambda structure: with_headers.append(1) or learn(structure)
    for step in range(6):
        ends.move(torch.ones(2 + step % 2))
    assert len(with_headers) == 2


def test_a_slot_is_reused_once_its_tensors_are_gone(ends):
    gc.disable()
    try:
        for step in range(20):
            assert ends.move(torch.full((1000,), float(step)))[0] == step
        assert ends.num_slots == 1
        held = [ends.move(torch.full((1000,), float(step))) for step in range(20)]
        assert [tensor[0].item() for tensor in held] == list(range(20)), "held and overwritten"
        assert ends.num_slots == 20
        del held
        for _ in range(20):
            ends.move(torch.ones(1000))
        assert ends.num_slots == 20
    finally:
        gc.enable()


def test_larger_messages_replace_slots_on_both_sides(ends):
    for size in (10, 10_000, 100, 100_000, 10_000, 1_000_000, 10):
        assert ends.move(torch.ones(size)).sum() == size
    assert ends.num_slots == 1
    assert ends.receiver._slots.keys() == {slot.index for slot in ends.sender._pool._used}


def test_views_and_graphs_keep_a_slot(ends):
    leaf = ends.move(torch.ones(100, requires_grad=True))
    kept = (leaf[:3] * 2).sum()  # autograd keeps the view's memory
    del leaf
    for step in range(5):
        ends.move(torch.full((100,), float(step)))
    assert kept.item() == 6
    assert ends.num_slots == 2


def test_a_send_never_waits_for_room(ends):
    """Beyond some hundred messages a socket is full; looped tables once stood still there."""
    count = 2000
    for microbatch in range(count):
        ends.send(torch.full((5,), float(microbatch)), microbatch)
    assert ends.sender.num_waiting > 1000
    for microbatch in range(count):
        assert ends.get(microbatch).nest[0] == microbatch
        if microbatch % 100 == 99:
            ends.sender.flush()
    assert ends.sender.num_waiting == 0
    ends.ranks[0].finish()


def test_what_waits_to_be_sent_keeps_the_value_it_had(ends):
    """The next micro-batch makes new tensors: those that were sent are never written to."""
    sent = [torch.full((3,), float(n)) for n in range(800)]
    for microbatch, tensor in enumerate(sent):
        ends.send(tensor, microbatch)
    del sent, tensor
    got = []
    for microbatch in range(800):
        got.append(ends.get(microbatch).nest)
        ends.sender.flush()
    assert [tensor[0].item() for tensor in got] == list(range(800))


def test_two_ranks_that_both_send_first_do_not_stand_still(ends):
    """Each sends a thousand messages, then receives a thousand: as in a looped table."""
    count, sums = 1000, [0.0, 0.0]

    def run(rank):
        mine, theirs = (FORWARD, BACKWARD)[:: 1 - 2 * rank]
        for microbatch in range(count):
            ends.ranks[rank].send(mine, "training", microbatch, torch.ones(50), 2)
        for microbatch in range(count):
            message = ends.ranks[rank].wait(theirs, "training", microbatch)
            sums[rank] += message.nest.sum().item()
        ends.ranks[rank].finish()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sums == [50.0 * count] * 2


def test_more_releases_than_a_socket_takes_all_reach_the_sender(ends):
    """They were words of the socket once, kept back while it was full."""
    count, held = 1500, []
    for microbatch in range(count):
        ends.send(torch.ones(5), microbatch)
        held.append(ends.get(microbatch).nest)
    assert ends.num_slots == count
    held.clear()
    for microbatch in range(count):
        ends.send(torch.ones(5), microbatch)
        held.append(ends.get(microbatch).nest)
    assert ends.num_slots == count


def test_tensors_outlive_the_channel_and_the_sender():
    ends = Ends()
    got = [ends.move(torch.full((3,), float(value))) for value in range(3)]
    for rank in ends.ranks:
        rank.close()
    del ends, rank
    gc.collect()
    assert [tensor[0].item() for tensor in got] == [0.0, 1.0, 2.0]
    got.clear()


def test_a_descriptor_that_does_not_arrive_is_an_error(ends):
    """Regression: the uninitialized memory of a new tensor was returned as the message."""
    ends.send(torch.ones(4))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
    try:
        with pytest.raises(ConnectionError, match=r"descriptor did not arrive.*ulimit"):
            ends.get()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_another_micro_batch_than_expected_is_noticed(ends):
    ends.send(torch.ones(1), microbatch=1)
    with pytest.raises(
        ConnectionError, match=r"micro-batch 0, got message 0 with micro-batch 1.*same table"
    ):
        ends.get(0)


def test_a_closed_connection_is_told_at_once():
    ends = Ends(timeout_s=60)
    begin = time.monotonic()
    threading.Timer(0.1, ends.ranks[0].close).start()
    with pytest.raises(ConnectionError, match="lost rank 0"):
        ends.get()
    with pytest.raises(ConnectionError, match="lost rank 1"):
        ends.send(torch.ones(1))
    assert time.monotonic() - begin < 30


def test_silence_is_a_timeout():
    ends = Ends(timeout_s=0.2)
    with pytest.raises(TimeoutError, match="rank 0"):
        ends.get()
    for microbatch in range(1000):
        ends.send(torch.ones(1), microbatch)
    with pytest.raises(TimeoutError, match="timed out waiting for rank 1"):
        ends.ranks[0].finish()
    with pytest.raises(TimeoutError, match="timed out waiting for rank 1"):
        ends.ranks[0].wait(BACKWARD, "training", 0)


def num_descriptors():
    return len(os.listdir("/proc/self/fd"))


def test_ends_that_are_dropped_leave_no_descriptor():
    gc.collect()
    before = num_descriptors()
    ends = Ends()
    for microbatch in range(1000):  # with one half sent
        ends.send(torch.ones(1), microbatch)
    assert num_descriptors() > before
    for rank in ends.ranks:
        rank.close()
    del ends, rank
    gc.collect()
    assert num_descriptors() == before


@pytest.mark.parametrize("length", [10, 150])
def test_it_opens_under_any_temporary_folder_and_leaves_nothing_there(
    tmp_path, length, monkeypatch
):
    """The address of a Unix socket has 108 bytes; the temporary folder of a job may have more."""
    folder = tmp_path / ("d" * length)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    others = set(Path("/tmp").glob("gpipe_hpc_*"))

    def body(world):
        everybody = world.group([(0, 1)])

        def exchange(text, peers):
            assert peers == {1 - world.rank}
            return dict(enumerate(everybody.all_gather_object(text)))

        transport = open_shared_transport([FORWARD, BACKWARD], world.rank, exchange, 10.0)
        mine, theirs = (FORWARD, BACKWARD)[:: 1 - 2 * world.rank]
        transport.send(mine, "training", 0, torch.tensor(float(world.rank)), 1)
        return transport.wait(theirs, "training", 0).nest.item()

    assert run_on_threads(2, body) == [1.0, 0.0]
    assert list(folder.iterdir()) == []
    assert set(Path("/tmp").glob("gpipe_hpc_*")) <= others
