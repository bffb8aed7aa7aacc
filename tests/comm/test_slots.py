"""Slots of shared memory: layout, reuse, growth, giving up."""

import gc
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe_hpc.comm.slots import ALIGNMENT, Slot, SlotPool, aligned, message_bytes
from gpipe_hpc.comm.wire import TensorMeta


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
    source.write(header, sent)
    assert destination.read_header(len(header)) == header
    got = destination.tensors(len(header), metas_of(sent), lambda: None)
    assert [t.dtype for t in got] == [t.dtype for t in sent]
    assert [t.shape for t in got] == [t.shape for t in sent]
    assert all(map(torch.equal, got, sent))


def test_tensors_are_aligned_and_lie_in_place():
    sent = [torch.ones(3, dtype=torch.uint8), torch.ones(5), torch.ones(2, dtype=torch.float64)]
    source, destination = pair(message_bytes(7, metas_of(sent)))
    source.write(b"1234567", sent)
    got = destination.tensors(7, metas_of(sent), lambda: None)
    offsets = [tensor.data_ptr() - got[0].data_ptr() for tensor in got]
    assert offsets == [0, ALIGNMENT, 2 * ALIGNMENT]
    assert got[0].data_ptr() % ALIGNMENT == 0
    source.write(b"1234567", [tensor * 2 for tensor in sent])
    assert got[1].tolist() == [2.0] * 5, "it is the sender's memory"
    assert [aligned(n) for n in (0, 1, 64, 65)] == [0, 64, 64, 128]


def test_what_is_not_contiguous_conjugated_or_expanded_arrives_whole():
    odd = [
        torch.arange(6.0).view(2, 3).t(),
        torch.tensor([1 + 2j, 3 - 1j]).conj(),
        torch.tensor([2.0]).expand(4),
    ]
    source, destination = pair(message_bytes(0, metas_of(odd)))
    source.write(b"", odd)
    assert all(map(torch.equal, destination.tensors(0, metas_of(odd), lambda: None), odd))


def test_released_once_the_last_tensor_and_all_views_of_it_are_gone():
    released = []
    sent = [torch.ones(4), torch.zeros(0), torch.ones(2)]
    source, destination = pair(message_bytes(0, metas_of(sent)))
    source.write(b"", sent)
    gc.disable()
    try:
        first, nothing, second = destination.tensors(
            0, metas_of(sent), lambda: released.append(True)
        )
        view = first[1:].detach().view(3, 1)
        del first, nothing, second
        assert released == []
        assert view.sum() == 3
        del view
        assert released == [True]
    finally:
        gc.enable()


def test_a_message_without_elements_is_released_at_once():
    released = []
    _, destination = pair(0)
    empty = metas_of([torch.zeros(0, 3)])
    got = destination.tensors(0, empty, lambda: released.append(True))
    assert released == [True] and got[0].shape == (0, 3)
    assert message_bytes(0, empty) == 0


def take(pool, size_bytes):
    """Return (index, is new, given up) and close what came with it."""
    slot, descriptor, retired = pool.take(size_bytes)
    if descriptor is not None:
        assert os.fstat(descriptor).st_size == slot.size_bytes >= size_bytes
        os.close(descriptor)
    return slot.index, descriptor is not None, retired


def test_slots_are_reused_and_the_smallest_that_fits_is_taken():
    pool = SlotPool()
    assert take(pool, 10_000) == (0, True, None)
    assert take(pool, 100_000) == (1, True, None)
    assert take(pool, 10) == (2, True, None)
    for index in (0, 1, 2):
        pool.give_back(index)
    assert take(pool, 5_000) == (0, False, None)
    assert take(pool, 5_000) == (1, False, None)
    assert take(pool, 5) == (2, False, None)


def test_a_slot_that_is_too_small_is_given_up_for_a_larger_one():
    pool = SlotPool()
    take(pool, 1_000)
    pool.give_back(0)
    assert take(pool, 50_000) == (1, True, 0)
    pool.give_back(1)
    assert take(pool, 1_000) == (1, False, None), "the larger one serves from now on"
    with pytest.raises(KeyError):
        pool.give_back(0)


def test_a_slot_in_use_is_never_given_out_again():
    pool = SlotPool()
    indices = [take(pool, 100)[0] for _ in range(50)]
    assert len(set(indices)) == 50


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.integers(1, 100_000), st.none()), max_size=60))
def test_never_more_slots_than_were_in_use_at_once(requests):
    """A number takes a slot of that size, None gives the oldest back; sizes may be anything."""
    pool, used, most, alive = SlotPool(), [], 0, set()
    for request in requests:
        if request is None:
            if used:
                pool.give_back(used.pop(0))
            continue
        index, is_new, retired = take(pool, request)
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
    assert not [name for name in os.listdir("/dev/shm") if "gpipe" in name]


def mapped_bytes():
    return int(Path("/proc/self/statm").read_text().split()[0]) * 4096


def test_memory_is_unmapped_with_the_last_tensor():
    gc.collect()
    before = mapped_bytes()
    slot, other = pair(200_000_000)
    tensor = other.tensors(0, metas_of([torch.empty(4)]), lambda: None)[0]
    slot.write(b"", [torch.ones(4)])
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
