"""Sums of a step on a device: the bits of a CPU, by few kernels, and nobody waits for them."""

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
    """Return numbers whose sum says in which order they were added."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=generator, dtype=torch.float64) * torch.logspace(
        0, 12, count, dtype=torch.float64
    )


class Kernels(TorchDispatchMode):
    """Count what would be a kernel each."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket not in _VIEWS
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("count", [1, 2, 63, 1000, 20_000])
def test_weights_are_summed_from_left_to_right_on_a_device(count, monkeypatch):
    """`cumsum` of floats is refused there under deterministic algorithms, and has another order."""
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
def test_weights_of_all_replicas_are_summed_at_once(counts):
    """A sum was started for each replica."""
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
def test_a_device_that_sums_a_bag_in_another_order_adds_one_by_one(has_kernel, monkeypatch):
    def turned(order, weights, mode):
        if not has_kernel:
            raise NotImplementedError("embedding_bag")
        return weights.flip(0).cumsum(0)[-1:]

    values = numbers(500)
    with single_device() as device:
        monkeypatch.setattr(step_result.F, "embedding_bag", turned)
        total = ordered_sum(device)(device.to_device(values))
        assert device.to_host(total).item() == values.cumsum(0)[-1].item()


def reduction(device, num_global):
    """Return what reduces a step of one rank; making it looks at how the device sums."""
    return StepReduction(num_global, 2, SoloGroup(0), 0, device)


def reduce(own, values, weights):
    terms = {i: LossTerm(v, w) for i, (v, w) in enumerate(zip(values, weights, strict=True))}
    return own.reduce(terms, {}, {1}, reported=[3.0]).loss


def test_a_loss_is_read_from_one_copy_that_is_under_way_when_the_step_ends():
    """Each figure of a step's result was a wait of its own for the device."""
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


def test_terms_of_a_device_are_put_together_by_few_kernels():
    """Each loss and each weight of a micro-batch was a copy of its own."""

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
def test_kernels_do_not_grow_with_the_parameters(dtypes):
    """The norm of each was made wide and squared by itself, and so was each peak."""

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


def test_clipping_on_a_device_has_the_bits_of_a_cpu_and_waits_for_nothing():
    """Zeros stood for gradients that are not there, which changed the last bit of the norm."""

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
def test_a_device_divides_as_a_cpu_does(dtype, monkeypatch):
    """A device rounds a scalar of its own to the 16 bits of what it divides; a CPU does not."""
    monkeypatch.setattr("gpipe_hpc.data_parallel.buckets._SMALL", 40)
    monkeypatch.setattr("gpipe_hpc.data_parallel.buckets.PACK", 60)
    generator = torch.Generator().manual_seed(0)
    owns = [torch.randn(n, 3, generator=generator, dtype=dtype) for n in (5, 9, 11, 40, 2)]
    number = torch.tensor(1001 / 1024, dtype=torch.float64)
    expected = [each.clone() for each in owns]
    for each in expected:
        each.div_(number)
    on_cpu = [each.clone() for each in owns]
    Divisor(number, HOST).divide(on_cpu)
    assert all(map(torch.equal, on_cpu, expected))
    with single_device() as device:
        there = [device.to_device(each.clone()) for each in owns]
        divisor = Divisor(device.to_device(number.clone()), device)
        device.host_waits.clear()
        with _RoundedScalars():
            divisor.divide(there)
        assert not device.host_waits
        assert all(torch.equal(device.to_host(a), b) for a, b in zip(there, expected, strict=True))


class _RoundedScalars(TorchDispatchMode):
    """Compute as a device does, which casts a scalar tensor to what it is divided into."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten._foreach_div_.Tensor, torch.ops.aten.div_.Tensor):
            first = args[0] if isinstance(args[0], torch.Tensor) else args[0][0]
            scalar = args[1]
            args = (args[0], scalar.to(first.dtype) if scalar.dim() == 0 else scalar)
        return func(*args, **(kwargs or {}))


def test_gradients_that_come_are_copied_at_once_on_a_device():
    """Each parameter's first gradient of a step was a kernel of its own."""

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
                parameter.grad = given[name].detach()  # the memory has two owners
            with Kernels() as kernels:
                gradients.unshare()
            for name, parameter in named.items():
                assert parameter.grad.data_ptr() != given[name].data_ptr()
                assert (device.to_host(parameter.grad) == 2.0).all()
            return kernels.count - number  # memory for each

    assert count(20) == count(5)


def test_what_is_fetched_is_as_it_was_when_it_was_asked_for():
    with single_device() as device:
        value = device.to_device(torch.tensor([1.0, 2.0]))
        fetched = AsyncHostTensor.of(value, device)
        value.add_(math.pi)
        device.host_waits.clear()
        assert fetched.part(slice(1, 2)).read().tolist() == [2.0]
        assert fetched.read().tolist() == [1.0, 2.0]
        assert len(device.host_waits) == 1


@pytest.mark.parametrize("value", [0.0, 3.0])
def test_a_loss_without_a_graph_is_looked_at_when_the_next_step_begins(value):
    """The host waited for each such loss amid the step, also where it was a 0 that is meant."""

    def loss(output, target):
        return output.detach().sum() * 0 + value, 1.0

    def body(world):
        pipe = Pipeline(linears(2), loss, microbatches=2, world=world)
        _, found = between(world.device, lambda: pipe.step(*batch(4)))
        assert not [wait for wait in found if "loss.py" in str(wait) or "microbatch" in str(wait)]
        if value:
            with pytest.raises(ModelError, match=r"got 3 without a graph"):
                pipe.step(*batch(4))
        else:
            pipe.step(*batch(4))

    run_simulated(1, body)
