"""Ranks of a replica that are given different batches are told, and nobody else is."""

import logging
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gpipe_hpc import Pipeline, run_on_threads

G = torch.Generator().manual_seed(0)
X = torch.randn(32, 4, generator=G, dtype=torch.float64)
Y = X.sum(1, keepdim=True)


def lines(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


SEEDING = threading.Lock()  # the threads of ranks share torch's generator


def run(ranks, data, steps=4, reads=True, loss=None, **keywords):
    """Train on what `data(rank, step, part)` gives; return the losses that rank 0 read."""

    def body(world):
        with SEEDING:
            torch.manual_seed(5)
            layers = [nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)]
        model = [layer.double() for layer in layers]
        loss_fn = loss or nn.MSELoss()
        pipe = Pipeline(model, loss_fn, microbatches=2, world=world, **keywords)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        found = []
        for step in range(steps):
            result = pipe.step(*data(world.rank, step, pipe.share(len(X))))
            optimizer.step()
            found += [result.loss] if reads or step == steps - 1 else []
        return found

    return run_on_threads(ranks, body)[0]


def shuffled(seed):
    order = torch.randperm(len(X), generator=torch.Generator().manual_seed(seed))
    return X[order], Y[order]


def test_an_order_of_its_own_on_each_rank_is_told_once(caplog):
    """Inputs of the first rank met targets of the last: the loss was 60 times too high."""

    def loaded(rank, step, part):
        generator = torch.Generator().manual_seed(1 + rank)
        loader = DataLoader(TensorDataset(X, Y), len(X), shuffle=True, generator=generator)
        return next(iter(loader))

    run(2, loaded, stages=2)
    told = lines(caplog)
    assert len(told) == 2 and len(set(told)) == 1  # one on each rank
    assert "got different targets" in told[0] and "torch.Generator().manual_seed" in told[0]


def test_what_differed_in_an_early_step_is_told_when_a_later_loss_is_read(caplog):
    run(2, lambda rank, step, part: shuffled(rank if step < 2 else 0), reads=False, stages=2)
    assert all("step 0" in line for line in lines(caplog)) and lines(caplog)


ROW = torch.arange(len(X))
DIFFERENT = {
    "targets of both": lambda rank: shuffled(rank),
    "inputs, where one has targets": lambda rank: (
        shuffled(rank)[0],
        shuffled(rank)[1] if rank else None,
    ),
    "arrays of NumPy": lambda rank: tuple(each.numpy() for each in shuffled(rank)),
    "two samples change places": lambda rank: (X, Y if rank else Y[[1, 0, *range(2, len(X))]]),
    "one number": lambda rank: (X, Y if rank else Y + (ROW == 7).double()[:, None] * 1e-5),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_each_difference_is_found(caplog, case):
    run(2, lambda rank, step, part: DIFFERENT[case](rank), stages=2)
    assert len(lines(caplog)) == 2


def test_labels_that_change_places_are_found(caplog):
    """A sum of the labels would be the same."""

    def data(rank, step, part):
        labels = torch.arange(len(X)) % 2
        return X, labels if rank else labels.flip(0)

    def loss(output, target):
        return (output[:, 0] - target).square().mean()

    run(2, data, loss=loss, stages=2)
    assert len(lines(caplog)) == 2


def test_a_nest_with_texts_is_compared(caplog):
    def data(rank, step, part):
        names = ["a", "b"] if rank else ["b", "a"]
        return X, {"target": Y, "names": tuple(names)}

    run(2, data, loss=lambda o, t: (o - t["target"]).square().mean(), stages=2)
    assert len(lines(caplog)) == 2


SAME = {
    "all": lambda rank, last: (X, Y),
    "only what is needed": lambda rank, last: (X if not rank else None, Y if last else None),
    "inputs alone, and both": lambda rank, last: (X, Y if last else None),
    "an array and a tensor": lambda rank, last: (X.numpy(), Y.numpy()) if rank else (X, Y),
    "float32 where targets are not used": lambda rank, last: (X, Y if last else Y.float()),
    "float32 of NumPy": lambda rank, last: (X, Y if last else Y.numpy().astype("f4")),
    "float32 in another layout": lambda rank, last: (X, Y if last else Y.float().expand(-1, 1)),
    "float64 where targets are not used": lambda rank, last: (
        (X, Y.float()) if last else (X, Y.float().double())
    ),
    "another layout in memory": lambda rank, last: (
        (X, Y) if rank else (X.t().contiguous().t(), Y.expand(-1, 1))
    ),
    "inputs that are augmented where they are used": lambda rank, last: (X + rank, Y),
    "values with an address": lambda rank, last: (X, {"t": Y, "o": object()}),
}


def cut(nest, part):
    if isinstance(nest, dict):
        return {key: cut(value, part) for key, value in nest.items()}
    return nest[part] if isinstance(nest, (torch.Tensor, np.ndarray)) else nest


@pytest.mark.parametrize("case", SAME)
@pytest.mark.parametrize("replicas", [1, 2])
def test_the_same_data_says_nothing_and_trains_right(caplog, case, replicas):
    def data(rank, step, part):
        place = rank % 2
        inputs, targets = SAME[case](place, place == 1)
        return cut(inputs, part), cut(targets, part)

    def loss(output, target):
        target = target["t"] if isinstance(target, dict) else target
        return (output - target).square().mean()

    found = run(2 * replicas, data, loss=loss, stages=2, replicas=replicas)
    assert lines(caplog) == []
    if case == "all":
        assert found == pytest.approx(plain(), rel=1e-12)


def plain():
    torch.manual_seed(5)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)], nn.Linear(4, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(X), Y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_replicas_have_other_data_than_one_another(caplog):
    """Each replica shuffles for itself, all of its ranks alike."""
    run(4, lambda rank, step, part: shuffled(rank // 2), stages=2, replicas=2)
    run(2, lambda rank, step, part: shuffled(rank), stages=1, replicas=2)
    assert lines(caplog) == []
    run(4, lambda rank, step, part: shuffled(rank if rank < 2 else 0), stages=2, replicas=2)
    assert lines(caplog)


@pytest.mark.parametrize("schedule", ["chimera", "dualpipe", "interleaved", "zb_v"])
def test_placements_where_ranks_have_both_ends(caplog, schedule):
    options = {"interleaved": {"stages_per_rank": 2}}.get(schedule)
    keywords = {"schedule": schedule, "stages": 2, "schedule_options": options}
    if schedule in ("chimera", "dualpipe"):
        run(2, lambda rank, step, part: shuffled(rank), **keywords)
        assert len(lines(caplog)) == 2
        caplog.clear()
    run(2, lambda rank, step, part: (X, Y), **keywords)
    assert lines(caplog) == []


def test_without_targets_inputs_may_differ(caplog):
    """The last rank uses neither: what it is given is of no account."""

    def loss(output, target):
        return output.square().mean()

    run(2, lambda rank, step, part: (shuffled(rank)[0],), loss=loss, stages=2)
    assert lines(caplog) == []


def test_evaluation_and_prediction_are_not_compared(caplog):
    def body(world):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).double()
        pipe = Pipeline(model, nn.MSELoss(), world=world)
        inputs, targets = shuffled(world.rank)
        return pipe.evaluate(inputs, targets).loss, len(pipe.predict(inputs))

    run_on_threads(2, body)
    assert lines(caplog) == []
