"""Train a small model by a plain loop and by ranks that are threads; what each rank ends with."""

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
    """Return a layer of four numbers."""
    return nn.Linear(WIDTH, WIDTH, dtype=torch.float64)


class Trained(NamedTuple):
    """Losses by step, and parameters at the end by global name."""

    losses: list[float]
    weights: dict[str, Tensor]


class Ended(NamedTuple):
    """How a rank ended: what it trained, its error if it raised one, and whether weights moved."""

    trained: Trained
    error: GpipeError | None
    has_updated: bool


def by_a_plain_loop(make: Make, data: Data, rate: float = 0.05, microbatches: int = 4) -> Trained:
    """Train in one process, one micro-batch after the other, without anything of gpipe_hpc."""
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
    """Train on ranks that are threads; each ends by itself, also by an error."""
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
    """Compare with a plain loop: losses, weights, and the copies of weights with one another."""
    weights: dict[str, Tensor] = {}
    for rank in ranks:
        assert rank.error is None, rank.error
        torch.testing.assert_close(rank.trained.losses, plain.losses, rtol=1e-10, atol=1e-10)
        for name, value in rank.trained.weights.items():
            torch.testing.assert_close(value, plain.weights[name], rtol=1e-10, atol=1e-10)
            weights[name] = value
    assert weights.keys() == plain.weights.keys()


def assert_refused(ranks: Sequence[Ended], *words: str, steps: int = 0) -> None:
    """Check that all ranks ended with an error, after so many steps, and that one names `words`."""
    assert all(rank.error is not None for rank in ranks), "a rank went on"
    assert all(len(rank.trained.losses) == steps for rank in ranks)
    assert all(rank.has_updated is (steps > 0) for rank in ranks)
    texts = [str(rank.error) for rank in ranks]
    assert any(all(word in text for word in words) for text in texts), texts


def twins(make: Make) -> Make:
    """Return a factory of deep copies of what another made once: equal weights on every rank."""
    torch.manual_seed(0)
    first = make()
    return lambda: copy.deepcopy(first)
