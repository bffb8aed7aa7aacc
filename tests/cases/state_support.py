"""Train a small model by a plain loop and on ranks that are threads, and compare the results."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gpipe_hpc import Pipeline, run_on_threads
from gpipe_hpc.errors import GpipeError
from tests.support import mean_square

Make = Callable[[], list[nn.Module]]
Data = Sequence[tuple[Any, Any]]

WIDTH = 4


def linear() -> nn.Module:
    """Return a linear layer of width 4 in float64."""
    return nn.Linear(WIDTH, WIDTH, dtype=torch.float64)


class Trained(NamedTuple):
    """Losses by step, and final parameters by global name."""

    losses: list[float]
    weights: dict[str, Tensor]


class Ended(NamedTuple):
    """Result of a rank: losses and weights, its error if any, and whether the optimizer has run."""

    trained: Trained
    error: GpipeError | None
    has_updated: bool


def by_a_plain_loop(make: Make, data: Data, rate: float = 0.05, microbatches: int = 4) -> Trained:
    """Train in one process without gpipe_hpc, one micro-batch after the other."""
    torch.manual_seed(0)
    model = nn.Sequential(*make())
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    losses = []
    for inputs, targets in data:
        optimizer.zero_grad()
        total = 0.0
        for x, y in zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True):
            loss = mean_square(model(x), y) * len(x) / len(inputs)
            loss.backward()
            total += float(loss.detach())
        losses.append(total)
        optimizer.step()
    named = model.named_parameters()
    return Trained(losses, {f"layers.{name}": p.detach().clone() for name, p in named})


def by_ranks(
    make: Make,
    data: Data,
    num_ranks: int,
    rate: float = 0.05,
    before_step: Callable[[Pipeline, Any, int], None] = lambda pipe, optimizer, step: None,
    loss_fn: Callable[..., Any] = mean_square,
    **layout: Any,
) -> list[Ended]:
    """Train on ranks that are threads; a rank that raises an error does not end the others."""
    models = []
    for _ in range(num_ranks):
        torch.manual_seed(0)
        models.append(make())

    def body(world: Any) -> Ended:
        layers = models[world.rank]
        losses: list[float] = []
        pipe = Pipeline(layers, loss_fn, world=world, **{"partition": "uniform", **layout})
        optimizer = pipe.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=rate))
        error, has_updated = None, False
        try:
            for step, (inputs, targets) in enumerate(data):
                before_step(pipe, optimizer, step)
                own = pipe.share(len(targets))
                result = pipe.step(_part(inputs, own), targets[own])
                losses.append(float(result.loss))
                optimizer.step()
                has_updated = True
        except GpipeError as caught:
            error = caught
        weights = {n: p.detach().clone() for n, p in pipe.named_parameters()} if not error else {}
        return Ended(Trained(losses, weights), error, has_updated)

    return run_on_threads(num_ranks, body)


def _part(inputs: Any, own: slice) -> Any:
    if isinstance(inputs, dict):
        return {name: value[own] for name, value in inputs.items()}
    return inputs[own]


def assert_as_plain(ranks: Sequence[Ended], plain: Trained) -> None:
    """Assert that losses and weights of all ranks are close to those of the plain loop."""
    weights: dict[str, Tensor] = {}
    for rank in ranks:
        assert rank.error is None, rank.error
        torch.testing.assert_close(rank.trained.losses, plain.losses, rtol=1e-10, atol=1e-10)
        for name, value in rank.trained.weights.items():
            torch.testing.assert_close(value, plain.weights[name], rtol=1e-10, atol=1e-10)
            weights[name] = value
    assert weights.keys() == plain.weights.keys()


def assert_refused(ranks: Sequence[Ended], *words: str, steps: int = 0) -> None:
    """Assert that all ranks raised an error after `steps` steps, and that one contains `words`."""
    assert all(rank.error is not None for rank in ranks), "a rank went on"
    assert all(len(rank.trained.losses) == steps for rank in ranks)
    assert all(rank.has_updated is (steps > 0) for rank in ranks)
    texts = [str(rank.error) for rank in ranks]
    assert any(all(word in text for word in words) for text in texts), texts


def twins(make: Make) -> Make:
    """Return a factory of deep copies of the layers, so that ranks have equal initial weights."""
    torch.manual_seed(0)
    first = make()
    return lambda: copy.deepcopy(first)
