"""Float32 masters of weights in 16 bits: small steps count, on every layout and over a resume."""

import logging

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from gpipe_hpc import LayerSpec, Pipeline, run_on_threads
from gpipe_hpc.models import mean_squared_error
from gpipe_hpc.optim.masters import keep_masters
from gpipe_hpc.optim.optimizer import build_optimizer, optimizer_memory
from gpipe_hpc.planner import OptimizerMemory
from gpipe_hpc.planner.costs.layer_trial import LayerWeight
from gpipe_hpc.settings import AdamWConfig, LAMBConfig, LARSConfig, RMSPropConfig, SGDConfig
from tests.simulated.single import single_device

CONFIGS = [
    AdamWConfig(lr=1e-4, weight_decay=0.1),
    SGDConfig(lr=1e-3, weight_decay=0.1, momentum=0.9),
    SGDConfig(lr=1e-3, momentum=0.0),
    RMSPropConfig(lr=1e-4, momentum=0.5, centered=True),
    LARSConfig(lr=1.0, weight_decay=0.1),
    LARSConfig(lr=1.0, momentum=0.0, adapt_vectors=True),
    LAMBConfig(lr=1e-3, weight_decay=0.1),
]
ON_HOST = "gpipe_hpc.optim.masters.on_host"
IDS = ["adamw", "sgd", "plain_sgd", "rmsprop", "lars", "plain_lars", "lamb"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_steps_move_a_weight(dtype):
    """1.0 was unchanged after 1,000 steps of AdamW at 1e-5."""
    reached = {}
    for masters in (True, False):
        weight = nn.Parameter(torch.ones(3, dtype=dtype))
        config = AdamWConfig(lr=1e-5, weight_decay=0.0, masters=masters)
        optimizer = build_optimizer([("weight", weight)], config)
        for _ in range(1000):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        reached[masters] = weight.detach()
        assert weight.dtype == weight.grad.dtype == dtype
    torch.testing.assert_close(reached[True].float(), torch.full((3,), 0.99), rtol=0, atol=2e-3)
    assert torch.equal(reached[False], torch.ones(3, dtype=dtype))


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_the_weight_is_what_a_float32_one_would_round_to(config):
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(4, 5, generator=generator).bfloat16()
    low, wide = nn.Parameter(start.clone()), nn.Parameter(start.float())
    ours, plain = (build_optimizer([("w", each)], config) for each in (low, wide))
    for _ in range(20):
        low.grad = torch.randn(4, 5, generator=generator).bfloat16()
        kept, wide.grad = low.grad, low.grad.float()
        ours.step()
        plain.step()
        assert low.grad is kept and torch.equal(low, wide.bfloat16())
        assert torch.equal(ours.state[low]["master"], wide)
    for key, value in plain.state[wide].items():
        assert torch.equal(ours.state[low][key], value)


def test_float32_weights_and_those_without_gradient_have_none():
    weights = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2).bfloat16())]
    optimizer = build_optimizer([("a", weights[0]), ("b", weights[1])], AdamWConfig())
    weights[0].grad = torch.ones(2)
    optimizer.step()
    assert optimizer.state[weights[0]].keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert weights[1] not in optimizer.state


def test_a_weight_changed_by_others_goes_on_from_there():
    weight = nn.Parameter(torch.ones(2).bfloat16())
    optimizer = keep_masters(torch.optim.SGD([weight], lr=1e-3))
    for value in (None, 5.0):
        if value is not None:
            with torch.no_grad():
                weight[0] = value
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    expected = torch.tensor([5.0 - 1e-3, 1.0 - 2e-3])
    torch.testing.assert_close(optimizer.state[weight]["master"], expected)


def test_weights_of_several_dtypes_and_layouts_keep_their_bits(monkeypatch):
    """In rows, as on a device, they are what each is by itself; a gradient may be sparse."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(3, 4), (5,), (), (2, 3, 4, 4)]
    starts = [torch.randn(shape, generator=generator) for shape in shapes]
    starts[3] = starts[3].contiguous(memory_format=torch.channels_last)
    kinds = (torch.bfloat16, torch.float16, torch.float32)
    weights = [nn.Parameter(start.to(kind)) for kind in kinds for start in starts]
    singles = [nn.Parameter(weight.detach().clone()) for weight in weights]
    sets = [weights, *([single] for single in singles)]
    optimizers = [keep_masters(torch.optim.SGD(each, lr=0.01, momentum=0.9)) for each in sets]
    for step in range(4):
        for weight, single in zip(weights, singles, strict=True):
            weight.grad = torch.randn(weight.shape, generator=generator).to(weight)
            single.grad = weight.grad.clone()
        if step == 2:
            for weight in (weights[0], singles[0]):
                weight.grad = weight.grad.to_sparse()
            with torch.no_grad():
                weights[1][0] = singles[1][0] = 3.0
        with monkeypatch.context() as patch:
            patch.setattr(ON_HOST, lambda tensor: False)
            optimizers[0].step()
        for optimizer in optimizers[1:]:
            optimizer.step()
    for weight, single, own in zip(weights, singles, optimizers[1:], strict=True):
        assert torch.equal(weight, single)
        if weight.dtype is not torch.float32:
            ours, plain = optimizers[0].state[weight]["master"], own.state[single]["master"]
            assert torch.equal(ours, plain) and torch.equal(ours.to(weight.dtype), weight)


class Kernels(TorchDispatchMode):
    """Count what would be a kernel each: what makes nothing but memory, or a view, is none."""

    NONE = ("empty_like", "view", "_unsafe_view", "detach", "alias", "split_with_sizes", "split")

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket._qualified_op_name.removeprefix("aten::") not in self.NONE
        return func(*args, **(kwargs or {}))


def test_kernels_do_not_grow_with_the_weights(monkeypatch):
    """Each gradient, master and weight was copied by a kernel of its own."""
    monkeypatch.setattr(ON_HOST, lambda tensor: False)  # where a played device is called cpu

    class Idle(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {})

        def step(self):
            pass

    def count(number, device):
        weights = [nn.Parameter(device.to_device(torch.ones(3).bfloat16())) for _ in range(number)]
        optimizer, counts = keep_masters(Idle(weights)), []
        for _ in range(2):  # masters are made, and followed
            for weight in weights:
                weight.grad = torch.ones_like(weight)
            device.host_waits.clear()
            with Kernels() as kernels:
                optimizer.step()
            counts.append(kernels.count)
            assert not device.host_waits
        assert all(optimizer.state[weight]["master"].shape == (3,) for weight in weights)
        return counts

    with single_device() as device:
        assert count(4, device) == count(16, device)


WIDTH = 6


def layers(tied: bool = True) -> list[LayerSpec]:
    """Return a model in bfloat16, the first and last weight tied if wanted."""
    linear = LayerSpec(nn.Linear, WIDTH, WIDTH, dtype=torch.bfloat16)
    ends = linear.tied({"weight": "w"}) if tied else linear
    return [ends, LayerSpec(nn.Tanh), linear, ends]


def steps(world, config, first: int, last: int, load=None, save=None, tied=True):
    pipe = Pipeline(layers(tied), mean_squared_error, microbatches=2, world=world)
    optimizer = build_optimizer(pipe.named_parameters(), config)
    if load is not None:
        pipe.load(load, optimizer)
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        inputs, targets = torch.randn(2, 8, WIDTH, generator=generator).bfloat16()
        part = pipe.share(8)
        pipe.step(inputs[part], targets[part])
        pipe.clip_grad_norm_(0.1)
        optimizer.step()
    if save is not None:
        pipe.save(save, optimizer)
    masters = {n: optimizer.state[p]["master"].clone() for n, p in pipe.named_parameters()}
    return {n: p.detach().clone() for n, p in pipe.named_parameters()}, masters


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
@pytest.mark.parametrize("tied", [False, True])
def test_a_run_goes_on_exactly_on_another_layout(config, tied, tmp_path):
    """Clipped, saved by two ranks and resumed by others: the same masters to the last bit."""
    path = tmp_path / "saved"
    whole = run_on_threads(2, lambda world: steps(world, config, 0, 6, tied=tied))
    run_on_threads(2, lambda world: steps(world, config, 0, 3, save=path, tied=tied))
    # The gradient of a tied weight is summed in another order on other stages.
    for ranks in (2,) if tied else (1, 2, 3):
        parts = run_on_threads(
            ranks, lambda world: steps(world, config, 3, 6, load=path, tied=tied)
        )
        for kind in (0, 1):
            expected = {name: value for part in whole for name, value in part[kind].items()}
            found = {name: value for part in parts for name, value in part[kind].items()}
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                assert torch.equal(found[name], value), (ranks, name)
    if tied:  # it has a master on each rank that holds it, and they are equal
        first, second = (part[1]["layers.0.weight"] for part in whole)
        assert torch.equal(first, second)


def test_a_checkpoint_goes_on_with_masters_and_without(tmp_path):
    """States are of the other precision then; neither is refused, and both go on training."""
    for saved_with in (True, False):
        path = tmp_path / str(saved_with)
        pipe = Pipeline(layers(), mean_squared_error)
        inputs = torch.ones(8, WIDTH).bfloat16()
        for masters, action in ((saved_with, "save"), (not saved_with, "load")):
            config = AdamWConfig(lr=0.01, masters=masters)
            optimizer = build_optimizer(pipe.named_parameters(), config)
            if action == "load":
                pipe.load(path, optimizer)
            pipe.step(inputs, inputs)
            optimizer.step()
            if action == "save":
                pipe.save(path, optimizer)
        expected = torch.bfloat16 if saved_with else torch.float32
        for state in optimizer.state.values():
            assert state["exp_avg"].dtype == expected and state["step"] == 2
            assert ("master" in state) != saved_with


def test_without_masters_a_warning_names_a_weight(caplog):
    weight = nn.Parameter(torch.ones(2).bfloat16())
    with caplog.at_level(logging.WARNING, "gpipe_hpc.train"):
        build_optimizer([("layers.0.weight", weight)], AdamWConfig(masters=False))
    assert "layers.0.weight has 16-bit weights" in caplog.text
    caplog.clear()
    build_optimizer([("layers.0.weight", weight)], AdamWConfig())
    build_optimizer([("a", nn.Parameter(torch.ones(2)))], AdamWConfig(masters=False))
    assert not caplog.records


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
@pytest.mark.parametrize("masters", [True, False])
def test_what_the_plan_counts_is_what_is_kept(config, masters):
    config = type(config)(**(vars(config) | {"masters": masters}))
    weights = [nn.Parameter(torch.ones(5, 3).bfloat16()), nn.Parameter(torch.ones(7))]
    optimizer = build_optimizer([("a", weights[0]), ("b", weights[1])], config)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    kept = sum(
        value.nbytes
        for state in optimizer.state.values()
        for key, value in state.items()
        if key != "step" and value is not None
    )
    counted = [LayerWeight(str(i), w.numel(), w.nbytes, True) for i, w in enumerate(weights)]
    assert optimizer_memory(config).of_weights(counted) == kept
    frozen = [weight._replace(is_trained=False) for weight in counted]
    assert OptimizerMemory.of(2).of_weights([*counted, *frozen]) == 2 * (15 * 2 + 7 * 4)
