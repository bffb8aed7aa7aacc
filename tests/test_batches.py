"""Tests of splitting batches into micro-batches and of joining outputs."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpipe_hpc.batches import Output, cut, join, num_samples_of, share_of
from gpipe_hpc.errors import DataError


@given(size=st.integers(0, 50), pieces=st.integers(1, 12), data=st.data())
def test_the_cut_is_torchs_tensor_split(size, pieces, data):
    batch = torch.arange(size)
    expected = [piece.tolist() for piece in batch.tensor_split(pieces)]
    assert [piece.tolist() for piece in cut(batch, pieces, "inputs")] == expected
    first = data.draw(st.integers(0, pieces))
    count = data.draw(st.integers(0, pieces - first))
    share = batch[share_of(size, pieces, first, count)].tolist()
    assert share == [x for piece in expected[first : first + count] for x in piece]


def test_a_nest_is_cut_leaf_by_leaf():
    nest = {"x": torch.arange(5), "y": (torch.ones(5, 2), torch.tensor(3.0), "text", None)}
    pieces = cut(nest, 2, "inputs")
    assert [p["x"].tolist() for p in pieces] == [[0, 1, 2], [3, 4]]
    assert [len(p["y"][0]) for p in pieces] == [3, 2]
    assert all(p["y"][1:] == (nest["y"][1], "text", None) for p in pieces)
    assert pieces[0] is not nest and num_samples_of(nest, "inputs") == 5


@pytest.mark.parametrize(
    ("nest", "words"),
    [
        (torch.tensor(1.0), "got Tensor"),
        ({"n": 5}, "got dict"),
        (None, "got NoneType"),
        ((torch.ones(2), torch.ones(3)), r"\[2, 3\]"),
    ],
)
def test_what_has_no_number_of_samples(nest, words):
    with pytest.raises(DataError, match=f"targets.*{words}"):
        cut(nest, 2, "targets")


def test_outputs_are_joined_in_order():
    outputs = {
        m: Output(
            {"x": torch.full((n, 2), n), "scalar": torch.tensor(n), "size": n, "none": None}, n
        )
        for m, n in ((1, 1), (0, 2), (2, 3))
    }
    joined = join(outputs, "layers.1 (Head)")
    assert joined["x"][:, 0].tolist() == [2, 2, 1, 3, 3, 3]
    assert joined["scalar"].tolist() == [2, 1, 3]
    assert joined["size"] == [2, 1, 3] and joined["none"] is None
    assert join({}, "layers.1 (Head)") is None
