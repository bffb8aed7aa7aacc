"""Training in every layout is bitwise equal to a plain loop.

The plain loop (conftest.py) does not use gpipe_hpc; it computes the published seeds itself.
"""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpipe_hpc import LayerSpec, Pipeline
from tests.support import product_of

SEED = 7
WIDTH, VOCAB, CLASSES = 8, 11, 5
ADAMW = partial(torch.optim.AdamW, lr=1e-2)
MAX_NORM = 0.05
BACKWARD_ORDER = {"gpipe": lambda m: range(m - 1, -1, -1), "one_f_one_b": range}


class Block(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(torch.tanh(self.linear(x)))


def recipes(plain, dropout):
    return [
        plain.Recipe(partial(nn.Embedding, dtype=torch.float64), (VOCAB, WIDTH)),
        plain.Recipe(Block, (dropout,)),
        plain.Recipe(Block, (dropout,)),
        plain.Recipe(partial(nn.LayerNorm, dtype=torch.float64), (WIDTH,)),
        plain.Recipe(partial(nn.Linear, dtype=torch.float64), (WIDTH, CLASSES)),
    ]


def loss_fn(logits, targets):
    """Return the summed cross-entropy and the number of targets that are not ignored."""
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return total, (targets != -100).sum()


def make_batches():
    """Return five batches of even and odd sizes, one with fewer samples than micro-batches."""
    generator = torch.Generator().manual_seed(1)
    batches = []
    for size in (16, 16, 11, 3, 13):
        tokens = torch.randint(0, VOCAB, (size, 3), generator=generator)
        targets = torch.randint(0, CLASSES, (size, 3), generator=generator)
        targets[torch.rand(size, 3, generator=generator) < 0.3] = -100
        targets[1] = -100  # a whole sample, so that some micro-batches have weight 0
        batches.append((tokens, targets))
    return batches


@pytest.fixture(scope="module")
def references(plain):
    """Return a function that trains with the plain loop and caches the result of each setting."""
    known = {}
    batches = make_batches()

    def train(dropout, **how):
        setting = (dropout, *how.items())
        if setting not in known:
            schedule = how.pop("schedule", None)
            known[setting] = plain.train(
                recipes(plain, dropout),
                loss_fn,
                batches,
                seed=SEED,
                order=BACKWARD_ORDER.get(schedule, range),
                optimizer=ADAMW,
                max_norm=MAX_NORM,
                **how,
            )
        return known[setting]

    return train


def train_pipeline(plain, dropout, stages, replicas, **settings):
    specs = [LayerSpec(factory, *args) for factory, args in recipes(plain, dropout)]

    def body(world):
        pipe = Pipeline(
            specs, loss_fn, stages=stages, replicas=replicas, seed=SEED, world=world, **settings
        )
        return plain.train_rank(pipe, make_batches(), optimizer=ADAMW, max_norm=MAX_NORM)

    return plain.unite(plain.on_threads(stages * replicas, body), stages)


@product_of(
    "stages, replicas, microbatches, schedule, recompute, dropout",
    (4, 2, 1),
    (2, 1),
    (3, 8, 1),
    ("gpipe", "one_f_one_b"),
    ("always", "except_last", "never"),
    (0.3, 0.0),
    strength=3,
)
def test_training_equals_plain_loop(
    plain, references, stages, replicas, microbatches, schedule, recompute, dropout
):
    ours = train_pipeline(
        plain,
        dropout,
        stages,
        replicas,
        microbatches=microbatches,
        schedule=schedule,
        recompute=recompute,
    )
    summed = references(dropout, replicas=replicas, microbatches=microbatches, schedule=schedule)
    assert ours.differences(summed) == []
    usual = references(dropout, microbatches=replicas * microbatches, gradients_of=plain.scale_each)
    assert ours.distance(usual) < 1e-10


def test_distance_is_infinite_for_nan_or_missing_gradient(plain):
    """Regression: the largest difference was computed with max(), which can ignore NaN."""

    def training(second):
        gradients = {"first": torch.zeros(2), "second": second}
        return plain.Training([1.0], [1.0], [gradients], {})

    whole = training(torch.ones(2))
    assert whole.distance(training(torch.ones(2))) == 0
    for second in (torch.tensor([1.0, math.nan]), None):
        assert training(second).distance(whole) == whole.distance(training(second)) == math.inf


def test_references_depend_on_dropout_order_and_clipping(plain, references):
    """Otherwise the comparisons with the references would not cover these settings."""
    settings = {"replicas": 1, "microbatches": 8}
    drawn = references(0.3, **settings, schedule="gpipe")
    assert drawn.distance(references(0.0, **settings, schedule="gpipe")) > 1e-3
    assert drawn.differences(references(0.3, **settings, schedule="one_f_one_b"))
    assert min(drawn.norms) > MAX_NORM


def test_number_of_microbatches_does_not_matter_without_dropout(plain, references):
    ours = train_pipeline(plain, 0.0, 2, 2, microbatches=3)
    assert ours.distance(references(0.0, microbatches=1, gradients_of=plain.scale_each)) < 1e-10


def test_replicas_do_not_change_dropout(plain):
    """Six micro-batches have the same masks on one replica as on two replicas of three."""
    one = train_pipeline(plain, 0.3, 2, 1, microbatches=6)
    two = train_pipeline(plain, 0.3, 2, 2, microbatches=3)
    assert one.distance(two) < 1e-10
