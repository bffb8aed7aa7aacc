"""Running statistics of one stage: pooled over micro-batches and replicas, updated once a step."""

import copy

import pytest
import torch
from torch import nn

from gpipe_hpc import run_on_threads
from gpipe_hpc.comm.collectives.group import SoloGroup
from gpipe_hpc.engine.batchnorm_statistics import StageStatistics
from gpipe_hpc.models import Reports, convert_batchnorm, reporting

NEAR = {"rtol": 1e-13, "atol": 1e-13}


def batch(samples, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 3, 2, generator=generator, dtype=torch.float64) * 2 + 5


def forward(model, statistics, microbatch, value):
    with reporting(Reports()) as reports:
        model(value)
    statistics.note(microbatch, reports.statistics)


def update(plain, whole):
    """Update the buffers of a plain layer as a forward of the batch `whole` does."""
    dims = [d for d in range(whole.dim()) if d != 1]
    plain.num_batches_tracked += 1
    share = plain.momentum or 1 / float(plain.num_batches_tracked)
    plain.running_mean.lerp_(whole.mean(dims), share)
    plain.running_var.lerp_(whole.var(dims), share)


def make_layers(momentum=0.1):
    model = nn.Sequential(nn.BatchNorm1d(3, dtype=torch.float64, momentum=momentum))
    plain = copy.deepcopy(model[0])
    convert_batchnorm(model)
    return model, StageStatistics(model), plain


def assert_same_buffers(layer, plain):
    for name, value in plain.state_dict().items():
        assert torch.allclose(layer.state_dict()[name], value, **NEAR), name


@pytest.mark.parametrize("momentum", [0.1, 1.0, None])
@pytest.mark.parametrize("num_microbatches", [1, 3, 4])
def test_step_equals_one_update_with_the_whole_batch(num_microbatches, momentum):
    model, statistics, plain = make_layers(momentum)
    assert len(statistics) == 1
    torch_layer = copy.deepcopy(plain)
    for step in range(5):
        whole = batch(5, step)
        statistics.clear()
        pieces = list(enumerate(whole.tensor_split(num_microbatches)))
        for m, piece in reversed(pieces):
            forward(model, statistics, m, piece)
        statistics.start_reduction(SoloGroup(0))
        statistics.finish()
        update(plain, whole)
        torch_layer(whole)  # the inputs of the first layer do not depend on the split
    assert_same_buffers(model[0], plain)
    assert_same_buffers(model[0], torch_layer)
    assert model[0].num_batches_tracked == 5


def test_statistics_of_replicas_are_bitwise_equal():
    def body(world):
        model, statistics, plain = make_layers()
        group = world.group([(0, 1, 2)])
        for step in range(3):
            whole = batch(7, step)
            pieces = whole.tensor_split(6)
            for m in (0, 1):
                forward(model, statistics, m, pieces[world.rank * 2 + m])
            statistics.start_reduction(group)
            statistics.finish()
            update(plain, whole)
        assert_same_buffers(model[0], plain)
        return model.state_dict()

    first, *others = run_on_threads(3, body)
    for state in others:
        assert all(torch.equal(state[name], value) for name, value in first.items())


def test_unused_layer_and_skipped_step_keep_the_statistics():
    model, statistics, plain = make_layers()
    statistics.clear()
    statistics.start_reduction(SoloGroup(0))
    statistics.finish()
    assert_same_buffers(model[0], plain)
    forward(model, statistics, 0, batch(4))
    statistics.start_reduction(SoloGroup(0))
    statistics.finish(is_kept=False)
    assert_same_buffers(model[0], plain)
    statistics.finish()  # no statistics of the skipped step remain
    assert_same_buffers(model[0], plain)


def test_layer_called_twice_is_updated_once():
    layer, statistics, plain = make_layers()
    model = nn.Sequential(layer[0], nn.Identity(), layer[0])
    both = StageStatistics(model)
    assert len(both) == 1
    forward(model, both, 0, batch(4))
    both.start_reduction(SoloGroup(0))
    both.finish()
    first = batch(4)
    with reporting(Reports()):
        again = layer[0](first)
    update(plain, torch.cat([first, again.detach()]))
    assert_same_buffers(layer[0], plain)
    assert len(statistics) == 1


def test_untracked_and_other_layers_have_no_statistics():
    model = nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False), nn.Linear(3, 3))
    convert_batchnorm(model)
    assert len(StageStatistics(model)) == 0
