"""Losses: that of the whole batch however it is cut, or a refusal by name."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpipe_hpc import Pipeline, run_on_threads
from gpipe_hpc.config import compose_config
from gpipe_hpc.verify.run import verify

CLASSES = 3
GENERATOR = torch.Generator().manual_seed(0)
INPUTS = torch.randn(8, 6, generator=GENERATOR, dtype=torch.float64)
TARGETS = torch.randint(0, CLASSES, (8,), generator=GENERATOR)
PADDED = torch.where(torch.arange(8) < 4, -100, TARGETS)  # micro-batches of ignored ones alone
WEIGHTS = torch.tensor([1.0, 5.0, 0.1], dtype=torch.float64)
SHARES = torch.softmax(torch.randn(8, CLASSES, generator=GENERATOR, dtype=torch.float64), 1)
FLOATS = torch.randn(8, CLASSES, generator=GENERATOR, dtype=torch.float64)


LAYERS = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()


def layers(*last):
    """Return layers of a rank's own, equal on all."""
    return [layer.double() for layer in copy.deepcopy([*LAYERS, *last])]


def plain(loss, target, *last):
    """Return the loss of the whole batch and its gradients, by parameter."""
    model = nn.Sequential(*layers(*last))
    value = loss(model(INPUTS), target)
    value.backward()
    return float(value.detach()), {f"layers.{n}": p.grad for n, p in model.named_parameters()}


def piped(loss, target, ranks, last=(), **keywords):
    """Return each rank's loss, evaluation, and gradients by parameter."""

    def body(world):
        pipe = Pipeline(layers(*last), loss, world=world, **keywords)
        own = pipe.share(len(INPUTS))
        result = pipe.step(INPUTS[own], target[own])
        gradients = {n: p.grad.clone() for n, p in pipe.named_parameters() if p.grad is not None}
        return result.loss, pipe.evaluate(INPUTS[own], target[own]).loss, gradients

    return run_on_threads(ranks, body)


def assert_whole(loss, target, ranks, last=(), **keywords):
    right, gradients = plain(loss, target, *last)
    seen = set()
    for value, evaluated, own in piped(loss, target, ranks, last, **keywords):
        assert value == pytest.approx(right, rel=1e-12)
        assert evaluated == pytest.approx(right, rel=1e-12)
        seen |= set(own)
        for name, gradient in own.items():
            assert torch.allclose(gradient, gradients[name], rtol=1e-10, atol=1e-12), name
    assert seen == set(gradients)


LOSSES = {
    "ignore_index": (nn.CrossEntropyLoss(ignore_index=1), TARGETS),
    "weight": (nn.CrossEntropyLoss(weight=WEIGHTS), TARGETS),
    "weight and ignore_index": (nn.CrossEntropyLoss(WEIGHTS, ignore_index=2), TARGETS),
    "smoothing": (nn.CrossEntropyLoss(WEIGHTS, label_smoothing=0.2), PADDED),
    "smoothing alone": (nn.CrossEntropyLoss(label_smoothing=0.2), PADDED),
    "shares as targets": (nn.CrossEntropyLoss(weight=WEIGHTS), SHARES),
    "sum": (nn.CrossEntropyLoss(reduction="sum"), TARGETS),
    "sum, ignored": (nn.CrossEntropyLoss(reduction="sum"), PADDED),
    "ignored": (nn.CrossEntropyLoss(), PADDED),
    "function": (F.cross_entropy, PADDED),
    "partial": (partial(F.cross_entropy, weight=WEIGHTS, ignore_index=0), TARGETS),
    "partial sum": (partial(F.cross_entropy, reduction="sum"), PADDED),
    "bound method": (nn.CrossEntropyLoss(ignore_index=1).forward, TARGETS),
    "squares": (nn.MSELoss(), FLOATS),
    "sum of squares": (nn.MSELoss(reduction="sum"), FLOATS),
    "function of squares": (partial(F.mse_loss, reduction="sum"), FLOATS),
    "KL": (nn.KLDivLoss(reduction="batchmean", log_target=False), SHARES),
    "BCE": (nn.BCEWithLogitsLoss(weight=WEIGHTS, pos_weight=WEIGHTS), SHARES),
    "Huber": (nn.HuberLoss(reduction="sum"), FLOATS),
    "margins": (nn.MultiMarginLoss(weight=WEIGHTS), TARGETS),
}


@pytest.mark.parametrize("microbatches", [1, 2, 4, 8])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_torch_are_those_of_the_whole_batch(name, microbatches):
    assert_whole(*LOSSES[name], 2, stages=2, microbatches=microbatches)


@pytest.mark.parametrize(
    ("ranks", "keywords"),
    [
        (2, {"stages": 1, "replicas": 2, "microbatches": 2}),
        (4, {"stages": 2, "replicas": 2, "microbatches": 2, "recompute": "always"}),
        (2, {"stages": 2, "microbatches": 4, "schedule": "zb_h1"}),
        (2, {"stages": 2, "microbatches": 4, "schedule": "chimera"}),
        (2, {"stages": 2, "microbatches": 3, "recompute": "always"}),
        (1, {"stages": 1, "microbatches": 12}),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["ignored", "weight", "sum", "smoothing"])
def test_in_every_layout(name, ranks, keywords):
    assert_whole(*LOSSES[name], ranks, **keywords)


@pytest.mark.parametrize("loss", ["nll", "cross_entropy"])
def test_targets_of_several_dimensions(loss):
    target = torch.randint(0, CLASSES, (8, 2), generator=torch.Generator().manual_seed(1))
    target[:3] = -100
    last = [nn.Linear(CLASSES, 2 * CLASSES), nn.Unflatten(1, (CLASSES, 2))]
    if loss == "nll":
        last.append(nn.LogSoftmax(1))
    made = nn.NLLLoss(WEIGHTS) if loss == "nll" else nn.CrossEntropyLoss()
    for microbatches in (1, 2, 4, 8):
        assert_whole(made, target, 2, last, stages=2, microbatches=microbatches)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_a_mean_over_samples_keeps_its_bits(dtype, microbatches):
    """The same bits as of a function that nobody knows, which is taken for a mean over samples."""

    def run(loss):
        def body(world):
            made = [layer.to(dtype) for layer in layers()]
            pipe = Pipeline(made, loss, world=world, stages=1, microbatches=microbatches)
            value = pipe.step(INPUTS.to(dtype), TARGETS).loss
            return value, [p.grad.clone() for p in pipe.parameters()]

        return run_on_threads(1, body)[0]

    unknown, expected = run(lambda output, target: F.cross_entropy(output, target))
    for loss in (nn.CrossEntropyLoss(), nn.CrossEntropyLoss(torch.ones(3, dtype=dtype))):
        known, gradients = run(loss)
        assert known == unknown
        assert all(map(torch.equal, gradients, expected))


def test_classes_may_be_bytes():
    """-100 is 156 as a byte, which may be a class, and bytes as an index are a mask."""
    last = [nn.Linear(CLASSES, 200)]
    target = torch.tensor([156, 199, 0, 1, 156, 2, 3, 4], dtype=torch.uint8)
    weights = torch.arange(1.0, 201.0, dtype=torch.float64)
    for loss in (nn.CrossEntropyLoss(), nn.CrossEntropyLoss(weights)):
        assert_whole(loss, target, 2, last, stages=2, microbatches=4)


def test_a_batch_of_ignored_targets_has_no_loss_and_zero_gradients():
    nothing = torch.full_like(TARGETS, -100)
    for value, evaluated, own in piped(nn.CrossEntropyLoss(), nothing, 2, stages=2, microbatches=2):
        assert value == evaluated == 0
        assert not any(gradient.any() for gradient in own.values())


def test_replicas_that_train_apart_average_to_the_sum_of_the_whole_batch():
    """One step of SGD apart, then the average: that of the whole batch."""
    loss = nn.CrossEntropyLoss(reduction="sum")
    right, gradients = plain(loss, TARGETS)

    def body(world):
        pipe = Pipeline(
            layers(), loss, world=world, stages=1, replicas=2, microbatches=2, outer={"every": 1}
        )
        before = {name: p.detach().clone() for name, p in pipe.named_parameters()}
        optimizer = pipe.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.01))
        own = pipe.share(8)
        value = pipe.step(INPUTS[own], TARGETS[own]).loss
        optimizer.step()
        pipe.unite_replicas()
        return value, {n: (before[n] - p.detach()) / 0.01 for n, p in pipe.named_parameters()}

    for value, moved in run_on_threads(2, body):
        assert value == pytest.approx(right, rel=1e-12)
        for name, each in moved.items():
            assert torch.allclose(each, gradients[name], rtol=1e-9, atol=1e-9), name


def other_loss(o, t):
    return F.cross_entropy(o, t), o.pow(2).mean()


PAIRS = {
    "two losses": other_loss,
    "loss and logits": lambda o, t: (F.cross_entropy(o, t), o),
    "loss and None": lambda o, t: (F.cross_entropy(o, t), None),
    "loss and a dict": lambda o, t: (F.cross_entropy(o, t), {"accuracy": 1.0}),
    "loss and text": lambda o, t: (F.cross_entropy(o, t), "accuracy"),
    "two losses and metrics": lambda o, t: (*other_loss(o, t), {"accuracy": (1.0, 1.0)}),
    "a list": lambda o, t: list(other_loss(o, t)),
    "a soft mask": lambda o, t: (o.sum(), torch.sigmoid(o).sum()),
    "a negative weight": lambda o, t: (-o.square().sum(), -torch.tensor(float(len(o)))),
    "a metric of None": lambda o, t: (o.square().sum(), 1.0, {"accuracy": None}),
}


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("name", PAIRS)
def test_what_is_no_loss_is_refused_by_name_on_every_rank(name, recompute):
    stepped = []

    def body(world):
        pipe = Pipeline(
            layers(), PAIRS[name], world=world, stages=2, microbatches=4, recompute=recompute
        )
        pipe.step(INPUTS, TARGETS)
        stepped.append(world.rank)

    with pytest.raises(Exception, match="loss_fn: "):
        run_on_threads(2, body)
    assert not stepped


def test_a_pair_of_sum_and_weight_stays_as_it_is():
    """Harmless: a weight that was computed from the output without a graph, or is 0 in places."""

    def loss(output, target):
        mask = (target != 1) & (output.detach().abs().max(1).values > 0)
        each = F.cross_entropy(output, target, reduction="none")
        return (each * mask).sum(), mask.sum(), {"used": (mask.sum(), len(mask))}

    def whole(output, target):
        total, weight, _ = loss(output, target)
        return total / weight

    right, gradients = plain(whole, TARGETS)
    for value, _, own in piped(loss, TARGETS, 2, stages=2, microbatches=4):
        assert value == pytest.approx(right, rel=1e-12)
        for name, gradient in own.items():
            assert torch.allclose(gradient, gradients[name], rtol=1e-10, atol=1e-12)


def test_losses_without_a_reduction_are_refused():
    for loss in (nn.MSELoss(reduction="none"), partial(F.mse_loss, reduction="none")):
        with pytest.raises(Exception, match=r"loss_fn: .*reduction='none'"):
            run_on_threads(1, lambda world, loss=loss: Pipeline(layers(), loss, world=world))


WEIGHED = """
import torch
from torch.nn import functional as F


def weighed(output, target):
    weight = torch.arange(output.shape[-1]).to(output)
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), weight=weight)


def even(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def summed(output, target):
    return even(output, target) * len(output)


def dropped(output, target):
    return F.cross_entropy(F.dropout(output, 0.5).flatten(0, 1), target.flatten())
"""


@pytest.mark.parametrize("name", ["weighed", "even", "dropped", "summed"])
def test_verify_finds_a_loss_that_depends_on_the_cut(name, tmp_path, monkeypatch):
    (tmp_path / "losses_of_a_user.py").write_text(WEIGHED)
    monkeypatch.syspath_prepend(tmp_path)
    tiny = "model.vocab_size=32 model.block_size=8 model.num_layers=1 model.width=16"
    config = compose_config(
        [
            *f"data=synthetic data.seq_len=8 data.vocab_size=32 {tiny} model.num_heads=2".split(),
            *["train.batch_size=8", "pipeline.microbatches=4", "verify.steps=1"],
            f"loss._target_=losses_of_a_user.{name}",
        ]
    )
    report = verify(config)
    depends = name in ("weighed", "summed")
    assert report.is_same == (not depends), str(report)
    assert ("return (sum, weight)" in str(report)) == depends


EVENLY = torch.where(torch.arange(8) % 2 == 0, -100, TARGETS)  # one of two in each micro-batch


def mean(o, t):
    return F.cross_entropy(o, t)


def pair(o, t):
    return F.cross_entropy(o, t, reduction="sum"), (t != -100).sum()


MEANS = {
    "ignored": (mean, PADDED, 4, True),
    "weights": (lambda o, t: nn.NLLLoss(WEIGHTS)(o.log_softmax(1), t), TARGETS, 4, True),
    "one piece": (mean, PADDED, 1, False),
    "none ignored": (mean, TARGETS, 4, False),
    "as many of each": (mean, EVENLY, 4, False),
    "a pair": (pair, PADDED, 4, False),
    "known": (nn.CrossEntropyLoss(), PADDED, 4, False),
    "shares": (mean, SHARES, 4, False),
}


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("name", MEANS)
def test_a_mean_over_unequally_many_targets_is_warned_of(name, recompute, caplog):
    """Functions of the user's say nothing of themselves: what they call torch for is looked at."""
    loss, target, microbatches, warns = MEANS[name]
    piped(loss, target, 2, stages=2, microbatches=microbatches, recompute=recompute)
    found = [each.getMessage() for each in caplog.records if "Return (sum, weight)" in each.message]
    assert len(found) == warns


def accuracy(o, t):
    return (o.argmax(1) == t).double().mean()


NO_MEANS = {
    "torch's": (lambda o, t: F.cross_entropy(o, t, reduction="sum"), 4),
    "a module's": (lambda o, t: nn.CrossEntropyLoss(reduction="sum")(o, t), 4),
    "in two": (lambda o, t: F.cross_entropy(o, t, reduction="sum"), 2),
    "several": (
        lambda o, t: sum(F.mse_loss(o, o.detach() - k, reduction="sum") for k in (1, 2)),
        4,
    ),
    "squares": (lambda o, t: (o - 1).pow(2).sum(), 4),
    "in one piece": (lambda o, t: F.cross_entropy(o, t, reduction="sum"), 1),
    "divided": (lambda o, t: F.cross_entropy(o, t, reduction="sum") / len(t), 4),
    "multiplied": (lambda o, t: F.cross_entropy(o, t, reduction="sum") * (1 / len(t)), 4),
    "of shares": (lambda o, t: (F.cross_entropy(o, t, reduction="none") / len(t)).sum(), 4),
    "with a weight": (pair, 4),
    "of one number": (lambda o, t: F.cross_entropy(o, t).reshape(1).sum(), 4),
    "a mean": (lambda o, t: F.cross_entropy(o, t, reduction="none").mean(), 4),
}


@pytest.mark.parametrize("name", NO_MEANS)
def test_a_sum_that_is_taken_for_a_mean_is_warned_of_once(name, caplog):
    """The same loss is scaled by one over the number of micro-batches."""
    loss, microbatches = NO_MEANS[name]
    piped(loss, TARGETS, 2, stages=2, microbatches=microbatches)
    found = [each.getMessage() for each in caplog.records]
    warns = name in ("torch's", "a module's", "in two", "several", "squares")
    assert ["returns a sum" in each for each in found] == [True] * warns


NO_WEIGHTS = {
    "accuracy": lambda o, t: (F.cross_entropy(o, t), accuracy(o, t)),
    "accuracy as a number": lambda o, t: (F.cross_entropy(o, t), float(accuracy(o, t))),
    "accuracy and metrics": lambda o, t: (F.cross_entropy(o, t), accuracy(o, t), {}),
    "another loss": lambda o, t: (F.mse_loss(o, o.detach() + 1), o.detach().square().mean()),
    "a part": lambda o, t: (
        F.cross_entropy(o, t) + 0.1 * o.pow(2).mean(),
        o.detach().pow(2).mean(),
    ),
    "a count": lambda o, t: (F.cross_entropy(o, t), len(t)),
}
RIGHT_PAIRS = {
    "a number": lambda o, t: (F.cross_entropy(o, t, reduction="sum"), len(t)),
    "a float": lambda o, t: (F.cross_entropy(o, t) * len(t), float(len(t))),
    "a count that counts": pair,
    "weights of classes": lambda o, t: (
        F.cross_entropy(o, t, WEIGHTS, reduction="sum"),
        WEIGHTS[t].sum(),
    ),
    "less than 1": lambda o, t: (0.25 * F.cross_entropy(o, t), 0.25),
    "means of equal pieces": lambda o, t: (F.cross_entropy(o, t), 1),
    "a mean of each sample": lambda o, t: (sum(map(F.cross_entropy, o, t)), len(t)),
    "two of each sample": lambda o, t: (
        sum(F.cross_entropy(a, b) + 0.1 * a.pow(2).mean() for a, b in zip(o, t, strict=True)),
        len(t),
    ),
    "a mean of one number": lambda o, t: (o.pow(2).sum().reshape(1).mean(), len(t)),
}


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("name", [*NO_WEIGHTS, *RIGHT_PAIRS])
def test_a_mean_and_what_is_no_weight_are_warned_of_once(name, microbatches, caplog):
    loss = NO_WEIGHTS.get(name) or RIGHT_PAIRS[name]
    piped(loss, TARGETS, 2, stages=2, microbatches=microbatches, recompute="always")
    found = [each.getMessage() for each in caplog.records]
    assert ["returns a mean and" in each for each in found] == [True] * (name in NO_WEIGHTS)
