import pytest
import torch
from torch import nn

from gpipe_hpc.device.device import HostDevice
from gpipe_hpc.errors import PartitionError
from gpipe_hpc.models import LayerSpec
from gpipe_hpc.planner import (
    CountedCosts,
    Example,
    LayerTimes,
    MeasuredCosts,
    Partition,
    choose_partition,
)
from gpipe_hpc.planner.cutting.partition import Slowdowns

LAYERS = [LayerSpec(nn.Linear, 2, 2) for _ in range(3)]
BEFORE = Partition((1, 2), (3.0, 1.0, 1.0), "parameters")


def cost_model(layers=LAYERS):
    """Return one that cannot be asked for times: only a cut by time needs them."""
    return MeasuredCosts(CountedCosts(layers, None))


def test_a_cut_made_before_is_taken_where_it_fits():
    assert choose_partition(BEFORE, 2, cost_model()) == BEFORE


@pytest.mark.parametrize(("num_layers", "num_stages"), [(3, 3), (3, 1), (2, 2)])
def test_a_cut_made_before_is_made_anew_where_it_does_not_fit(num_layers, num_stages):
    """Resuming on another number of ranks was refused for the checkpoint's measured cut."""
    own = cost_model(LAYERS[:num_layers])
    chosen = choose_partition(BEFORE, num_stages, own)
    assert chosen == choose_partition("parameters", num_stages, own)


SIXTEEN = [LayerSpec(nn.Linear, 2, 2) for _ in range(16)]
EVEN = Partition((4, 4, 4, 4), (1.0,) * 16, "time", (LayerTimes.alike(1.0, 2.0, 1.0, 1.0),) * 16)


def test_a_cut_for_other_ranks_is_made_anew_from_the_same_costs():
    """A run that lost a rank, or got it back, kept the cut that was made for the ranks before."""
    own = cost_model(SIXTEEN)  # refuses to measure
    with_holes = choose_partition(EVEN, 4, own, 7)
    assert with_holes == EVEN._replace(counts=(1, 5, 5, 5), num_ranks=7)
    stored = Partition.stored(with_holes._asdict())
    assert choose_partition(stored, 4, own, 7) == with_holes
    assert choose_partition(stored, 4, own) == EVEN
    assert choose_partition(stored, 4, own, 6).num_ranks == 6


def test_a_cut_for_slow_ranks_is_made_anew_for_pipelines_with_holes():
    """The cut for other paces did not know how many ranks share the stages."""
    paced = choose_partition(
        EVEN, 4, cost_model(SIXTEEN), None, Slowdowns((1, 1, 1, 2), (1, 1, 1, 2))
    )
    assert paced.counts == (5, 5, 5, 1)
    assert choose_partition(paced, 4, cost_model(SIXTEEN), 7).counts == (1, 5, 5, 5)


def test_a_checkpoint_that_does_not_tell_of_ranks_counts_as_whole_replicas():
    older = {name: value for name, value in EVEN._asdict().items() if name != "num_ranks"}
    assert Partition.stored(older) == EVEN
    assert choose_partition(Partition.stored(older), 4, cost_model(SIXTEEN)).counts == (4, 4, 4, 4)
    assert choose_partition(Partition.stored(older), 4, cost_model(SIXTEEN), 7).counts == (
        1,
        5,
        5,
        5,
    )


def test_a_cut_by_time_needs_an_example():
    with pytest.raises(
        PartitionError, match=r"no example was passed; pass example=\(inputs, targets\)"
    ):
        choose_partition("time", 2, cost_model())


def example(loss_fn):
    inputs = torch.ones(4, 2)
    return Example(inputs, inputs, loss_fn, 0, HostDevice())


def test_a_cut_by_time_is_by_what_the_gauge_finds():
    layers = [LayerSpec(nn.Linear, 2, 2), LayerSpec(nn.Linear, 2, 64), LayerSpec(nn.Linear, 64, 2)]
    counted = CountedCosts(layers, example(nn.functional.mse_loss))
    chosen = choose_partition("time", 2, counted)
    # Forward, and of the first layer one product more (weights), of others two (input, weights).
    small, large = 2 * 4 * 2 * 2, 2 * 4 * 2 * 64
    assert chosen.costs == (2 * small, 3 * large, 3 * large)
    assert chosen.times[1] == LayerTimes.alike(large, 2 * large, large, large)
    assert (chosen.measure, chosen.counts, chosen.is_measured) == ("FLOPs", (2, 1), False)
    measured = choose_partition("time", 2, MeasuredCosts(counted))
    assert measured.is_measured and measured.times != chosen.times


def test_the_loss_is_part_of_the_last_layer():
    def loss(output, targets):
        return ((output @ output.T) - 1.0).sum()

    layers = [LayerSpec(nn.Linear, 2, 2)] * 2
    first, last = CountedCosts(layers, example(loss)).times
    product = 2 * 4 * 2 * 4
    assert last.forward == first.forward + product
    assert last.of_weight == first.of_weight  # the loss has no weights


def test_a_checkpoints_cut_is_read_whatever_its_times_are_called():
    """They were called seconds until cuts by counted FLOPs were kept too."""
    times = LayerTimes.alike(1.0, 2.0, 1.0, 1.0)
    cut = Partition((1, 1), (3.0, 3.0), "time", (times, times))
    assert Partition.stored(cut._asdict()) == cut
    older = {name: value for name, value in cut._asdict().items() if name != "times"}
    assert Partition.stored({**older, "seconds": [list(times), list(times)]}) == cut
    assert Partition.stored(older).times == ()
