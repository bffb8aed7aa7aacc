"""Tests of the remedies for torch's most common errors in layers and losses."""

import numpy as np
import pytest
import torch
from torch import nn

from gpipe_hpc import LayerSpec, Pipeline
from gpipe_hpc.errors import ActionError, ModelError
from gpipe_hpc.models import loss_function
from gpipe_hpc.models.remedies import is_shape_mistake, remedy_of, with_remedy
from gpipe_hpc.planner.costs.counted import count_model

FLOATS = "data.inputs_dtype=float32"
cross_entropy = nn.functional.cross_entropy


def failed(layer, inputs, loss=cross_entropy, targets=None):
    targets = torch.zeros(len(inputs), dtype=torch.int64) if targets is None else targets
    with pytest.raises(ActionError) as found:
        Pipeline([layer], loss).step(inputs, targets)
    return str(found.value)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (lambda: nn.Linear(4, 4), (2, 4)),
        (lambda: nn.Conv2d(1, 4, 3), (2, 1, 4, 4)),
        (lambda: nn.LSTM(4, 4), (2, 4)),
        (lambda: nn.LayerNorm(4), (2, 4)),
        (lambda: nn.BatchNorm1d(4), (2, 4)),
    ],
)
def test_whole_numbers_for_a_layer_of_floats(layer, shape, dtype):
    """Regression: uint8 images gave only torch's message."""
    said = failed(layer(), torch.ones(shape, dtype=dtype))
    assert FLOATS in said and "with inputs.float() (on the command line" in said


def test_numbers_as_numpy_makes_them():
    assert "array.astype('float32')" in failed(nn.Linear(4, 4), np.zeros((2, 4)))


def test_vectors_of_another_size():
    said = "expects vectors of size 784 but got size 28"
    assert said in failed(nn.Linear(784, 10), torch.zeros(2, 28, 28))


@pytest.mark.parametrize("shape", [(2, 28, 28), (2, 28, 28, 1)])
def test_pictures_without_channels_or_with_channels_behind(shape):
    said = failed(nn.Conv2d(1, 4, 3), torch.zeros(shape))
    assert "array[:, None]" in said and "np.moveaxis" in said


def test_floats_for_a_table():
    assert "data.inputs_dtype=int64" in failed(nn.Embedding(4, 4), torch.zeros(2))


def test_a_number_beyond_the_table():
    assert "more rows" in failed(nn.Embedding(4, 4), torch.tensor([1, 4]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32, torch.bool])
def test_classes_of_another_type(dtype):
    said = failed(nn.Linear(4, 4), torch.zeros(2, 4), targets=torch.zeros(2, dtype=dtype))
    assert "data.targets_dtype=int64" in said


def test_classes_in_a_column():
    targets = torch.zeros(2, 1, dtype=torch.int64)
    assert "such as targets[:, 0]" in failed(nn.Linear(4, 4), torch.zeros(2, 4), targets=targets)


def test_a_class_beyond_the_outputs():
    """Class indices may start at 1 by mistake, or targets may not be classes at all."""
    said = failed(nn.Linear(4, 4), torch.zeros(2, 4), targets=torch.tensor([1, 4]))
    assert "class indices must be at least 0" in said and "data.targets_dtype=float32" in said
    assert "targets.float(), on the command line" in said


def test_classes_as_floats_where_their_loss_is_that_of_numbers():
    """Regression: for floating-point classes, the message recommended to reshape the targets."""
    loss = loss_function("mean_squared_error")
    said = failed(nn.Linear(4, 4), torch.zeros(2, 4), loss, torch.zeros(2))
    assert "data.targets_dtype=int64" in said
    said = failed(nn.Linear(4, 1), torch.zeros(2, 4), loss, torch.zeros(2))
    assert "array[:, None]" in said and "int64" not in said
    with pytest.raises(ModelError) as found:
        pair = (torch.zeros(2, 4), torch.zeros(2))
        Pipeline([nn.Linear(4, 4)], loss, partition="time", example=pair)
    assert str(found.value).endswith("or reshape"), "a second remedy stood behind it"


def test_the_same_is_said_where_layers_are_measured_or_counted():
    layers, inputs = [LayerSpec(nn.Conv2d, 1, 4, 3)], torch.ones(2, 1, 4, 4, dtype=torch.int64)
    targets = torch.zeros(2)
    with pytest.raises(ModelError, match=FLOATS):
        Pipeline(layers, cross_entropy, partition="time", example=(inputs, targets))
    with pytest.raises(ModelError, match=FLOATS):
        count_model(layers, inputs)


def test_what_is_not_known_has_no_remedy():
    assert remedy_of(ValueError("something else")) is None


def test_a_message_of_ours_within_another_has_no_name_of_an_error():
    """Regression: the message read `ModelError: loss: ... got ModelError: ...`."""
    assert with_remedy(ModelError("loss_fn: bad; correct it"), "x") == "loss_fn: bad; correct it"


def test_targets_of_another_number_are_counted():
    said = failed(nn.Linear(4, 4), torch.zeros(6, 4), targets=torch.zeros(4, dtype=torch.int64))
    assert "6 inputs against 4" in said and "as many targets as inputs" in said


def test_a_mistake_in_shapes_is_told_from_other_failures():
    """torch rejects wrong shapes on the meta device too, which is used to count layers."""
    for layer, shape, remedy in (
        (nn.MaxPool2d(2), (1, 1, 1, 8), "larger images"),
        (nn.Linear(8, 8), (4, 7), "vectors of size 8 but got size 7"),
        (nn.Conv2d(3, 4, 3), (2, 1, 8, 8), "images must have shape"),
    ):
        for place in ("cpu", "meta"):
            with pytest.raises(RuntimeError) as raised:
                layer.to(place)(torch.ones(shape, device=place))
            assert is_shape_mistake(raised.value) and remedy in remedy_of(raised.value)
    assert not is_shape_mistake(NotImplementedError("no value on the meta device"))
    assert not is_shape_mistake(None)
