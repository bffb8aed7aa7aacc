"""Reductions of a step on a device: bitwise equal to a CPU, few kernels and no host waits."""

import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from gpipe_hpc import Pipeline
from gpipe_hpc.comm.collectives.group import SoloGroup
from gpipe_hpc.data_parallel import Divisor, GradientBuckets
from gpipe_hpc.device.deferred import AsyncHostTensor
from gpipe_hpc.device.device import HostDevice
from gpipe_hpc.engine import step_result
from gpipe_hpc.engine.gradient_norms import clip_by_norm, gather_norms
from gpipe_hpc.engine.loss import LossTerm
from gpipe_hpc.engine.precision import count_overflows
from gpipe_hpc.engine.step_reduction import StepReduction
from gpipe_hpc.engine.step_result import StepLoss, ordered_sum, share_places
from gpipe_hpc.errors import ModelError
from tests.simulated.single import single_device
from tests.simulated.world import between, run_simulated
from tests.support import batch, linears

HOST = HostDevice()
_VIEWS = [
    getattr(torch.ops.aten, name)
    for name in ("select", "unbind", "slice", "detach", "view", "alias")
]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]


def numbers(count, seed=0):
    """Return numbers whose sum depends on the order of addition."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=generator, dtype=torch.float64) * torch.logspace(
        0, 12, count, dtype=torch.float64
    )


class Kernels(TorchDispatchMode):
    """Count operations that launch a kernel."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket not in _VIEWS
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("count", [1, 2, 63, 1000, 20_000])
def test_ordered_sum_on_device_adds_left_to_right_without_waiting(count, monkeypatch):
    """On a device, `cumsum` raises under deterministic algorithms and adds in another order."""
    values = numbers(count)
    expected = 0.0
    for value in values.tolist():
        expected += value
    assert ordered_sum(HOST)(values).item() == expected
    with single_device() as device:
        add = ordered_sum(device)
        monkeypatch.setattr(torch.Tensor, "cumsum", None)
        there = device.to_device(values)
        device.host_waits.clear()
        total = add(there)
        assert not device.host_waits
        assert device.to_host(total).item() == expected


@pytest.mark.parametrize("counts", [[3] * 64, [5, 1, 0, 2], [7]])
def test_weights_of_all_replicas_are_summed_by_few_kernels(counts):
    """Regression: one sum was launched for each replica."""
    weights, starts = numbers(sum(counts)), [sum(counts[:i]) for i in range(len(counts))]
    expected = []
    for start, count in zip(starts, counts, strict=True):
        expected.append(0.0)
        for value in weights[start : start + count].tolist():
            expected[-1] += value
    with single_device() as device:
        for each in (HOST, device):
            terms = each.to_device(torch.stack([weights, weights]))
            places = each.to_device(share_places(counts))
            loss = StepLoss(terms, AsyncHostTensor.of(terms.flatten(), each), ordered_sum(each))
            with Kernels() as kernels:
                found = loss.weights_of(places)
            assert each.to_host(found).tolist() == expected
            assert kernels.count <= 8


@pytest.mark.parametrize("has_kernel", [True, False])
def test_ordered_sum_falls_back_if_embedding_bag_is_unusable(has_kernel, monkeypatch):
    def in_reverse(order, weights, mode):
        if not has_kernel:
            raise NotImplementedError("embedding_bag")
        return weights.flip(0).cumsum(0)[-1:]

    values = numbers(500)
    with single_device() as device:
        monkeypatch.setattr(step_result.F, "embedding_bag", in_reverse)
        total = ordered_sum(device)(device.to_device(values))
        assert device.to_host(total).item() == values.cumsum(0)[-1].item()


def reduction(device, num_global):
    """Return the step reduction of a single rank; its constructor probes how the device sums."""
    return StepReduction(num_global, 2, SoloGroup(0), 0, device)


def reduce(own, values, weights):
    terms = {i: LossTerm(v, w) for i, (v, w) in enumerate(zip(values, weights, strict=True))}
    return own.reduce(terms, {}, {1}, reported=[3.0]).loss


def test_step_result_is_read_with_one_host_wait_after_the_step():
    """Regression: each value of a step's result waited for the device separately."""
    values, weights = numbers(6), numbers(6, seed=1).abs()
    expected = reduce(reduction(HOST, 6), values.unbind(), weights.unbind())
    with single_device() as device:
        there = [device.to_device(each).unbind() for each in (values, weights)]
        own = reduction(device, 6)
        device.host_waits.clear()
        loss = reduce(own, *there)
        assert not device.host_waits
        assert loss.value == expected.value
        assert loss.microbatch_losses == expected.microbatch_losses
        assert loss.known_weight == expected.known_weight == expected.weight.item()
        assert len(device.host_waits) == 1
        assert device.to_host(loss.weight).item() == expected.known_weight


def test_kernel_count_does_not_grow_with_number_of_loss_terms():
    """Regression: each loss and each weight of a micro-batch was copied separately."""

    def count(number):
        values, weights = numbers(number), numbers(number, seed=1).abs()
        with single_device() as device:
            there = [device.to_device(each).unbind() for each in (values, weights)]
            own = {i: LossTerm(*pair) for i, pair in enumerate(zip(*there, strict=True))}
            reduction = StepReduction(number, 0, SoloGroup(0), 0, device)
            with Kernels() as kernels:
                reduction.reduce(own)
            return kernels.count

    assert count(64) == count(4)


def parameters(count, dtypes=(torch.float32,), seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for number in range(count):
        dtype = dtypes[number % len(dtypes)]
        shape = (number % 5 + 1, 3)
        parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
        parameter.grad = torch.randn(shape, generator=generator, dtype=dtype)
        made[str(number)] = parameter
    return made


@pytest.mark.parametrize("dtypes", [DTYPES[:1], DTYPES[:4]])
def test_kernel_count_does_not_grow_with_number_of_parameters(dtypes):
    """Regression: each gradient was converted, squared and checked for overflow separately."""

    def count(number):
        own = parameters(number, dtypes)
        gradients = [p.grad for p in own.values()]
        with Kernels() as kernels:
            norms = gather_norms(own, own.keys(), list(own), SoloGroup(0), HOST)
            clip_by_norm(own, norms, 0.5)
            count_overflows(gradients, HOST)
            Divisor(torch.tensor(0.77, dtype=torch.float64), HOST).divide(gradients)
        return kernels.count

    assert count(8) == count(64)


def test_clipping_on_device_is_bitwise_equal_to_cpu_without_waiting():
    """Regression: zeros in place of missing gradients changed the last bit of the norm."""

    def named(place=lambda tensor: tensor):
        made = {}
        for name, p in parameters(40).items():
            made[name] = nn.Parameter(place(p.detach()))
            made[name].grad = place(p.grad)
        for absent in ("0", "7", "8", "39"):
            made[absent].grad = None
        return made

    own = named()
    norms = gather_norms(own, own.keys(), list(own), SoloGroup(0), HOST)
    expected = clip_by_norm(own, norms, 0.5)
    assert expected.item() == nn.utils.clip_grad_norm_(named().values(), 0.5).item()
    with single_device() as device:
        there = named(device.to_device)
        device.host_waits.clear()
        norms = gather_norms(there, there.keys(), list(there), SoloGroup(0), device)
        norm = clip_by_norm(there, norms, 0.5)
        assert not device.host_waits
        assert device.to_host(norm).item() == expected.item()
        for name, parameter in there.items():
            gradient = own[name].grad
            found = parameter.grad
            assert found is gradient or torch.equal(device.to_host(found), gradient)


@pytest.mark.parametrize("dtype", DTYPES)
def test_division_on_device_is_bitwise_equal_to_cpu(dtype, monkeypatch):
    """A device rounds a scalar tensor to the dtype of a 16-bit dividend; a CPU does not."""
    monkeypatch.setattr("gpipe_hpc.data_parallel.buckets._SMALL", 40)
    monkeypatch.setattr("gpipe_hpc.data_parallel.buckets.PACK", 60)
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(n, 3, generator=generator, dtype=dtype) for n in (5, 9, 11, 40, 2)]
    number = torch.tensor(1001 / 1024, dtype=torch.float64)
    expected = [each.clone() for each in values]
    for each in expected:
        each.div_(number)
    on_cpu = [each.clone() for each in values]
    Divisor(number, HOST).divide(on_cpu)
    assert all(map(torch.equal, on_cpu, expected))
    with single_device() as device:
        there = [device.to_device(each.clone()) for each in values]
        divisor = Divisor(device.to_device(number.clone()), device)
        device.host_waits.clear()
        with _RoundedScalars():
            divisor.divide(there)
        assert not device.host_waits
        assert all(torch.equal(device.to_host(a), b) for a, b in zip(there, expected, strict=True))


class _RoundedScalars(TorchDispatchMode):
    """Emulate a device, which casts a scalar divisor to the dtype of the dividend."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten._foreach_div_.Tensor, torch.ops.aten.div_.Tensor):
            first = args[0] if isinstance(args[0], torch.Tensor) else args[0][0]
            scalar = args[1]
            args = (args[0], scalar.to(first.dtype) if scalar.dim() == 0 else scalar)
        return func(*args, **(kwargs or {}))


def test_gradients_are_copied_by_constant_number_of_kernels_on_device():
    """Regression: each parameter's first gradient of a step was copied by a separate kernel."""

    def count(number):
        with single_device() as device:
            named = {
                name: nn.Parameter(device.to_device(p.detach()))
                for name, p in parameters(number).items()
            }
            gradients = GradientBuckets(named, device)
            gradients.rebuild()
            gradients.clear()
            given = {name: torch.full_like(p, 2.0) for name, p in named.items()}
            for name, parameter in named.items():
                parameter.grad = given[name].detach()  # the memory is shared
            with Kernels() as kernels:
                gradients.unshare()
            for name, parameter in named.items():
                assert parameter.grad.data_ptr() != given[name].data_ptr()
                assert (device.to_host(parameter.grad) == 2.0).all()
            return kernels.count - number  # one allocation for each parameter

    assert count(20) == count(5)


def test_async_host_tensor_ignores_later_writes_to_its_source():
    with single_device() as device:
        value = device.to_device(torch.tensor([1.0, 2.0]))
        fetched = AsyncHostTensor.of(value, device)
        value.add_(math.pi)
        device.host_waits.clear()
        assert fetched.part(slice(1, 2)).read().tolist() == [2.0]
        assert fetched.read().tolist() == [1.0, 2.0]
        assert len(device.host_waits) == 1


@pytest.mark.parametrize("value", [0.0, 3.0])
def test_loss_without_graph_is_checked_when_next_step_begins(value):
    """Regression: the host waited for each such loss during the step, even for an intended 0."""

    def loss(output, target):
        return output.detach().sum() * 0 + value, 1.0

    def body(world):
        pipe = Pipeline(linears(2), loss, microbatches=2, world=world)
        _, found = between(world.device, lambda: pipe.step(*batch(4)))
        assert not [wait for wait in found if "loss.py" in str(wait) or "microbatch" in str(wait)]
        if value:
            with pytest.raises(ModelError, match=r"the loss 3 has no graph"):
                pipe.step(*batch(4))
        else:
            pipe.step(*batch(4))

    run_simulated(1, body)
