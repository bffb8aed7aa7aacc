"""Overflow in float16: a non-finite gradient on one rank skips the step on all ranks."""

import math

import pytest
import torch
from torch import nn

from gpipe_hpc import Pipeline, run_on_threads
from gpipe_hpc.errors import NonFiniteError
from gpipe_hpc.models import build_gpt, token_cross_entropy
from tests.support import largest, token_batch

SPECS = build_gpt(vocab_size=13, block_size=8, num_layers=2, num_heads=2, width=16)


def pipeline(world, **options):
    settings = {"microbatches": 4, "precision": "float16", "seed": 2, "world": world}
    return Pipeline(SPECS, token_cross_entropy, **settings | options)


def step(pipe):
    inputs, targets = token_batch()
    part = pipe.share(len(inputs))
    return pipe.step(inputs[part], targets[part])


def weights(pipe):
    return {name: p.detach().clone() for name, p in pipe.named_parameters()}


@pytest.mark.parametrize(
    ("schedule", "spiked", "bad"),
    [
        ("gpipe", 0, math.inf),
        ("zb_h1", 1, math.nan),
        ("chimera", 2, math.inf),
        ("gpipe", 3, math.nan),
    ],
)
def test_non_finite_gradient_on_one_rank_skips_step_on_all_ranks(schedule, spiked, bad):
    replicas = 1 if schedule == "chimera" else 2

    def body(world):
        pipe = pipeline(world, replicas=replicas, schedule=schedule)
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.1, weight_decay=0.5)
        names = [name for name, _ in pipe.named_parameters()]
        seen = []
        for number in range(3):
            parameter = dict(pipe.named_parameters())[names[-1]]
            hook = parameter.register_hook(lambda g: g * bad)
            if (number, world.rank) != (1, spiked):
                hook.remove()
            before, scale = weights(pipe), pipe.loss_scale.value
            result = step(pipe)
            hook.remove()
            norm = pipe.clip_grad_norm_(1.0).item()
            has_gradients = any(p.grad is not None for p in pipe.parameters())
            optimizer.step()
            moved = any(not torch.equal(before[n], p) for n, p in pipe.named_parameters())
            assert math.isfinite(result.loss) and result.loss_scale == scale
            seen.append(
                (result.is_skipped, has_gradients, moved, norm > 0, pipe.loss_scale.value / scale)
            )
        return seen, pipe.loss_scale.num_skipped, pipe.steps_done

    good, skipped = (False, True, True, True, 1.0), (True, False, False, False, 0.5)
    assert run_on_threads(4, body) == [([good, skipped, good], 1, 3)] * 4


def test_too_large_loss_scale_is_reduced_until_gradients_are_right():
    def body(world):
        pipe = pipeline(world)
        pipe.loss_scale.value = 2.0**24
        results = [step(pipe)]
        while results[-1].is_skipped:
            results.append(step(pipe))
        exact = pipeline(world, precision="float32")
        step(exact)
        pairs = zip(pipe.parameters(), exact.parameters(), strict=True)
        return len(results), largest((p.grad - q.grad).abs().max().item() for p, q in pairs)

    for num_steps, distance in run_on_threads(2, body):
        assert num_steps > 2  # activation gradients are float16, so the first scales overflow
        assert distance < 2e-3


def test_loss_scale_prevents_underflow_of_small_gradients():
    layers = [nn.Linear(4, 4), nn.Linear(4, 1)]
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))

    def loss_fn(output, target):
        return output.float().mul(1e-9).sum(), float(len(target))

    def body(world):
        pipe = Pipeline(layers, loss_fn, precision="float16", world=world)
        pipe.step(inputs, inputs)
        scaled = layers[0].weight.grad.abs().max().item()
        pipe.loss_scale.value = 1.0
        pipe.step(inputs, inputs)
        return scaled, layers[0].weight.grad.abs().max().item()

    ((scaled, unscaled),) = run_on_threads(1, body)
    assert scaled > 1e-11 and unscaled == 0.0


def test_skipped_step_does_not_update_batch_norm_statistics():
    layers = [nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)]
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))

    def body(world):
        pipe = Pipeline(
            layers, nn.functional.mse_loss, precision="float16", microbatches=2, world=world
        )
        pipe.loss_scale.value = 2.0**100
        first = pipe.step(inputs, torch.zeros(8, 1)).is_skipped, int(layers[1].num_batches_tracked)
        pipe.loss_scale.value = 1.0
        second = pipe.step(inputs, torch.zeros(8, 1)).is_skipped, int(layers[1].num_batches_tracked)
        return first, second

    assert run_on_threads(1, body) == [((True, 0), (False, 1))]


def test_gradients_that_are_never_finite_raise_error():
    def body(world):
        pipe = pipeline(world)
        for parameter in pipe.parameters() if world.rank else []:
            parameter.register_hook(lambda g: g * math.nan)
        for _ in range(60):
            step(pipe)

    with pytest.raises(NonFiniteError, match="loss scale: gradients are not finite"):
        run_on_threads(2, body)


def test_checkpoint_restores_loss_scale(tmp_path):
    def saved(world):
        pipe = pipeline(world)
        for overflowed in (True, False, True, False, False):
            pipe.loss_scale.update(overflowed=overflowed)
        pipe.save(tmp_path / "kept")
        return pipe.loss_scale.state()

    def resumed(world):
        pipe = pipeline(world, replicas=2)
        pipe.load(tmp_path / "kept")
        other = pipeline(world, replicas=2, precision="bfloat16")
        other.load(tmp_path / "kept")
        assert other.loss_scale is None
        return pipe.loss_scale.state()

    state = run_on_threads(2, saved)[0]
    assert state == {"value": 2.0**14, "num_good": 2, "num_skipped": 2}
    assert run_on_threads(2, resumed) == [state] * 2
