"""Which buffers of a layer move is learned exactly, whatever stands in them."""

import pytest
import torch
from torch import nn

from gpipe_hpc.engine.buffers import SMALL_BYTES, LayerBuffers, PersistentBuffers

FEW, MANY = 2, SMALL_BYTES // 4


def layer_with(values):
    layer = nn.Module()
    layer.register_buffer("kept", values)
    lasting = PersistentBuffers()
    return layer, LayerBuffers(layer, "layers.0", lasting), lasting


def forward(buffers, change=lambda: None):
    before = buffers.begin()
    change()
    buffers.end(before, returns=False)


@pytest.mark.parametrize("size", [FEW, MANY])
@pytest.mark.parametrize("value", [0.0, float("nan"), float("-inf")])
def test_a_buffer_that_no_forward_changes_does_not_move(size, value):
    """One with a NaN in it was taken for a moving one: no NaN equals another."""
    layer, buffers, lasting = layer_with(torch.full((size,), value))
    own = layer.kept
    for _ in range(2):
        for _ in range(3):
            forward(buffers)
        assert layer.kept is own and not buffers.moving()
        lasting.settle()


@pytest.mark.parametrize("size", [FEW, MANY])
@pytest.mark.parametrize("way", ["last value", "transposed"])
def test_a_write_that_no_version_tells_of_is_seen(size, way):
    """Through `.data` no version counts it."""
    layer, buffers, lasting = layer_with(torch.zeros(size // 2, 2))

    def write():
        if way == "last value":
            layer.kept.data[-1, -1] = 1
        else:
            layer.kept.data = (layer.kept.data + 1).t()

    forward(buffers)
    lasting.settle()
    forward(buffers, write)
    assert buffers.moving()


@pytest.mark.parametrize("kind", ["added", "taken away", "another name"])
def test_places_that_a_forward_adds_or_empties_are_changes(kind):
    layer, buffers, _ = layer_with(torch.zeros(3))
    before = buffers.begin()
    if kind != "added":
        del layer.kept
    if kind != "taken away":
        layer.register_buffer("late", torch.ones(2))
    after = buffers.end(before, returns=False)
    expected = {"added": {"late"}, "taken away": {"kept"}, "another name": {"kept", "late"}}
    assert {name for _, name in after.moved} == expected[kind]
