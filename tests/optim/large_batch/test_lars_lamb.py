"""LARS and LAMB: equal to the papers' formulas, written down plainly here."""

import math

import pytest
import torch
from torch import nn

from gpipe_hpc import LAMB, LARS, LayerSpec, Pipeline, run_on_threads
from gpipe_hpc.errors import ConfigError
from gpipe_hpc.optim.optimizer import build_optimizer
from gpipe_hpc.settings import LAMBConfig, LARSConfig
from tests.support import batches, mean_square

STEPS = 7


def lars_plain(weights, gradients, rates, *, momentum, decay, trust, adapts):
    """Algorithm 1 of You, Gitman, Ginsburg (2017), one number after the other."""
    found, v = weights.tolist(), [0.0] * len(weights)
    for gradient, rate in zip(gradients, rates, strict=True):
        g = gradient.tolist()
        size, slope = math.hypot(*found), math.hypot(*g)
        local = 1.0
        if adapts:
            below = slope + decay * size
            local = trust * (size / below if size and below else 1.0)
        for i, w in enumerate(found):
            v[i] = momentum * v[i] + rate * local * (g[i] + decay * w)
        found = [w - each for w, each in zip(found, v, strict=True)]
    return found


def lamb_plain(weights, gradients, rates, *, betas, eps, decay, adapts):
    """Algorithm 2 of You et al. (2019) with phi(z) = z, one number after the other."""
    found = weights.tolist()
    m, v = [0.0] * len(found), [0.0] * len(found)
    for t, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        u = []
        for i, g in enumerate(gradient.tolist()):
            m[i] = betas[0] * m[i] + (1 - betas[0]) * g
            v[i] = betas[1] * v[i] + (1 - betas[1]) * g * g
            mean, square = m[i] / (1 - betas[0] ** t), v[i] / (1 - betas[1] ** t)
            u.append(mean / (math.sqrt(square) + eps) + decay * found[i])
        size, length = math.hypot(*found), math.hypot(*u)
        ratio = size / length if adapts and size and length else 1.0
        found = [w - rate * ratio * each for w, each in zip(found, u, strict=True)]
    return found


def draw(*sizes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(sizes))
    return torch.randn(*sizes, generator=generator, dtype=torch.float64)


RATES = [0.5 / (1 + step) for step in range(STEPS)]  # lr is within LARS's momentum: let it change
STARTS = {
    "matrix": (draw(6, 4), True),
    "vector": (draw(4), False),
    "zeros": (torch.zeros(3, 2, dtype=torch.float64), True),
    "no gradient in it": (draw(2, 2), True),
}


def gradients_of(name: str, start: torch.Tensor) -> list[torch.Tensor]:
    factor = 0.0 if name == "no gradient in it" else 1.0
    return [factor * draw(step + 1, *start.shape)[0] for step in range(STEPS)]


def assert_steps_are(make, plain_of):
    """Take the same steps with an optimizer on all tensors at once, and plainly on each."""
    weights = {name: nn.Parameter(start.clone()) for name, (start, _) in STARTS.items()}
    optimizer = make(weights)
    given = {name: gradients_of(name, start) for name, (start, _) in STARTS.items()}
    for step, rate in enumerate(RATES):
        for name, weight in weights.items():
            weight.grad = given[name][step].clone()
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    for name, (start, is_matrix) in STARTS.items():
        flat = [gradient.reshape(-1) for gradient in given[name]]
        wanted = torch.tensor(plain_of(start.reshape(-1), flat, is_matrix), dtype=torch.float64)
        assert weights[name].ne(start).any() or name == "no gradient in it"
        torch.testing.assert_close(weights[name].reshape(-1), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("adapt_vectors", [False, True])
def test_lars_is_the_papers(momentum, adapt_vectors):
    config = LARSConfig(
        lr=1.0, weight_decay=0.3, momentum=momentum, trust=0.1, adapt_vectors=adapt_vectors
    )
    assert_steps_are(
        lambda weights: build_optimizer(weights.items(), config),
        lambda start, gradients, is_matrix: lars_plain(
            start,
            gradients,
            RATES,
            momentum=momentum,
            decay=0.3 if is_matrix else 0.0,
            trust=0.1,
            adapts=is_matrix or adapt_vectors,
        ),
    )


@pytest.mark.parametrize("adapt_vectors", [False, True])
def test_lamb_is_the_papers(adapt_vectors):
    config = LAMBConfig(
        lr=1.0, weight_decay=0.3, betas=[0.8, 0.95], eps=1e-3, adapt_vectors=adapt_vectors
    )
    assert_steps_are(
        lambda weights: build_optimizer(weights.items(), config),
        lambda start, gradients, is_matrix: lamb_plain(
            start,
            gradients,
            RATES,
            betas=(0.8, 0.95),
            eps=1e-3,
            decay=0.3 if is_matrix else 0.0,
            adapts=is_matrix or adapt_vectors,
        ),
    )


def test_lamb_without_adapting_is_adam():
    weights = [nn.Parameter(draw(5, 3)) for _ in range(2)]
    pair = [
        LAMB([weights[0]], 0.1, betas=(0.9, 0.99), eps=1e-8, adapt=False),
        torch.optim.Adam([weights[1]], 0.1, betas=(0.9, 0.99), eps=1e-8),
    ]
    for step in range(5):
        for weight, optimizer in zip(weights, pair, strict=True):
            weight.grad = draw(step + 1, 5, 3)[0]
            optimizer.step()
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-12, atol=1e-12)


def test_parameters_without_gradient_stay_and_closures_are_called():
    for kind in (LARS, LAMB):
        still, moved = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        optimizer = kind([still, moved], 0.5)

        def closure(moved=moved, optimizer=optimizer):
            optimizer.zero_grad()
            loss = moved.square().sum()
            loss.backward()
            return loss

        assert optimizer.step(closure).item() == 2.0
        assert torch.equal(still, torch.ones(2)) and still not in optimizer.state
        assert moved.lt(1.0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_of_weights_in_16_bits_are_whole(dtype):
    """The norm of 70,000 ones of float16 was infinite, and the step nothing."""
    weight = nn.Parameter(torch.full((70_000, 4), 200.0, dtype=dtype))
    optimizer = LARS([weight], 10.0, momentum=0.0, trust=0.1)
    weight.grad = torch.full_like(weight, 100.0)
    optimizer.step()
    # |w| / |g| = 2, so the step is 10 x 0.1 x 2 x 100.
    assert torch.equal(weight, torch.zeros_like(weight))


CONFIGS = [
    LARSConfig(lr=2.0, weight_decay=0.01, trust=0.05),
    LAMBConfig(lr=0.05, weight_decay=0.01),
]


def layers() -> list[LayerSpec]:
    linear = LayerSpec(nn.Linear, 4, 4, dtype=torch.float64)
    return [linear, LayerSpec(nn.Tanh), linear, LayerSpec(nn.Tanh), linear]


def train(world, config, first, last, load=None, save=None, **options):
    pipe = Pipeline(
        layers(), mean_square, microbatches=options.pop("microbatches", 4), world=world, **options
    )
    optimizer = build_optimizer(pipe.named_parameters(), config)
    if load is not None:
        pipe.load(load, optimizer)
    for inputs, targets in batches(last, 8, 4)[first:]:
        part = pipe.share(8)
        pipe.step(inputs[part], targets[part])
        optimizer.step()
    if save is not None:
        pipe.save(save, optimizer)
    return {n: p.detach().clone() for n, p in pipe.named_parameters()}


def whole(ranks: int, *args, **options):
    found = run_on_threads(ranks, lambda world: train(world, *args, **options))
    return {name: weight for each in found for name, weight in each.items()}


@pytest.mark.parametrize("config", CONFIGS, ids=["lars", "lamb"])
def test_every_layout_makes_the_same_steps(config, tmp_path):
    """Over a checkpoint that another layout has written, too."""
    one = whole(1, config, 0, 6)
    assert not torch.equal(one["layers.0.weight"], whole(1, config, 0, 5)["layers.0.weight"])
    layout = {"stages": 2, "replicas": 2, "microbatches": 2}
    four = whole(4, config, 0, 6, **layout)
    whole(4, config, 0, 3, save=tmp_path / "saved", **layout)
    resumed = whole(1, config, 3, 6, load=tmp_path / "saved")
    for name, weight in one.items():
        torch.testing.assert_close(four[name], weight, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(resumed[name], weight, rtol=1e-10, atol=1e-10)
    again = whole(4, config, 3, 6, load=tmp_path / "saved", **layout)
    assert all(torch.equal(again[name], weight) for name, weight in four.items())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: LARS(p, -1.0), "LARS: lr must be at least 0, got -1.0"),
        (lambda p: LARS(p, momentum=1.0), "LARS: momentum must be at least 0 and below 1, got 1.0"),
        (lambda p: LARS(p, trust=-0.1), "LARS: trust must be at least 0, got -0.1"),
        (lambda p: LAMB(p, betas=(0.9, 1.0)), "LAMB: betas must be at least 0 and below 1"),
        (lambda p: LAMB(p, eps=-1.0), "LAMB: eps must be at least 0, got -1.0"),
    ],
)
def test_numbers_that_cannot_work_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make([nn.Parameter(torch.ones(1))])
