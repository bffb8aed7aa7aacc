"""Trainable parameters: ranks that hold a parameter must agree, otherwise all raise an error."""

import pytest
import torch
from torch import nn

from gpipe_hpc import LayerSpec, Pipeline, run_on_threads
from gpipe_hpc.comm.world.start import start_world
from gpipe_hpc.errors import ConfigError, ModelError
from tests.support import batches, square_sum

WIDTH, ROWS = 4, 16


def linear(*, bias=True, dtype=torch.float64):
    return LayerSpec(nn.Linear, WIDTH, WIDTH, bias=bias, dtype=dtype)


def layers(*, is_tied=False, dtype=torch.float64):
    if not is_tied:
        return [linear(dtype=dtype) for _ in range(4)]
    end = linear(bias=False, dtype=dtype).tied({"weight": "shared"})
    return [end, linear(dtype=dtype), linear(dtype=dtype), end]


def make(world, stages, outer=None, *, is_tied=False, dtype=torch.float64, **options):
    return Pipeline(
        layers(is_tied=is_tied, dtype=dtype),
        square_sum,
        stages=stages,
        replicas=world.size // stages,
        microbatches=2,
        world=world,
        partition="uniform",
        outer=outer or {},
        **options,
    )


def step(pipe, dtype=torch.float64):
    inputs, targets = batches(1, ROWS, WIDTH, dtype=dtype)[0]
    part = pipe.share(ROWS)
    return pipe.step(inputs[part], targets[part])


def assert_refused(world, stages, outer, name, *, frozen_in_step, is_tied=False):
    """Freeze a parameter on the last rank before the first or second step; assert an error."""
    pipe = make(world, stages, outer, is_tied=is_tied)
    if outer.get("shard", "none") != "none":
        pipe.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    if frozen_in_step == 2:
        step(pipe)
    if world.rank == world.size - 1:
        dict(pipe.named_parameters())[name].requires_grad_(False)
    with pytest.raises(ModelError, match=r"layers\.\d\.weight: rank \d trains .* frozen on rank"):
        step(pipe)
    return "refused"


OUTERS = [
    {},
    {"bucket_bytes": 8},
    {"order": "rank"},
    {"compress": "bfloat16"},
    {"compress": "powersgd", "powersgd_rank": 1},
    {"compress": "topk"},
    {"shard": "flat"},
    {"every": 1},
]


@pytest.mark.parametrize("frozen_in_step", [1, 2])
@pytest.mark.parametrize("outer", OUTERS, ids=str)
def test_parameter_frozen_on_one_replica_is_refused_on_all_ranks(outer, frozen_in_step):
    def body(world):
        return assert_refused(world, 1, outer, "layers.1.weight", frozen_in_step=frozen_in_step)

    assert run_on_threads(2, body, timeout_s=10) == ["refused"] * 2


@pytest.mark.parametrize("frozen_in_step", [1, 2])
@pytest.mark.parametrize(("ranks", "stages"), [(2, 2), (2, 1), (4, 2)])
def test_tied_parameter_frozen_on_one_rank_is_refused_on_all_ranks(ranks, stages, frozen_in_step):
    def body(world):
        named = {"frozen_in_step": frozen_in_step, "is_tied": True}
        return assert_refused(world, stages, {}, "layers.0.weight", **named)

    assert run_on_threads(ranks, body, timeout_s=10) == ["refused"] * ranks


@pytest.mark.parametrize("frozen_in_step", [1, 2])
def test_parameter_frozen_in_one_process_raises_error_over_gloo(
    processes, tmp_path, frozen_in_step
):
    """Gloo ends a process that receives more bytes than it expects."""

    def body(rank):
        errors = []
        for name, is_tied in (("layers.1.weight", False), ("layers.0.weight", True)):
            pipe = make(start_world(timeout_s=30), 1, is_tied=is_tied)
            if frozen_in_step == 2:
                step(pipe)
            if rank == 1:
                dict(pipe.named_parameters())[name].requires_grad_(False)
            with pytest.raises(ModelError) as caught:
                step(pipe)
            errors.append(str(caught.value))
        return errors

    errors, others = processes(2, body, tmp_path)
    assert errors == others
    for name, error in zip(("layers.1.weight", "layers.0.weight"), errors, strict=True):
        assert f"{name}: rank " in error and "but it is frozen on rank" in error


SWITCHES = {
    1: ["layers.1.weight"],
    2: ["layers.0.weight", "layers.2.bias"],
    3: ["layers.1.weight", "layers.2.weight"],
    5: ["layers.0.weight", "layers.1.bias", "layers.2.weight"],
}


def switch_trainable(pipe, at):
    for name, parameter in pipe.named_parameters():
        if name in SWITCHES.get(at, ()):
            parameter.requires_grad_(not parameter.requires_grad)


def train_switching(world, stages, outer, **options):
    """Train while parameters are frozen and unfrozen; return results, gradients and weights."""
    pipe = make(world, stages, outer, is_tied=True, **options)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.05)
    found = []
    for at in range(7):
        switch_trainable(pipe, at)
        result = step(pipe, options.get("dtype", torch.float64))
        optimizer.step()
        named = dict(pipe.named_parameters())
        gradients = {n: None if p.grad is None else p.grad.clone() for n, p in named.items()}
        weights = {n: p.detach().clone() for n, p in named.items()}
        found.append((result.loss, result.is_skipped, gradients, weights))
    return found


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("ranks", "stages"), [(2, 1), (4, 2)])
def test_freezing_between_steps_trains_as_in_one_process(ranks, stages, overlap):
    """Also in the step of the change: gradients of unfrozen parameters are reduced at its end."""
    outer = {"bucket_bytes": 200, "overlap": overlap}
    alone = run_on_threads(1, lambda world: train_switching(world, 1, {}))[0]
    for rank in run_on_threads(ranks, lambda world: train_switching(world, stages, outer)):
        for (loss, _, gradients, weights), (other, _, expected, others) in zip(
            rank, alone, strict=True
        ):
            assert loss == pytest.approx(other, rel=1e-12)
            for name, gradient in gradients.items():
                assert (gradient is None) == (expected[name] is None), name
                if gradient is not None:
                    torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-12)
                torch.testing.assert_close(weights[name], others[name], rtol=0, atol=1e-12)


def test_overflow_in_gradient_reduced_late_skips_step_on_all_ranks():
    def overflow(world):
        options = {"dtype": torch.float32, "precision": "float16"}
        pipe = make(world, 1, is_tied=True, **options)
        named, found = dict(pipe.named_parameters()), []
        named["layers.1.weight"].requires_grad_(False)
        for at in range(3):
            if at == 1:
                named["layers.1.weight"].requires_grad_(True)
                if pipe.replica == 1:
                    named["layers.1.weight"].register_hook(lambda grad: grad * float("inf"))
            result = step(pipe, torch.float32)
            found.append((result.is_skipped, named["layers.1.weight"].grad is None))
        return found

    for found in run_on_threads(2, overflow):
        assert found[1] == (True, True) and found[2] == (True, True)


def test_parameter_with_changed_dtype_is_refused_by_name():
    """Regression: torch raised its own error in the middle of a step."""

    def body(world):
        pipe = make(world, 1)
        step(pipe)
        for _, parameter in pipe.named_parameters():
            parameter.data = parameter.data.float()
        with pytest.raises(ModelError, match=r"layers\.\d\.\w+: expected float64.* got float32"):
            step(pipe, torch.float32)

    run_on_threads(2, body)


def test_replaced_parameter_storage_trains_as_before():
    def body(world, exchanges):
        pipe = make(world, 1)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        for at in range(3):
            if at == 1 and exchanges:
                for _, parameter in pipe.named_parameters():
                    parameter.data = parameter.data.clone()
            step(pipe)
            optimizer.step()
        return {name: p.detach().clone() for name, p in pipe.named_parameters()}

    mine, theirs = (run_on_threads(2, lambda w, e=e: body(w, e))[1] for e in (True, False))
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_replaced_parameter_storage_with_flat_shards_is_refused():
    """Regression: shards were gathered into an unused buffer, so replicas silently differed."""

    def body(world):
        pipe = make(world, 1, {"shard": "flat"})
        pipe.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        step(pipe)
        first = dict(pipe.named_parameters())["layers.2.weight"]
        first.data = first.data.clone()
        with pytest.raises(ConfigError, match=r"layers\.2\.weight .*p\.data\.copy_"):
            step(pipe)

    run_on_threads(2, body)


def test_replaced_parameter_storage_with_oss_trains_as_before(processes, tmp_path):
    """Regression: buffers that parameters no longer used were broadcast, so replicas differed."""

    def body(rank):
        world, found = start_world(), []
        for exchanges in (True, False):
            pipe = make(world, 1, {"shard": "oss"})
            optimizer = pipe.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
            for at in range(3):
                if at == 1 and exchanges:
                    for _, parameter in pipe.named_parameters():
                        parameter.data = parameter.data.clone()
                step(pipe)
                optimizer.step()
            found.append({name: p.detach().clone() for name, p in pipe.named_parameters()})
        return found

    for mine, theirs in processes(2, body, tmp_path):
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
