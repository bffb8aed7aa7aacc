"""What travels: structures, and when receives may be posted ahead."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpipe_hpc.comm.wire import EMPTY, Catalogue, Slot, Structure, TensorMeta, assemble, disassemble
from gpipe_hpc.errors import ModelError


def through_the_wire(nest):
    """Return a nest as the other end rebuilds it from a header and copies of the tensors."""
    structure, tensors = disassemble(nest)
    return assemble(Structure.from_bytes(structure.to_bytes()), [t.clone() for t in tensors])


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
    assert Structure.from_bytes(changed.to_bytes()) == changed
    assert hash(Structure.from_bytes(changed.to_bytes())) == hash(changed)


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


def test_values_of_any_class_travel_but_hide_no_tensors():
    """A dataclass of tensors once went through as a value, and its gradient was lost."""
    assert through_the_wire((Box("text"), Box([1])))[0] == Box("text")
    for hidden in (Box(torch.ones(2)), Box({"x": [torch.ones(2)]}), {torch.ones(2)}):
        with pytest.raises(ModelError, match=r"boundary.*hidden in a (Box|set).*return a dict"):
            disassemble({"a": hidden})


def test_metas_are_those_of_the_tensors_in_order():
    structure, _ = disassemble({"a": torch.ones(2), "b": (None, torch.ones(3, dtype=torch.int32))})
    assert structure.metas == (
        TensorMeta((2,), torch.float32, False),
        TensorMeta((3,), torch.int32, False),
    )
    assert EMPTY.metas == () and assemble(EMPTY, []) == ()


def expectations(structures):
    """Return what a slot expects before each of some messages."""
    slot, expected = Slot(), []
    for structure in structures:
        expected.append(slot.expected)
        slot.saw(structure, EMPTY)
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
    sender, receiver = Catalogue(capacity=3), Catalogue(capacity=3)
    for value in range(20):
        structure, _ = disassemble((value, torch.ones(2)))
        number, header = sender.identify(structure)
        assert header, "each value is new"
        assert receiver.learn(Structure.from_bytes(header)) == number
        assert receiver[number] == structure
    assert len(sender._structures) == len(receiver._structures) == 1 + 3
    assert sender.identify(disassemble((19, torch.ones(2)))[0]) == (number, b"")
    assert sender.identify(disassemble((0, torch.ones(2)))[0])[1], "forgotten, so sent again"
    assert sender.identify(EMPTY) == (0, b"") and sender[0] is EMPTY


def test_a_slot_knows_what_it_expects_also_once_the_catalogue_has_forgotten_it():
    slot, structure = Slot(), disassemble(torch.ones(4, 2))[0]
    slot.saw(7, structure)
    assert (slot.expected, slot.metas) == (7, structure.metas)
    slot.saw(8, EMPTY)
    assert (slot.expected, slot.metas) == (None, ())
