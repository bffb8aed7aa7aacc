"""Slots of shared memory: layout, reuse, growth, giving up."""

import gc
import os
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe_hpc.comm.transport.slots import ALIGNMENT, Slot, SlotPool, aligned, message_bytes
from gpipe_hpc.comm.transport.wire import TensorMeta


def metas_of(tensors):
    return [TensorMeta(tuple(t.shape), t.dtype, False) for t in tensors]


def pair(size_bytes):
    """Return one slot as its two processes see it."""
    slot, descriptor = Slot.create(0, size_bytes)
    return slot, Slot.attach(0, descriptor)


DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]
SHAPES = [(), (1,), (3, 5), (0,), (2, 0, 3), (7,)]


@st.composite
def tensors(draw):
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(SHAPES))
    return (torch.arange(torch.Size(shape).numel()).reshape(shape) % 5).to(dtype)


@settings(max_examples=80, deadline=None)
@given(st.lists(tensors(), max_size=6), st.binary(max_size=200))
def test_any_message_comes_out_as_it_went_in(sent, header):
    size = message_bytes(len(header), metas_of(sent))
    source, destination = pair(size)
    source.write(header, metas_of(sent), sent)
    assert destination.read_header(len(header)) == header
    got = destination.tensors(len(header), metas_of(sent))
    assert [t.dtype for t in got] == [t.dtype for t in sent]
    assert [t.shape for t in got] == [t.shape for t in sent]
    assert all(map(torch.equal, got, sent))


def test_tensors_are_aligned_and_lie_in_place():
    sent = [torch.ones(3, dtype=torch.uint8), torch.ones(5), torch.ones(2, dtype=torch.float64)]
    source, destination = pair(message_bytes(7, metas_of(sent)))
    source.write(b"1234567", metas_of(sent), sent)
    got = destination.tensors(7, metas_of(sent))
    offsets = [tensor.data_ptr() - got[0].data_ptr() for tensor in got]
    assert offsets == [0, ALIGNMENT, 2 * ALIGNMENT]
    assert got[0].data_ptr() % ALIGNMENT == 0
    source.write(b"1234567", metas_of(sent), [tensor * 2 for tensor in sent])
    assert got[1].tolist() == [2.0] * 5, "it is the sender's memory"
    assert [aligned(n) for n in (0, 1, 64, 65)] == [0, 64, 64, 128]


def test_what_is_not_contiguous_conjugated_or_expanded_arrives_whole():
    odd = [
        torch.arange(6.0).view(2, 3).t(),
        torch.tensor([1 + 2j, 3 - 1j]).conj(),
        torch.tensor([2.0]).expand(4),
    ]
    source, destination = pair(message_bytes(0, metas_of(odd)))
    source.write(b"", metas_of(odd), odd)
    assert all(map(torch.equal, destination.tensors(0, metas_of(odd)), odd))


def test_a_slot_follows_every_change_of_structure():
    """Where the tensors lie is kept from message to message while they are the same."""
    several = [[torch.ones(5)], [torch.zeros(3, dtype=torch.int64), torch.full((2, 2), 7.0)], []]
    metas = [metas_of(sent) for sent in several]
    source, destination = pair(1000)
    for which in (0, 0, 1, 1, 0, 2, 1):
        for header in (b"", b"abc", b""):
            source.write(header, metas[which], several[which])
            got = destination.tensors(len(header), metas[which])
            assert destination.read_header(len(header)) == header
            assert len(got) == len(several[which]) and all(map(torch.equal, got, several[which]))


def test_a_slot_first_written_in_inference_mode_is_written_again_outside():
    metas = metas_of([torch.ones(3)])
    source, destination = pair(message_bytes(0, metas))
    with torch.inference_mode():
        source.write(b"", metas, [torch.ones(3)])
    source.write(b"", metas, [torch.full((3,), 2.0)])
    assert destination.tensors(0, metas)[0].tolist() == [2.0] * 3


def test_what_arrives_is_no_view_of_another_tensor():
    """A view may be refused where a tensor is changed in place."""
    source, destination = pair(1000)
    metas = metas_of([torch.ones(2, 3)])
    source.write(b"", metas, [torch.ones(2, 3)])
    (got,) = destination.tensors(0, metas)
    assert not got._is_view() and got.is_contiguous() and got.is_leaf


def test_released_once_the_last_tensor_and_all_views_of_it_are_gone():
    sent = [torch.ones(4), torch.zeros(0), torch.ones(2)]
    source, destination = pair(message_bytes(0, metas_of(sent)))
    source.write(b"", metas_of(sent), sent)
    gc.disable()
    try:
        first, nothing, second = destination.tensors(0, metas_of(sent))
        view = first[1:].detach().view(3, 1)
        del first, nothing, second
        assert not source.is_released
        assert view.sum() == 3
        del view
        assert source.is_released
    finally:
        gc.enable()


def test_the_mark_of_a_release_lies_apart_from_the_message():
    for size in (1, 4096 - ALIGNMENT, 4096, 8192, 100_000):
        source, destination = pair(size)
        sent = [torch.full((source.size_bytes,), 255, dtype=torch.uint8)]
        source.write(b"", metas_of(sent), sent)
        assert source.size_bytes == destination.size_bytes >= size
        assert not source.is_released
        (got,) = destination.tensors(0, metas_of(sent))
        assert got.min() == 255
        del got
        assert source.is_released
        assert not source.reuse().is_released


def test_a_message_without_elements_is_released_at_once():
    source, destination = pair(0)
    empty = metas_of([torch.zeros(0, 3)])
    got = destination.tensors(0, empty)
    assert source.is_released and got[0].shape == (0, 3)
    assert message_bytes(0, empty) == 0


def test_a_forked_child_releases_nothing():
    """A worker of a data loader drops its copy of what the rank goes on using."""
    source, destination = pair(100)
    source.write(b"", metas_of([torch.ones(3)]), [torch.ones(3)])
    got = destination.tensors(0, metas_of([torch.ones(3)]))
    if (child := os.fork()) == 0:
        del got
        os._exit(0)
    os.waitpid(child, 0)
    assert not source.is_released
    del got
    assert source.is_released


def test_a_release_comes_from_any_thread_and_outlives_both_slots():
    source, destination = pair(100)
    source.write(b"", metas_of([torch.ones(3)]), [torch.ones(3)])
    got = destination.tensors(0, metas_of([torch.ones(3)]))
    del destination
    dropping = threading.Thread(target=got.clear)
    dropping.start()
    dropping.join()
    assert source.is_released
    source, destination = pair(100)
    got = destination.tensors(0, metas_of([torch.ones(3)]))
    del source, destination, got


class Taken:
    """A pool with what its receiver holds, by slot."""

    def __init__(self):
        self.pool = SlotPool()
        self.held = {}

    def take(self, size_bytes):
        """Return (index, is new, given up)."""
        slot, descriptor, retired = self.pool.take(size_bytes)
        assert slot.size_bytes >= size_bytes and not slot.is_released
        if descriptor is not None:
            assert os.fstat(descriptor).st_size > slot.size_bytes
            os.close(descriptor)
        assert slot.index not in self.held, "taken and in use"
        self.held[slot.index] = slot.tensors(0, (TensorMeta((1,), torch.uint8, False),))
        return slot.index, descriptor is not None, retired

    def release(self, index):
        del self.held[index]


def test_slots_are_reused_and_the_smallest_that_fits_is_taken():
    pool = Taken()
    assert pool.take(10_000) == (0, True, None)
    assert pool.take(100_000) == (1, True, None)
    assert pool.take(10) == (2, True, None)
    for index in (0, 1, 2):
        pool.release(index)
    assert pool.take(5_000) == (0, False, None)
    assert pool.take(5_000) == (1, False, None)
    assert pool.take(5) == (2, False, None)


def test_a_slot_that_is_too_small_is_given_up_for_a_larger_one():
    pool = Taken()
    pool.take(1_000)
    pool.release(0)
    assert pool.take(50_000) == (1, True, 0)
    pool.release(1)
    assert pool.take(1_000) == (1, False, None), "the larger one serves from now on"


def test_a_slot_in_use_is_never_given_out_again():
    pool = Taken()
    indices = [pool.take(100)[0] for _ in range(50)]
    assert len(set(indices)) == 50


def test_a_slot_released_out_of_order_is_found_before_one_is_made():
    pool = Taken()
    for _ in range(500):
        pool.take(100)
    for index in (250, 499, 3):
        pool.release(index)
    assert {pool.take(100)[0] for _ in range(3)} == {250, 499, 3}
    assert pool.take(100) == (500, True, None)
    for index in range(1, 500):
        pool.release(index)
    assert not any(pool.take(100)[1] for _ in range(499)), "the oldest is in use, the rest is not"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 100_000)), max_size=60))
def test_never_more_slots_than_were_in_use_at_once(requests):
    """A number takes a slot of that size, or releases any one that is in use."""
    pool, used, most, alive = Taken(), [], 0, set()
    for takes, request in requests:
        if not takes:
            if used:
                pool.release(used.pop(request % len(used)))
            continue
        index, is_new, retired = pool.take(request)
        assert is_new == (index not in alive)
        alive.add(index)
        if retired is not None:
            alive.remove(retired)
        used.append(index)
        most = max(most, len(used))
        assert len(alive) <= most


def num_descriptors():
    return len(os.listdir("/proc/self/fd"))


def test_a_slot_has_no_name_and_keeps_no_descriptor():
    """One each was kept open once: 1,024 are often all that a process may have."""
    before = num_descriptors()
    slots = []
    for _ in range(20):
        slot, descriptor = Slot.create(0, 1_000_000)
        assert num_descriptors() == before + 1
        slots += [slot, Slot.attach(0, descriptor)]
        assert num_descriptors() == before
    copies = f"gpipe_hpc_{os.getuid()}"  # of other tests' runs, which keep them for a restart
    assert not [name for name in os.listdir("/dev/shm") if "gpipe" in name and name != copies]


def mapped_bytes():
    return int(Path("/proc/self/statm").read_text().split()[0]) * 4096


def test_memory_is_unmapped_with_the_last_tensor():
    gc.collect()
    before = mapped_bytes()
    slot, other = pair(200_000_000)
    tensor = other.tensors(0, metas_of([torch.empty(4)]))[0]
    slot.write(b"", metas_of([torch.empty(4)]), [torch.ones(4)])
    assert mapped_bytes() > before + 390e6
    del slot, other
    assert before + 190e6 < mapped_bytes() < before + 210e6
    assert tensor.tolist() == [1.0] * 4
    del tensor
    assert mapped_bytes() < before + 10e6


def test_no_room_is_an_error_with_its_reason():
    before = num_descriptors()
    with pytest.raises(OSError, match=r"mapping \d+ bytes|too large|Invalid"):
        Slot.create(0, 2**62)
    assert num_descriptors() == before
