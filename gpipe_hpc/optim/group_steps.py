"""Base class of the optimizers of gpipe_hpc, which update all parameters of a group at once."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer


class GroupSteps(Optimizer):
    """Optimizer that updates all parameters of a group in one call."""

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient; return the result of `closure`, if given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters: list[Tensor] = [p for p in group["params"] if p.grad is not None]
            if parameters:
                self._update(parameters, group)
        return loss

    @abstractmethod
    def _update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Update parameters that have gradients, with the options of their group."""
