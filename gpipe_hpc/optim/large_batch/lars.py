"""LARS: SGD with a learning rate for each tensor, from the norms of the tensor and its gradient."""

from typing import Any

import torch
from torch import Tensor

from gpipe_hpc.engine import norms_of
from gpipe_hpc.errors import ConfigError
from gpipe_hpc.optim.group_steps import GroupSteps
from gpipe_hpc.optim.large_batch.trust import dense_gradients, in_packs, ratio_or_one


class LARS(GroupSteps):
    """LARS optimizer: SGD with a learning rate for each parameter (You et al. 2017, algorithm 1).

    With w a parameter, g its gradient, b `weight_decay`, m `momentum`::

        local = trust x |w| / (|g| + b |w|)
        v     = m v + lr x local x (g + b w)
        w     = w - v

    `local` is `trust` if w or the divisor is 0. Groups with `adapt=False` (usually biases and
    norms) have local = 1, which makes these plain momentum. The state has one value per parameter
    element, `momentum_buffer`; none with momentum=0. A parameter is never divided over ranks, so no
    communication is needed. Raises ConfigError for invalid numbers.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1.0,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
        adapt: bool = True,
    ) -> None:
        for name, value, is_good in (
            ("lr", lr, lr >= 0),
            ("momentum", momentum, 0 <= momentum < 1),
            ("weight_decay", weight_decay, weight_decay >= 0),
            ("trust", trust, trust >= 0),
        ):
            if not is_good:
                most = " and below 1" if name == "momentum" else ""
                raise ConfigError(
                    f"LARS: {name} must be at least 0{most}, got {value}; correct optimizer.{name}"
                )
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "weight_decay": weight_decay,
                "trust": trust,
                "adapt": adapt,
            },
        )

    def _update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        for pack in in_packs(parameters):
            self._update_pack(pack, group)

    def _update_pack(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        gradients = dense_gradients(parameters)
        changes = list(torch._foreach_add(gradients, parameters, alpha=group["weight_decay"]))
        if group["adapt"]:
            torch._foreach_mul_(changes, _local_rates(parameters, gradients, group))
        torch._foreach_mul_(changes, group["lr"])
        if group["momentum"]:
            changes = self._with_momentum(parameters, changes, group["momentum"])
        torch._foreach_add_(parameters, changes, alpha=-1)

    def _with_momentum(
        self, parameters: list[Tensor], changes: list[Tensor], momentum: float
    ) -> list[Tensor]:
        for parameter in parameters:
            if "momentum_buffer" not in self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        buffers = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        torch._foreach_mul_(buffers, momentum)
        torch._foreach_add_(buffers, changes)
        return buffers


def _local_rates(
    parameters: list[Tensor], gradients: list[Tensor], group: dict[str, Any]
) -> list[Tensor]:
    decay, trust = group["weight_decay"], group["trust"]
    pairs = zip(norms_of(parameters), norms_of(gradients), strict=True)
    return [trust * ratio_or_one(weight, gradient + decay * weight) for weight, gradient in pairs]
