"""Offloading of activations to the host: results are bitwise equal and device memory is freed."""

from functools import partial

import pytest
import torch
from torch import nn

from gpipe_hpc import LayerSpec, Pipeline, run_on_threads
from gpipe_hpc.device.device import HostDevice
from gpipe_hpc.engine.layer_runner import RunMode
from gpipe_hpc.engine.offload import HostCopy, PinnedBufferPool
from gpipe_hpc.engine.run import Outcome, Run
from gpipe_hpc.engine.stage import Stage
from gpipe_hpc.engine.stage_runner import ForwardPlan, StageRunner
from gpipe_hpc.engine.wiring import StageRoutes
from gpipe_hpc.models import build_model, token_cross_entropy
from gpipe_hpc.schedule import Op, schedule_names
from tests.support import cover_of

RUN = Run("test", lambda microbatch: lambda layer: 0, 1)
NAMES = [name for name in schedule_names() if name != "file"]
SIZES = {"vocab_size": 13, "block_size": 5, "num_layers": 7, "num_heads": 2, "width": 8}
TOKENS = torch.randint(13, (11, 6), generator=torch.Generator().manual_seed(0))


def trained(world, *, model="gpt", **settings):
    layers = build_model("gpt", **SIZES, dropout=0.1) if model == "gpt" else convolutions()
    loss_fn = token_cross_entropy if model == "gpt" else lambda y, t: (y.square().sum(), len(y))
    pipe = Pipeline(layers, loss_fn, seed=4, partition="uniform", world=world, **settings)
    inputs, targets = TOKENS[:, :-1], TOKENS[:, 1:]
    if model != "gpt":
        inputs, targets = TOKENS.float().view(11, 1, 6, 1).repeat(1, 3, 1, 6) / 13, TOKENS[:, 0]
    part = pipe.share(len(inputs))
    losses = [pipe.step(inputs[part], targets[part]).loss for _ in range(2)]
    num = sum(action.op is Op.OFFLOAD for action in pipe.schedule.ranks[pipe.stage_rank])
    return losses, {name: p.grad.clone() for name, p in pipe.named_parameters()}, num


class Skipping(nn.Module):
    """Convolution with batch norm, in-place ReLU and an optional skip connection."""

    def __init__(self, num_popped, num_stashed):
        super().__init__()
        self.conv = nn.Conv2d(3 * (1 + num_popped), 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)
        self.act = nn.ReLU(inplace=True)
        self.num_stashed = num_stashed

    def forward(self, x, *popped):
        y = self.act(self.norm(self.conv(torch.cat([x, *popped], 1))))
        return (y, y) if self.num_stashed else y


def convolutions():
    first = [LayerSpec(Skipping, 0, 1).stashing("a")] + [LayerSpec(Skipping, 0, 0)] * 6
    return [*first, LayerSpec(Skipping, 1, 0).popping("a")]


MODELS = ("gpt", "convolutions")
# On two ranks these schedules use activations too soon to offload any. gems does on any number.
ON_FOUR = ("one_f_one_b", "auto", "chimera", "dualpipe")


def assert_bitwise_equal(name, model, recompute, **settings):
    settings = {"schedule": name, "recompute": recompute, "microbatches": 4, **settings}
    ranks = 4 if name in ON_FOUR else 2
    plain, moved = (
        run_on_threads(ranks, partial(trained, model=model, offload=offload, **settings))
        for offload in (False, True)
    )
    assert plain[0][2] == 0
    assert sum(num for _, _, num in moved) > 0
    for (losses, gradients, _), (own_losses, own, _) in zip(plain, moved, strict=True):
        assert losses == own_losses
        assert all(torch.equal(own[n], g) for n, g in gradients.items())


@cover_of(
    "name, model, recompute", ("gpipe", "zb_v", "zb_h2", "chimera"), MODELS, ("always", "never")
)
def test_offload_is_bitwise_equal(name, model, recompute):
    assert_bitwise_equal(name, model, recompute)


@pytest.mark.product
@pytest.mark.parametrize("recompute", ["except_last", "never"])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "gems"])
def test_offload_is_bitwise_equal_in_every_schedule(name, recompute):
    options = {"schedule_options": {"waves": 1}} if name == "hanayo" else {}
    assert_bitwise_equal(name, "convolutions", recompute, microbatches=6, **options)


def alive_storages(recipe, layers, *, offload):
    """Return for each saved storage whether it is alive after F, or after OFFLOAD if `offload`."""
    stage = Stage(0, dict(enumerate(layers)), HostDevice(), StageRoutes({-1: ()}, {}))
    references = []

    original = HostCopy._pack

    def pack(self, tensor):
        packed = original(self, tensor)
        if packed is not tensor:
            references.append(tensor.untyped_storage()._weak_ref())
        return packed

    HostCopy._pack = pack
    try:
        pool = PinnedBufferPool(stage.device)
        work = StageRunner(stage, pinned=pool)
        x = torch.randn(4, 8).requires_grad_()
        work.forward(RUN, 0, [x], 4, recipe, Outcome())
        del x
    finally:
        HostCopy._pack = original
    if offload:
        work.offload(0)
        pool.before_compute()
        # The copy overlaps with the next compute action.
        assert not any(torch.UntypedStorage._expired(each) for each in references)
        pool.before_compute()
    alive = [not torch.UntypedStorage._expired(each) for each in references]
    if offload:
        work.fetch(0)
    if recipe.mode is RunMode.RECORD:
        work.recompute(RUN, 0)
    work.backward(0, [])
    return alive


@pytest.mark.parametrize(
    "recipe",
    [
        ForwardPlan(RunMode.TRAIN, offloads=True),
        ForwardPlan(RunMode.TRAIN, splits=True, offloads=True),
        ForwardPlan(RunMode.RECORD, offloads=True),
    ],
    ids=["graph", "split", "input"],
)
def test_offloaded_activations_are_freed_on_the_device(recipe):
    layers = [nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()) for _ in range(2)]
    for _ in range(2):  # the first run copies inputs to detect in-place writes
        before = alive_storages(recipe, layers, offload=False)
        after = alive_storages(recipe, layers, offload=True)
    assert before and all(before)
    assert not any(after)


def test_parameters_and_buffers_are_not_offloaded():
    norm = nn.BatchNorm1d(8).eval()
    device = HostDevice()
    pool = PinnedBufferPool(device)
    host = HostCopy([*norm.parameters(), *norm.buffers()], device, pool)
    with host.collecting():
        output = norm(torch.randn(4, 8, requires_grad=True))
    host.offload()
    pool.end()
    assert norm.weight.untyped_storage().size() == norm.running_mean.untyped_storage().size() == 32
    host.fetch()
    output.sum().backward()
    assert norm.weight.grad is not None


class PassThrough(nn.Module):
    """Return the mask unchanged, and also the other input if there is no linear layer."""

    def __init__(self, has_layer):
        super().__init__()
        self.linear = nn.Linear(4, 4) if has_layer else None

    def forward(self, pair):
        x, mask = pair
        return (x if self.linear is None else self.linear(x) * mask[:, None]), mask


def pass_through_loss(world, **settings):
    layers = [LayerSpec(PassThrough, i % 2 == 0) for i in range(4)]
    pipe = Pipeline(layers, lambda y, t: (y[0] - t).square().mean(), world=world, **settings)
    x = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
    return pipe.step((x, torch.arange(9)), -x).loss


@pytest.mark.parametrize("recompute", ["always", "never"])
def test_offload_handles_inputs_that_a_stage_returns_unchanged(recompute):
    settings = {"schedule": "zb_v", "microbatches": 4, "recompute": recompute}
    plain, moved = (
        run_on_threads(2, partial(pass_through_loss, offload=offload, **settings))
        for offload in (False, True)
    )
    assert plain == moved
