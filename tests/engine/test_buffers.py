"""Detection of the buffers that a layer's forwards change, for any values."""

import pytest
import torch
from torch import nn

from gpipe_hpc.engine.buffers import SMALL_BYTES, LayerBuffers, PersistentBuffers

FEW, MANY = 2, SMALL_BYTES // 4


def layer_with(values):
    layer = nn.Module()
    layer.register_buffer("kept", values)
    persistent = PersistentBuffers()
    return layer, LayerBuffers(layer, "layers.0", persistent), persistent


def forward(buffers, change=lambda: None):
    before = buffers.begin()
    change()
    buffers.end(before, returns=False)


@pytest.mark.parametrize("size", [FEW, MANY])
@pytest.mark.parametrize("value", [0.0, float("nan"), float("-inf")])
def test_unchanged_buffer_does_not_count_as_changing(size, value):
    """Regression: a buffer with a NaN counted as changing, since NaN does not equal NaN."""
    layer, buffers, persistent = layer_with(torch.full((size,), value))
    own = layer.kept
    for _ in range(2):
        for _ in range(3):
            forward(buffers)
        assert layer.kept is own and not buffers.moving()
        persistent.settle()


@pytest.mark.parametrize("size", [FEW, MANY])
@pytest.mark.parametrize("way", ["last value", "transposed"])
def test_write_without_version_change_is_detected(size, way):
    """Writes through `.data` do not change the tensor's version."""
    layer, buffers, persistent = layer_with(torch.zeros(size // 2, 2))

    def write():
        if way == "last value":
            layer.kept.data[-1, -1] = 1
        else:
            layer.kept.data = (layer.kept.data + 1).t()

    forward(buffers)
    persistent.settle()
    forward(buffers, write)
    assert buffers.moving()


@pytest.mark.parametrize("kind", ["added", "taken away", "another name"])
def test_added_and_deleted_buffers_count_as_changes(kind):
    layer, buffers, _ = layer_with(torch.zeros(3))
    before = buffers.begin()
    if kind != "added":
        del layer.kept
    if kind != "taken away":
        layer.register_buffer("late", torch.ones(2))
    after = buffers.end(before, returns=False)
    expected = {"added": {"late"}, "taken away": {"kept"}, "another name": {"kept", "late"}}
    assert {name for _, name in after.moved} == expected[kind]
