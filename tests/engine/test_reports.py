"""Losses and metrics reported by layers: summed exactly and known on all ranks."""

from functools import partial

import pytest
import torch
from torch import nn

from gpipe_hpc import LayerSpec, Pipeline, add_loss, add_metric, run_on_threads
from gpipe_hpc.errors import ActionError, ModelError
from gpipe_hpc.models import Reports, build_layer, reporting
from gpipe_hpc.schedule import schedule_names

SEED, WIDTH, NUM_LAYERS = 5, 4, 8
NAMES = [name for name in schedule_names() if name != "file"]


class Balanced(nn.Module):
    """Layer with auxiliary losses, like the router of a mixture of experts."""

    def __init__(self, is_router):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.is_router = is_router

    def forward(self, x):
        y = torch.tanh(self.linear(x))
        if self.is_router:
            add_loss("balance", 0.1 * y.square().sum())
            add_loss("balance", 0.2 * y.sum())
            add_loss("z", 0.3 * y.exp().sum())
            add_metric("load", y.abs().sum(), y.numel())
        return x + y


def layers():
    return [LayerSpec(Balanced, index in (0, 3, 6)) for index in range(NUM_LAYERS)]


def loss_fn(output, target):
    right = (output.argmax(-1) == target.argmax(-1)).sum()
    return (output - target).square().sum(), target.numel(), {"accuracy": (right, len(target))}


BATCH = tuple(torch.randn(2, 9, WIDTH, dtype=torch.float64).unbind())


def reference():
    """Return the loss, its parts, metrics and gradients of the plain model on the whole batch."""
    modules = [build_layer(each, index=i, seed=SEED) for i, each in enumerate(layers())]
    x, target = BATCH
    with reporting(Reports()) as reports:
        for module in modules:
            x = module(x)
        main, weight, metrics = loss_fn(x, target)
    total = (main + sum(reports.losses.values())) / weight
    total.backward()
    named = {f"layers.{i}.{n}": p for i, x in enumerate(modules) for n, p in x.named_parameters()}
    parts = {"main": main, **reports.losses}
    return (
        total.item(),
        {name: part.item() / weight for name, part in parts.items()},
        {name: float(s) / float(w) for name, (s, w) in {**reports.metrics, **metrics}.items()},
        {name: p.grad for name, p in named.items()},
    )


def trained(world, **settings):
    pipe = Pipeline(layers(), loss_fn, seed=SEED, partition="uniform", world=world, **settings)
    part = pipe.share(len(BATCH[0]))
    result = pipe.step(*(x[part] for x in BATCH))
    gradients = {name: p.grad.clone() for name, p in pipe.named_parameters()}
    again = pipe.evaluate(*(x[part] for x in BATCH))
    return [(r.loss, r.losses, r.metrics) for r in (result, again)], gradients


def assert_plain_losses(answers):
    loss, losses, metrics, gradients = reference()
    assert {name for _, own in answers for name in own} == gradients.keys()
    for results, own in answers:
        for result in results:  # without dropout, evaluation gives the same
            assert result[0] == pytest.approx(loss, abs=1e-12)
            assert result[1] == pytest.approx(losses, abs=1e-12)
            assert result[2] == pytest.approx(metrics, abs=1e-12)
        assert results == answers[0][0]  # bitwise equal on all ranks
        for name, gradient in own.items():
            assert (gradient - gradients[name]).abs().max() < 1e-12, name


@pytest.mark.parametrize("recompute", ["always", "never"])
@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b", "zb_v", "chimera"])
def test_losses_of_inner_stages_are_included_in_loss_and_gradients(name, recompute):
    settings = {"schedule": name, "recompute": recompute, "microbatches": 4}
    assert_plain_losses(run_on_threads(4, partial(trained, stages=4, **settings)))


@pytest.mark.product
@pytest.mark.parametrize("name", NAMES)
def test_losses_of_layers_train_with_every_schedule_and_replicas(name):
    options = {"waves": 1} if name == "hanayo" else {}
    settings = {"schedule": name, "schedule_options": options, "microbatches": 4}
    for recompute in ("always", "except_last", "never"):
        step = partial(trained, stages=2, replicas=2, recompute=recompute, **settings)
        assert_plain_losses(run_on_threads(4, step))


def test_losses_and_metrics_are_bitwise_equal_in_all_layouts():
    def results(world, **settings):
        return trained(world, microbatches=12 // settings["replicas"], **settings)[0]

    one = run_on_threads(1, partial(results, stages=1, replicas=1))
    for stages, replicas in ((4, 1), (2, 2), (1, 3)):
        got = run_on_threads(stages * replicas, partial(results, stages=stages, replicas=replicas))
        assert got == one * len(got)


def test_metric_that_first_appears_later_is_known_on_all_ranks():
    class Sometimes(nn.Linear):
        def forward(self, x):
            if x[0, 0] > 0:
                add_metric("seen", 2.0, 1.0)
            return super().forward(x)

    def body(world):
        model = [LayerSpec(Sometimes, 1, 1), LayerSpec(nn.Linear, 1, 1)]
        pipe = Pipeline(model, lambda y, t: y.mean(), world=world)
        return [pipe.step(torch.full((2, 1), x), torch.zeros(2)).metrics for x in (-1.0, 1.0, -1.0)]

    assert run_on_threads(2, body) == [[{}, {"seen": 2.0}, {}]] * 2


def test_zero_weight_gives_zero_losses_and_gradients():
    pipe = Pipeline([LayerSpec(Balanced, True)], lambda y, t: (y.sum() * 0, 0))
    result = pipe.step(*BATCH)
    assert (result.loss, result.losses) == (0.0, {"main": 0.0, "balance": 0.0, "z": 0.0})
    assert all(not p.grad.any() for p in pipe.parameters())


def test_metric_without_weight_is_weighted_by_samples():
    pipe = Pipeline(
        [LayerSpec(Balanced, False)],
        lambda y, t: (y.sum(), 1, {"mean": t.mean()}),
        microbatches=2,
    )
    x = BATCH[0][:3]
    assert pipe.step(x, torch.tensor([1.0, 3.0, 8.0])).metrics == {"mean": 4.0}


def test_reports_outside_of_a_pipeline_are_ignored():
    assert Balanced(True)(BATCH[0]).shape == BATCH[0].shape


def test_invalid_report_is_refused():
    class Bad(nn.Linear):
        def forward(self, x):
            add_loss("bad", x)
            return x

    with pytest.raises(ModelError, match=r"add_loss\('bad'\): expected one number.*\(9, 4\)"):
        Bad(4, 4)(BATCH[0])
    with pytest.raises(ModelError, match=r"add_loss\('bad'\): expected a tensor .* got float"):
        add_loss("bad", 0.0)
    with pytest.raises(ModelError, match=r"add_loss\('main'\): the name is reserved"):
        add_loss("main", torch.zeros(()))
    with pytest.raises(ActionError, match=r"add_loss\('bad'\)"):
        Pipeline([LayerSpec(Bad, 4, 4)], loss_fn).step(*BATCH)
