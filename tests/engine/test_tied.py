"""Tied weights: copies on several stages train as one parameter of the plain model."""

import pytest
import torch
from torch import nn

from gpipe_hpc import LayerSpec, Pipeline, run_on_threads
from gpipe_hpc.models import build_gpt, build_layer, token_cross_entropy

SPECS = build_gpt(vocab_size=11, block_size=8, num_layers=2, num_heads=2, width=8, tied=True)
SEED, NUM_SAMPLES, NUM_STEPS = 3, 12, 20


def as_double(spec: LayerSpec) -> LayerSpec:
    def build() -> nn.Module:
        return spec.build().double()

    return LayerSpec(build).tied(dict(spec.ties))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 11, (NUM_SAMPLES, 9), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def plain(num_microbatches: int) -> tuple[list[tuple[float, float]], list[nn.Parameter]]:
    """Train the plain model, whose head uses the embedding's matrix."""
    layers = [build_layer(as_double(s), index=i, seed=SEED) for i, s in enumerate(SPECS)]
    layers[-1].weight = layers[0].token.weight
    parameters = list({id(p): p for layer in layers for p in layer.parameters()}.values())
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    history = []
    inputs, targets = batch()
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        loss, weight = 0.0, 0
        for x, y in zip(
            inputs.tensor_split(num_microbatches),
            targets.tensor_split(num_microbatches),
            strict=True,
        ):
            for layer in layers:
                x = layer(x)
            total = nn.functional.cross_entropy(x.flatten(0, 1), y.flatten(), reduction="sum")
            total.backward()
            loss += total.item()
            weight += y.numel()
        for parameter in parameters:
            parameter.grad /= weight
        norm = torch.nn.utils.clip_grad_norm_(parameters, 0.1)
        optimizer.step()
        history.append((loss / weight, norm.item()))
    return history, parameters


CASES = [
    (4, 2, 2, "one_f_one_b", {}, "always"),
    (2, 1, 4, "zb_v", {}, "never"),
    (4, 1, 4, "chimera", {}, "always"),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            (1, 1, 2, "gpipe", {}, "always"),
            (2, 1, 3, "gpipe", {}, "never"),
            (2, 1, 4, "interleaved", {"stages_per_rank": 2}, "never"),
        )
    ),
]


@pytest.mark.parametrize(
    ("stages", "replicas", "microbatches", "schedule", "options", "recompute"), CASES
)
def test_tied_gpt_trains_as_plain_gpt(stages, replicas, microbatches, schedule, options, recompute):
    inputs, targets = batch()

    def body(world):
        pipe = Pipeline(
            [as_double(spec) for spec in SPECS],
            token_cross_entropy,
            replicas=replicas,
            microbatches=microbatches,
            schedule=schedule,
            schedule_options=options,
            recompute=recompute,
            seed=SEED,
            world=world,
        )
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        share = pipe.share(NUM_SAMPLES)
        history = []
        for _ in range(NUM_STEPS):
            result = pipe.step(inputs[share], targets[share])
            norm = pipe.clip_grad_norm_(0.1)
            optimizer.step()
            history.append((result.loss, norm.item()))
        weights = {name: p.detach() for name, p in pipe.named_parameters()}
        return history, weights, [info.name for info in pipe.all_parameters]

    results = run_on_threads(stages * replicas, body)
    history, parameters = plain(replicas * microbatches)
    merged: dict[str, torch.Tensor] = {}
    for _, weights, _ in results:
        for name, value in weights.items():
            # All copies of a parameter, tied or replicated, are bitwise equal.
            assert torch.equal(merged.setdefault(name, value), value), name
    names = results[0][2]
    assert len(names) == len(parameters)
    torch.testing.assert_close(results[0][0], history, rtol=1e-10, atol=1e-10)
    for name, parameter in zip(names, parameters, strict=True):
        torch.testing.assert_close(merged[name], parameter.detach(), rtol=1e-10, atol=1e-10)


def test_built_layers_that_share_a_parameter_are_tied(tmp_path):
    first, last = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    last.weight = first.weight
    before = first.weight.detach().clone()
    inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))

    def body(world):
        layers = [first, nn.Tanh(), last]
        pipe = Pipeline(layers, nn.functional.mse_loss, microbatches=2, world=world)
        pipe.step(inputs, inputs)
        pipe.save(tmp_path / "saved")
        return {name: p.grad for name, p in pipe.named_parameters()}

    gradients = run_on_threads(3, body)
    weight = before.clone().requires_grad_()
    torch.nn.functional.mse_loss(torch.tanh(inputs @ weight.T) @ weight.T, inputs).backward()
    assert gradients[1] == {}
    for rank in (0, 2):
        assert set(gradients[rank]) == {"layers.0.weight"}
        torch.testing.assert_close(gradients[rank]["layers.0.weight"], weight.grad)


def test_ties_between_the_same_ranks_share_one_group():
    """Regression: each tie had its own group, with its own Gloo connections between the ranks."""
    data = torch.randn(8, 4, dtype=torch.float64)

    def train(stages: int, tied: tuple[str, ...]) -> tuple[int, dict[str, list[float]]]:
        ties = {name: f"shared {name}" for name in tied}
        ends = LayerSpec(nn.Linear, 4, 4, dtype=torch.float64).tied(ties)
        layers = [ends, LayerSpec(nn.Linear, 4, 4, dtype=torch.float64), ends]

        def body(world):
            formed, form = [], world.group
            world.group = lambda members: formed.append(members) or form(members)
            pipe = Pipeline(
                layers, nn.functional.mse_loss, stages=stages, microbatches=4, world=world
            )
            pipe.step(data, data)
            grads = {name: p.grad.flatten().tolist() for name, p in pipe.named_parameters()}
            return len(formed), grads

        found = run_on_threads(stages, body)
        return found[0][0], {name: grad for _, own in found for name, grad in own.items()}

    num_one, _ = train(3, ("weight",))
    num_both, grads = train(3, ("weight", "bias"))
    assert num_one == num_both
    whole = train(1, ("weight", "bias"))[1]
    assert len(grads) == 4
    for name, grad in grads.items():  # the copies are summed in another order
        assert grad == pytest.approx(whole[name], abs=1e-12)
