"""LAMB: Adam whose steps are scaled to the norm of each parameter tensor."""

from typing import Any

import torch
from torch import Tensor

from gpipe_hpc.engine import norms_of
from gpipe_hpc.errors import ConfigError
from gpipe_hpc.optim.group_steps import GroupSteps
from gpipe_hpc.optim.large_batch.trust import dense_gradients, in_packs, ratio_or_one


class LAMB(GroupSteps):
    """LAMB optimizer: Adam with a learning rate for each parameter (You et al. 2019, algorithm 2).

    With x a parameter, g its gradient, t the number of steps, d `weight_decay`::

        m = b1 m + (1 - b1) g,   v = b2 v + (1 - b2) g^2
        u = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + d x
        x = x - lr x (|x| / |u|) x u

    The paper's phi is the identity. The ratio is 1 if one of the norms is 0, and in groups with
    `adapt=False` (usually biases and norms), which makes these plain Adam. The state has two values
    per parameter element and a step counter. A parameter is never divided over ranks, so no
    communication is needed. Raises ConfigError for invalid numbers.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        adapt: bool = True,
    ) -> None:
        for name, value, is_good in (
            ("lr", lr, lr >= 0),
            ("betas", betas, all(0 <= beta < 1 for beta in betas)),
            ("eps", eps, eps >= 0),
            ("weight_decay", weight_decay, weight_decay >= 0),
        ):
            if not is_good:
                most = " and below 1" if name == "betas" else ""
                raise ConfigError(
                    f"LAMB: {name} must be at least 0{most}, got {value}; correct optimizer.{name}"
                )
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": tuple(betas),
                "eps": eps,
                "weight_decay": weight_decay,
                "adapt": adapt,
            },
        )

    def _update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        for pack in in_packs(parameters):
            self._update_pack(pack, group)

    def _update_pack(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        states = [self._state_of(parameter) for parameter in parameters]
        gradients = dense_gradients(parameters)
        means = [state["exp_avg"] for state in states]
        squares = [state["exp_avg_sq"] for state in states]
        beta1, beta2 = group["betas"]
        torch._foreach_mul_(means, beta1)
        torch._foreach_add_(means, gradients, alpha=1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        counts = [int(state["step"]) for state in states]  # on the host: no device waits
        roots = torch._foreach_div(squares, [1 - beta2**count for count in counts])
        torch._foreach_sqrt_(roots)
        torch._foreach_add_(roots, group["eps"])
        changes = torch._foreach_div(means, [1 - beta1**count for count in counts])
        torch._foreach_div_(changes, roots)
        if group["weight_decay"]:
            torch._foreach_add_(changes, parameters, alpha=group["weight_decay"])
        if group["adapt"]:
            pairs = zip(norms_of(parameters), norms_of(changes), strict=True)
            torch._foreach_mul_(changes, [ratio_or_one(*pair) for pair in pairs])
        torch._foreach_add_(parameters, changes, alpha=-group["lr"])

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        """Return a parameter's state with its step counter incremented."""
        state: dict[str, Any] = self.state[parameter]
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        return state
