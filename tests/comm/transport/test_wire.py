"""What travels: structures, and when receives may be posted ahead."""

import ctypes
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from enum import IntEnum
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpipe_hpc.comm.transport.wire import (
    EMPTY,
    MAX_STRUCTURE_BYTES,
    ExpectedStructure,
    NestStructure,
    StructureCache,
    TensorMeta,
    as_received,
    assemble,
    disassemble,
    flat,
    packed,
)
from gpipe_hpc.device.device import HostDevice
from gpipe_hpc.errors import ModelError


def through_the_wire(nest):
    """Return a nest as the other end rebuilds it from a header and copies of the tensors."""
    structure, tensors = disassemble(nest)
    return assemble(NestStructure.from_bytes(structure.to_bytes()), [t.clone() for t in tensors])


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.uint8, torch.bool]
)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_tensors_of_any_dtype_and_shape(dtype, shape):
    tensor = torch.ones(shape, dtype=dtype)
    got = through_the_wire(tensor)
    assert torch.equal(got, tensor) and got.dtype == dtype and not got.requires_grad


def test_values_containers_and_none():
    nest = {"a": (1, None, True), "b": [torch.ones(2), {"c": "text", "d": 0.5}], "e": ()}
    got = through_the_wire(nest)
    assert torch.equal(got["b"][0], torch.ones(2))
    nest["b"][0] = got["b"][0] = None
    assert got == nest and type(got["b"]) is list and type(got["a"]) is tuple
    assert type(got["a"][2]) is bool and type(got["a"][0]) is int


def test_leaves_require_a_gradient_where_the_senders_tensors_did():
    weight = torch.ones(2, requires_grad=True)
    product, constant = through_the_wire((weight * 2, torch.ones(2)))
    assert product.is_leaf and product.requires_grad and product.grad_fn is None
    assert not constant.requires_grad


@pytest.mark.parametrize("trains", [True, False])
def test_what_is_handed_over_within_a_rank_is_a_leaf_in_the_same_memory(trains):
    sent = torch.ones(2, 3, requires_grad=True) * 2 if trains else torch.ones(2, 3)
    for nest in (sent, {"x": sent}):
        got = as_received(nest)
        got = got["x"] if isinstance(got, dict) else got
        assert got.is_leaf and got.requires_grad is trains
        assert got.data_ptr() == sent.data_ptr() and torch.equal(got, sent)


def test_receiver_keeps_no_graph_and_sender_no_detached_flag():
    output = torch.ones(2, requires_grad=True) * 2
    _, (tensor,) = disassemble(output)
    assert tensor.grad_fn is None and tensor.data_ptr() == output.data_ptr()
    assert output.requires_grad


@pytest.mark.parametrize(
    "other",
    [
        torch.ones(3, 2),
        torch.ones(2, 3, dtype=torch.float64),
        torch.ones(2, 3, requires_grad=True),
        (torch.ones(2, 3),),
        [torch.ones(2, 3)],
        {"x": torch.ones(2, 3)},
        (torch.ones(2, 3), 1),
        (torch.ones(2, 3), 2),
        (torch.ones(2, 3), None),
        None,
        (),
    ],
    ids=str,
)
def test_whatever_the_receiver_must_know_makes_another_structure(other):
    structure, _ = disassemble(torch.ones(2, 3))
    same, _ = disassemble(torch.zeros(2, 3))
    changed, _ = disassemble(other)
    assert structure == same and hash(structure) == hash(same)
    assert changed != structure
    assert NestStructure.from_bytes(changed.to_bytes()) == changed
    assert hash(NestStructure.from_bytes(changed.to_bytes())) == hash(changed)


def test_the_structure_of_one_tensor_is_made_once():
    """Made and hashed anew for each message, it was a tenth of a message's cost."""
    first, _ = disassemble(torch.ones(3, 7))
    assert disassemble(torch.zeros(3, 7))[0] is first
    assert first.metas == (TensorMeta((3, 7), torch.float32, False),)
    assert type(first.metas[0].shape) is tuple, "a torch.Size pickles into a longer header"


def test_true_and_one_are_different_values():
    """They are equal in Python; the receiver must get what was sent."""
    assert disassemble((True,))[0] != disassemble((1,))[0]
    assert disassemble((1.0,))[0] != disassemble((1,))[0]


@dataclass
class Box:
    inside: object


Flag = IntEnum("Flag", {"ON": 1})
CONFUSED = [1, True, 1.0, 1 + 0j, Fraction(1), Flag.ON, 0, 0.0, -0.0, (1, 2), (True, 2)]
CONTAINERS = [
    lambda key: {key: torch.ones(2)},
    lambda key: OrderedDict({key: torch.ones(2)}),
    lambda key: defaultdict(list, {key: torch.ones(2)}),
    lambda key: ({"a": [{key: 0}]}, torch.ones(2)),
    lambda key: (key, torch.ones(2)),
]


@pytest.mark.parametrize("make", CONTAINERS, ids=range(len(CONTAINERS)))
def test_keys_and_values_that_python_takes_for_equal_are_told_apart(make):
    """`{1: x}` after `{True: x}` arrived as `{True: x}`."""
    sender, receiver = StructureCache(), StructureCache()
    for key in CONFUSED * 2:
        structure, tensors = disassemble(make(key))
        number, header = sender.identify(structure)
        if header:
            assert receiver.learn(header) == number
        got = assemble(receiver[number], tensors)
        assert repr(got) == repr(make(key))
    assert len(sender._structures) == 1 + len(CONFUSED)


def test_a_nan_for_a_key_is_known_again():
    catalogue = StructureCache()
    headers = [catalogue.identify(disassemble({float("nan"): 1})[0])[1] for _ in range(3)]
    assert headers[0] and headers[1:] == [b"", b""]


def test_values_of_any_class_travel_but_hide_no_tensors():
    """A dataclass of tensors once went through as a value, and its gradient was lost."""
    assert through_the_wire((Box("text"), Box([1])))[0] == Box("text")
    for hidden in (Box(torch.ones(2)), Box({"x": [torch.ones(2)]}), {torch.ones(2)}):
        with pytest.raises(ModelError, match=r"boundary.*within a (Box|set).*return tensors"):
            disassemble({"a": hidden})


def test_metas_are_those_of_the_tensors_in_order():
    structure, _ = disassemble({"a": torch.ones(2), "b": (None, torch.ones(3, dtype=torch.int32))})
    assert structure.metas == (
        TensorMeta((2,), torch.float32, False),
        TensorMeta((3,), torch.int32, False),
    )
    assert EMPTY.metas == () and assemble(EMPTY, []) == ()


def expectations(structures):
    """Return what a place expects before each of some messages."""
    place, expected = ExpectedStructure(), []
    for structure in structures:
        expected.append(place.expected)
        place.saw(structure, EMPTY)
    return expected


def test_a_structure_is_expected_once_it_came_first_or_twice_in_a_row():
    assert expectations([1, 1, 1]) == [None, 1, 1]
    assert expectations([1, 2, 2, 2]) == [None, 1, None, 2]
    assert expectations([1, 1, 2, 1, 1, 1]) == [None, 1, 1, None, None, 1]


@given(st.lists(st.integers(1, 3), min_size=1, max_size=30))
def test_posting_in_vain_needs_a_pause_between_changes(structures):
    """Shapes that change at every step are posted in vain once, at the first change."""
    expected = expectations(structures)
    in_vain = [
        i for i, (e, s) in enumerate(zip(expected, structures, strict=True)) if e not in (None, s)
    ]
    for i in in_vain:
        assert i == 1 or structures[i - 1] == structures[i - 2]
    changing = [s + 3 * i for i, s in enumerate(structures)]
    assert sum(e is not None for e in expectations(changing)) <= 1


def test_values_that_change_with_every_message_do_not_fill_the_memory():
    sender, receiver = StructureCache(capacity=3), StructureCache(capacity=3)
    for value in range(20):
        structure, _ = disassemble((value, torch.ones(2)))
        number, header = sender.identify(structure)
        assert header, "each value is new"
        assert receiver.learn(header) == number
        assert receiver[number] == structure
    assert len(sender._structures) == len(receiver._structures) == 1 + 3
    assert sender.identify(disassemble((19, torch.ones(2)))[0]) == (number, b"")
    assert sender.identify(disassemble((0, torch.ones(2)))[0])[1], "forgotten, so sent again"
    assert sender.identify(EMPTY) == (0, b"") and sender[0] is EMPTY


@pytest.mark.parametrize(("size", "num_kept"), [(300_000, 13), (10_000_000, 1)])
def test_large_values_that_change_do_not_fill_the_memory(size, num_kept):
    """256 structures of any size were kept: 205 MB of values of 800 kB."""
    sender, receiver = StructureCache(), StructureCache()
    for value in range(40):
        structure, _ = disassemble((bytes([value]) * size, torch.ones(2)))
        number, header = sender.identify(structure)
        assert receiver.learn(header) == number
        assert receiver[number] == sender[number] == structure
        assert sender.identify(structure) == (number, b"")
    for end in (sender, receiver):
        kept = [s for s in end._structures.values() if s is not EMPTY]
        assert len(kept) == num_kept
        held = sum(len(leaf) for s in kept for leaf in s.leaves if isinstance(leaf, bytes))
        assert held < max(MAX_STRUCTURE_BYTES, size + 100)


def test_many_small_leaves_count_with_the_memory_that_they_take():
    """A list of numbers takes a hundred times its header in Python's objects."""
    catalogue = StructureCache()
    for value in range(20):
        catalogue.identify(disassemble([value] * 5000)[0])
    assert len(catalogue._structures) - 1 == MAX_STRUCTURE_BYTES // (300 * 5000)


LAZY = {
    "conjugated": lambda: torch.tensor([1 + 2j, 3 - 1j]).conj(),
    "negative": lambda: torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
    "both": lambda: torch.view_as_real(torch.tensor([1 + 2j]).conj().resolve_conj()).neg(),
    "conjugated transpose": lambda: torch.ones(2, 3, dtype=torch.complex128).mul(2j).mH,
    "expanded": lambda: torch.arange(3.0).expand(2, 3),
    "zeros without memory": lambda: torch._efficientzerotensor((2, 3)),
}


@pytest.mark.parametrize("make", LAZY.values(), ids=LAZY)
def test_what_is_sent_holds_its_elements(make):
    """isend refused a conjugated tensor, and zeros without memory crashed the process."""
    tensor = make()
    for nest in (tensor, {"a": tensor}):
        _, (sent,) = disassemble(nest)
        assert not (sent.is_conj() or sent.is_neg() or sent._is_zerotensor())
        assert torch.equal(sent, tensor.clone())
        there = sent.contiguous()
        copy = torch.empty(there.shape, dtype=there.dtype)
        ctypes.memmove(copy.data_ptr(), there.data_ptr(), there.nbytes)
        assert torch.equal(copy, tensor.clone().resolve_conj().resolve_neg())


@pytest.mark.parametrize(
    ("tensor", "kind"),
    [
        (torch.eye(2).to_sparse(), "sparse_coo"),
        (torch.eye(2).to_sparse_csr(), "sparse_csr"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
    ],
    ids=["coo", "csr", "nested"],
)
def test_a_tensor_that_is_no_plain_array_is_refused_by_name(tensor, kind):
    """A transport could not send it and said so in torch's words, or on threads not at all."""
    for nest in (tensor, (tensor,)):
        with pytest.raises(ModelError, match=rf"boundary: expected plain.*got.*{kind}"):
            disassemble(nest)


def test_a_slot_knows_what_it_expects_also_once_the_catalogue_has_forgotten_it():
    place, structure = ExpectedStructure(), disassemble(torch.ones(4, 2))[0]
    place.saw(7, structure)
    assert (place.expected, place.metas) == (7, structure.metas)
    place.saw(8, EMPTY)
    assert (place.expected, place.metas) == (None, ())


@st.composite
def views(draw):
    """Draw a tensor whose memory may have gaps, other orders of dimensions, or elements twice."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    tensor = torch.arange(float(torch.Size(shape).numel())).view(shape)
    if shape:
        tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
        dim = draw(st.integers(0, len(shape) - 1))
        step = draw(st.integers(1, 3))
        tensor = tensor[(slice(None),) * dim + (slice(None, None, step),)]
    if draw(st.booleans()):
        tensor = tensor.expand(draw(st.integers(1, 3)), *tensor.shape)
    return tensor


@given(views())
def test_what_travels_has_no_gaps_and_keeps_the_order_of_its_memory(tensor):
    structure, (elements,) = disassemble(tensor)
    (meta,) = structure.metas
    sent = packed(elements, meta)
    assert meta.num_elements * 4 == meta.num_bytes == flat(sent).nbytes
    came = meta.allocate(HostDevice())
    flat(came).copy_(flat(sent))
    assert torch.equal(came, tensor) and came._base is None
    if tensor.numel():
        assert came.stride() == sent.stride()
        if torch._C._is_alias_of(sent, tensor):
            assert came.stride() == tensor.stride()
