"""Optimizers over the parameters of one rank."""

from collections.abc import Callable, Iterator, Mapping, Set
from typing import Protocol, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from gpipe_hpc.data_parallel.optimizer_checks import check_separable
from gpipe_hpc.errors import ConfigError

O = TypeVar("O", bound=Optimizer)

Factory = Callable[[list[nn.Parameter]], O]
"""Makes an optimizer for the parameters of a rank."""


class NoParameters(list[nn.Parameter]):
    """An empty list for which torch's optimizers can be made: they refuse a plain one.

    Iterating over it yields a parameter without elements.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._placeholder = nn.Parameter(torch.empty(0, 0, device=device))

    def __iter__(self) -> Iterator[nn.Parameter]:
        """Yield the placeholder."""
        return iter([self._placeholder])


class OptimizerSharding(Protocol):
    """How the copies of stages share the state of optimizers, seen from one rank."""

    @property
    def shards_gradients(self) -> bool:
        """Whether a copy has its shard of the gradients alone."""

    @property
    def not_owned(self) -> Set[str]:
        """The parameters that other copies update, by global name."""

    def attach(self, optimizer: Optimizer, whole: Mapping[str, nn.Parameter]) -> None:
        """Let an optimizer over whole parameters, by global name, update this rank's share."""

    @property
    def is_gathering(self) -> bool:
        """Whether some parameters that other ranks have updated may not have arrived yet."""

    def wait(self) -> None:
        """Wait for all parameters."""


def make_optimizer(
    factory: Factory[O],
    whole: Mapping[str, nn.Parameter],
    sharding: OptimizerSharding | None = None,
    *,
    has_all: bool = False,
) -> O:
    """Return the optimizer that a user's function makes for this rank's parameters.

    Args:
        factory: The user's function.
        whole: The parameters by global name; there may be none.
        sharding: How its state is divided over the copies; None for not at all.
        has_all: Whether the rank has all parameters of the model.

    Raises ConfigError for an optimizer that cannot be used on a part of the model, or not sharded.
    """
    # Torch refuses an optimizer without parameters: a placeholder is removed afterwards.
    placeholder = nn.Parameter(torch.zeros(1, 1))
    optimizer = factory(list(whole.values()) or [placeholder])
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
    if not whole:
        replace_parameters(optimizer, {placeholder: None})
    if sharding is not None:
        sharding.attach(optimizer, whole)
    if sharding is not None or not has_all:
        check_separable(optimizer)
    return optimizer


def replace_parameters(
    optimizer: Optimizer, replacements: Mapping[nn.Parameter, nn.Parameter | None]
) -> None:
    """Replace parameters of an optimizer by others; None removes one, and its state.

    Other parameters stay. Options of the groups, and names, stay with their parameters.
    """
    for group in optimizer.param_groups:
        params = group["params"]
        names = group.get("param_names") or [None] * len(params)
        pairs = [(replacements.get(p, p), name) for p, name in zip(params, names, strict=True)]
        kept = [(p, name) for p, name in pairs if p is not None]
        group["params"] = [p for p, _ in kept]
        if "param_names" in group:
            group["param_names"] = [name for _, name in kept]
    for parameter, other in replacements.items():
        if other is None:
            optimizer.state.pop(parameter, None)
