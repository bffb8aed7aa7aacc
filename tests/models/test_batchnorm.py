"""Tests of BatchNorm layers alone: conversion, reported statistics and errors."""

import copy
import threading

import pytest
import torch
from torch import nn

from gpipe_hpc.errors import ModelError
from gpipe_hpc.models import (
    Moments,
    PipelineStep,
    PooledBatchNorm,
    Reports,
    convert_batchnorm,
    normalising_together,
    pooled,
    reporting,
    shifted_sums,
)
from tests.simulated.single import single_device

KINDS = {
    nn.BatchNorm1d: (6, 3),
    nn.BatchNorm2d: (4, 3, 2, 5),
    nn.BatchNorm3d: (3, 3, 2, 2, 2),
}


def batch(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype) * 3 + 2


def run(layer, value):
    with reporting(Reports()) as reports:
        output = layer(value)
    return output, reports.statistics


class Own(nn.BatchNorm2d):
    pass


def test_plain_ones_are_converted_and_the_rest_is_left():
    model = nn.Sequential(
        nn.Conv2d(3, 4, 1),
        nn.Sequential(nn.BatchNorm2d(4), Own(4)),
        nn.InstanceNorm2d(4),
        nn.InstanceNorm2d(4, track_running_stats=True),
        Own(4, track_running_stats=False),
    )
    done = convert_batchnorm(model, "layers.7")
    assert done.converted == ("layers.7.1.0",)
    assert done.left == ("layers.7.1.1 (Own)", "layers.7.3 (InstanceNorm2d)")
    assert isinstance(model[1][0], PooledBatchNorm) and type(model[1][1]) is Own
    assert convert_batchnorm(model, "layers.7") == done


@pytest.mark.parametrize("kind", KINDS)
def test_conversion_keeps_everything(kind):
    layer = kind(3, eps=0.1, momentum=None).eval()
    layer.running_mean += 1
    layer.weight.requires_grad_(False)
    before, state = dict(layer.__dict__), layer.state_dict()
    parts = {id(value) for value in [*layer.parameters(), *layer.buffers()]}
    assert convert_batchnorm(layer, "layers.0").converted == ("layers.0",)
    assert isinstance(layer, kind) and isinstance(layer, PooledBatchNorm)
    assert {id(value) for value in [*layer.parameters(), *layer.buffers()]} == parts
    assert layer.__dict__ == before | {"place": "layers.0"}
    assert list(layer.state_dict()) == list(state)
    kind(3).load_state_dict(layer.state_dict())


@pytest.mark.parametrize("options", [{}, {"affine": False}, {"track_running_stats": False}])
@pytest.mark.parametrize("kind", KINDS)
def test_outside_of_a_pipeline_it_is_torchs(kind, options):
    plain = kind(3, dtype=torch.float64, **options)
    ours = copy.deepcopy(plain)
    convert_batchnorm(ours)
    for mode in (True, False):
        for seed in range(3):
            value = batch(*KINDS[kind], seed=seed)
            assert torch.equal(ours.train(mode)(value), plain.train(mode)(value))
    for name, value in plain.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value)


@pytest.mark.parametrize("options", [{}, {"affine": False}, {"track_running_stats": False}])
@pytest.mark.parametrize("kind", KINDS)
def test_reports_what_it_measured_and_leaves_its_buffers(kind, options):
    plain = kind(3, dtype=torch.float64, **options)
    ours = copy.deepcopy(plain)
    convert_batchnorm(ours)
    before = copy.deepcopy(ours.state_dict())
    value = batch(*KINDS[kind])
    output, statistics = run(ours, value)
    assert torch.equal(output, plain(value))
    for name, tensor in before.items():
        assert torch.equal(ours.state_dict()[name], tensor)
    if not plain.track_running_stats:
        assert statistics == []
        return
    ((layer, moments),) = statistics
    dims = [d for d in range(value.dim()) if d != 1]
    assert layer is ours and moments.num_values == value.numel() // 3
    assert torch.allclose(moments.mean, value.mean(dims), rtol=1e-14)
    assert torch.allclose(moments.squares / (moments.num_values - 1), value.var(dims), rtol=1e-14)


def test_evaluation_reports_nothing():
    layer = nn.BatchNorm1d(3).eval()
    convert_batchnorm(layer)
    assert run(layer, batch(1, 3, dtype=torch.float32))[1] == []


def test_one_value_per_channel_is_refused():
    model = nn.Sequential(nn.BatchNorm1d(3))
    convert_batchnorm(model, "layers.2")
    with pytest.raises(ModelError, match=r"layers\.2\.0 \(BatchNorm1d\).*\(1, 3\)"):
        run(model, torch.zeros(1, 3))


def test_sync_batchnorm_is_refused():
    with pytest.raises(ModelError, match=r"layers\.1: SyncBatchNorm"):
        convert_batchnorm(nn.SyncBatchNorm(3), "layers.1")


@pytest.mark.parametrize("shift", [None, 0.0, 2.0])
def test_pooled_moments_are_those_of_all_values(shift):
    pieces = batch(17, 3).split([5, 1, 4, 7])
    moments = [Moments(len(p), p.mean(0), (p - p.mean(0)).square().sum(0)) for p in pieces]
    around = None if shift is None else torch.full((3,), shift)
    half = shifted_sums(moments[:2], around) + shifted_sums(moments[2:], around)
    mean, squares, count = pooled(half, around)
    whole = torch.cat(pieces)
    assert count == 17
    assert torch.allclose(mean, whole.mean(0), rtol=1e-14)
    assert torch.allclose(squares / 16, whole.var(0), rtol=1e-13)


def test_pooling_does_not_cancel():
    # Plain float32 sums of squares would lose every digit here.
    value = batch(64, 1, dtype=torch.float32).double() * 1e-2 + 1e5
    moments = [Moments(16, p.mean(0), (p - p.mean(0)).square().sum(0)) for p in value.split(16)]
    for shift in (None, torch.tensor([99_999.0])):
        _, squares, _ = pooled(shifted_sums(moments, shift), shift)
        assert torch.allclose(squares / 63, value.var(0), rtol=1e-2 if shift is None else 1e-9)


class Meeting:
    """All-reduce of tensors over several threads."""

    def __init__(self, size):
        self._barrier = threading.Barrier(size)
        self._parts = {}

    def sum_over(self, index):
        def add_up(tensor):
            self._parts[index] = tensor.clone()
            self._barrier.wait(10)
            total = sum(self._parts[i] for i in sorted(self._parts))
            self._barrier.wait(10)
            tensor.copy_(total)

        return add_up


@pytest.mark.parametrize("options", [{}, {"affine": False}, {"track_running_stats": False}])
@pytest.mark.parametrize("sizes", [(4, 4), (5, 1, 2)])
def test_normalising_together_is_one_batch(sizes, options):
    whole = nn.BatchNorm2d(3, dtype=torch.float64, **options)
    value = batch(sum(sizes), 3, 2, 2).requires_grad_()
    slope = batch(sum(sizes), 3, 2, 2, seed=1)
    copies = [copy.deepcopy(whole) for _ in sizes]
    expected = whole(value)
    (expected * slope).sum().backward()
    meeting, found = Meeting(len(sizes)), {}
    pieces = [p.detach().requires_grad_() for p in value.split(sizes)]

    def body(index):
        convert_batchnorm(copies[index])
        with normalising_together(meeting.sum_over(index)):
            found[index] = run(copies[index], pieces[index])
        (found[index][0] * slope.split(sizes)[index]).sum().backward()

    threads = [threading.Thread(target=body, args=(i,), daemon=True) for i in range(len(sizes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    near = {"rtol": 1e-12, "atol": 1e-12}
    assert torch.allclose(torch.cat([found[i][0] for i in range(len(sizes))]), expected, **near)
    assert torch.allclose(torch.cat([p.grad for p in pieces]), value.grad, **near)
    for name, parameter in whole.named_parameters():
        total = sum(dict(each.named_parameters())[name].grad for each in copies)
        assert torch.allclose(total, parameter.grad, **near)
    if whole.track_running_stats:
        moments = [found[i][1][0][1] for i in range(len(sizes))]
        shift = torch.zeros(3)
        mean, squares, count = pooled(shifted_sums(moments, shift), shift)
        assert torch.allclose(0.1 * mean, whole.running_mean, **near)
        assert torch.allclose(0.9 + 0.1 * squares / (count - 1), whole.running_var, **near)


@pytest.mark.parametrize("counts", [[4, 4, 4], [4, 4, 3], [1], [5, 3, 4]])
def test_statistics_are_summed_without_waiting_for_the_device(counts, monkeypatch):
    """Regression: a host-to-device copy of the number of values made the host wait."""
    means, squares = torch.randn(2, len(counts), 3, dtype=torch.float64)
    own = [Moments(*each) for each in zip(counts, means, squares, strict=True)]
    shift = torch.randn(3)
    column = torch.tensor(counts, dtype=torch.float64)[:, None]
    apart = means - shift.double()
    expected = [column.sum(0), (column * apart).sum(0), (squares + column * apart.square()).sum(0)]
    assert torch.equal(shifted_sums(own, shift), torch.cat(expected))
    monkeypatch.setattr(torch.Tensor, "new_tensor", None)  # the function that copied
    with single_device() as device:
        there = [Moments(n, *map(device.to_device, tensors)) for n, *tensors in own]
        shift = device.to_device(shift)
        device.host_waits.clear()
        shifted_sums(there, shift)
        assert not device.host_waits


@pytest.mark.parametrize("options", [{}, {"momentum": None}])
def test_amid_a_step_nothing_is_counted_on_any_thread(options):
    """Accelerators run the backward, and so recomputed forwards, in other threads."""
    layer = nn.BatchNorm1d(3, **options)
    convert_batchnorm(layer)
    layer.within = PipelineStep()
    before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    expected = nn.BatchNorm1d(3)(batch(5, 3, dtype=torch.float32))
    outputs = []

    def body():
        outputs.append(layer(batch(5, 3, dtype=torch.float32)))

    layer.within.begin()
    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    layer.within.end()
    assert torch.equal(outputs[0], expected)
    for name, buffer in layer.named_buffers():
        assert torch.equal(buffer, before[name]), name
    layer(batch(5, 3, dtype=torch.float32))
    assert layer.num_batches_tracked == 1
