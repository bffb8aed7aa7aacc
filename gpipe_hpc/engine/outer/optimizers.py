"""Optimizers over what a rank holds of its parameters."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from gpipe_hpc.engine.outer.held import Held
from gpipe_hpc.errors import ConfigError

O = TypeVar("O", bound=Optimizer)

Factory = Callable[[list[nn.Parameter]], O]


class NoParameters(list[nn.Parameter]):
    """An empty list that torch's optimizers take, which refuse one.

    Who iterates over it gets a parameter without elements.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._nothing = nn.Parameter(torch.empty(0, 0, device=device))

    def __iter__(self) -> Iterator[nn.Parameter]:
        """Yield the one that stands in."""
        return iter([self._nothing])


class Sharing(Protocol):
    """How the copies of stages share the state of optimizers, seen from one rank."""

    @property
    def divides_gradients(self) -> bool:
        """Say whether a copy has its share of the gradients alone."""

    def take(self, optimizer: Optimizer, whole: Mapping[str, nn.Parameter]) -> None:
        """Let an optimizer over whole parameters, by global name, update this rank's share."""

    def held(self) -> dict[str, Held]:
        """Return what this rank updates, by global name."""

    @property
    def is_under_way(self) -> bool:
        """Say whether some parameters that other ranks have updated may not be here yet."""

    def wait(self) -> None:
        """Return when all parameters are here."""


def make_optimizer(factory: Factory[O], parameters: Sequence[nn.Parameter]) -> O:
    """Return what the factory makes for a rank's parameters, of which there may be none."""
    # Torch refuses an optimizer without parameters: one stands in and is taken out again.
    nothing = nn.Parameter(torch.zeros(1, 1))
    optimizer = factory(list(parameters) or [nothing])
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"pipe.optimizer: expected the function to return a torch.optim.Optimizer, got "
            f"{type(optimizer).__name__}; return the optimizer"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ConfigError(
            "pipe.optimizer: expected an optimizer of dense gradients, got SparseAdam: those of "
            "nn.Embedding(sparse=True) are made dense before they are summed; use torch.optim.Adam"
        )
    if not parameters:
        keep_only(optimizer, {nothing: None})
    return optimizer


def keep_only(optimizer: Optimizer, held: Mapping[nn.Parameter, nn.Parameter | None]) -> None:
    """Put others in the place of an optimizer's parameters; None: leave it and its state out.

    Those that are not named stay. Options of the groups, and names, stay with their parameters.
    """
    for group in optimizer.param_groups:
        params = group["params"]
        names = group.get("param_names") or [None] * len(params)
        pairs = [(held.get(p, p), name) for p, name in zip(params, names, strict=True)]
        kept = [(p, name) for p, name in pairs if p is not None]
        group["params"] = [p for p, _ in kept]
        if "param_names" in group:
            group["param_names"] = [name for _, name in kept]
    for parameter, other in held.items():
        if other is None:
            optimizer.state.pop(parameter, None)
