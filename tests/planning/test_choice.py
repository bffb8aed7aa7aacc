import pytest
from torch import nn

from gpipe_hpc.models import LayerSpec
from gpipe_hpc.planning import Partition, choose_partition

LAYERS = [LayerSpec(nn.Linear, 2, 2) for _ in range(3)]
MEASURED = Partition((1, 2), (3.0, 1.0, 1.0), "parameters")


def never():
    raise AssertionError("only a cut by time needs an example")


def test_a_cut_made_before_is_taken_where_it_fits():
    assert choose_partition(MEASURED, LAYERS, 2, never) == MEASURED


@pytest.mark.parametrize(("num_layers", "num_stages"), [(3, 3), (3, 1), (2, 2)])
def test_a_cut_made_before_is_made_anew_where_it_does_not_fit(num_layers, num_stages):
    """Resuming on another number of ranks was refused for the checkpoint's measured cut."""
    layers = LAYERS[:num_layers]
    chosen = choose_partition(MEASURED, layers, num_stages, never)
    assert chosen == choose_partition("parameters", layers, num_stages, never)
