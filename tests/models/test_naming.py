from torch import nn

from gpipe_hpc.models import global_name, named_layer_parameters


def test_global_names():
    assert global_name(4, "weight") == "layers.4.weight"
    layer = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert [name for name, _ in named_layer_parameters(7, layer)] == [
        "layers.7.0.weight",
        "layers.7.0.bias",
        "layers.7.1.weight",
        "layers.7.1.bias",
    ]
