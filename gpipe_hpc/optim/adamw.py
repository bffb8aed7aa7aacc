"""AdamW in one pass over each weight, with the same bits wherever weights are cut.

Torch's fused form makes none of the temporaries of a weight's size that its others make, and on a
CPU takes a quarter of their time. But on a CPU the numbers behind the last whole vector of a tensor
go through other instructions, and now and then one differs in its last bit: a shard of a weight
would not come out as the whole does. Here these, too, are computed as part of a whole vector.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from gpipe_hpc.device.device import on_host
from gpipe_hpc.optim.group_steps import GroupSteps

# Numbers that are whole vectors on any processor: 512 bits of the smallest dtype, of 16 bits.
_WHOLE: Final = 32


class _Piece(NamedTuple):
    """Numbers of a weight, with what belongs to them."""

    weights: Tensor
    gradients: Tensor
    means: Tensor
    squares: Tensor

    def each(self, function: Callable[[Tensor], Tensor]) -> "_Piece":
        """Return what a function makes of each tensor."""
        return _Piece(*map(function, self))

    def take(self, stepped: "_Piece") -> None:
        """Take what a step has changed in another, unless that is this one's own memory."""
        for own, changed in (
            (self.weights, stepped.weights),
            (self.means, stepped.means),
            (self.squares, stepped.squares),
        ):
            if own.data_ptr() != changed.data_ptr():
                own.copy_(changed.view_as(own))


class AdamW(GroupSteps, torch.optim.AdamW):
    """AdamW of ``torch.optim`` (Loshchilov and Hutter, arXiv 1711.05101), always fused.

    `params`: weights, pairs of name and weight, or groups, of any floating or complex dtype. The
    other arguments, and the state, are torch's own.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    def _update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        pieces: list[_Piece] = []
        steps: list[Tensor] = []
        lent: list[tuple[_Piece, _Piece]] = []
        for parameter in parameters:
            whole, step = self._with_state(parameter)
            flat = whole.each(lambda tensor: tensor.reshape(-1))
            parts, tails = _in_vectors(flat) if on_host(parameter) else ([flat], [])
            pieces += parts
            steps += [step, *(step.clone() for _ in parts[1:])]
            lent += [*tails, (whole, flat)]
        beta1, beta2 = group["betas"]
        adamw(
            [piece.weights for piece in pieces],
            [piece.gradients for piece in pieces],
            [piece.means for piece in pieces],
            [piece.squares for piece in pieces],
            [],
            steps,
            fused=True,
            amsgrad=False,
            maximize=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
        )
        for own, stepped in lent:
            own.take(stepped)

    def _with_state(self, parameter: Tensor) -> tuple[_Piece, Tensor]:
        """Return a parameter with its gradient and state, all of real numbers, and its step."""
        state: dict[str, Any] = self.state[parameter]
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        # Kernels read it on the device; what torch's other forms have saved lies on the host.
        step = state["step"] = state["step"].to(parameter.device, torch.float32)
        assert parameter.grad is not None, "chosen so"
        found = _Piece(parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
        return found.each(torch.view_as_real) if parameter.is_complex() else found, step


def _in_vectors(flat: _Piece) -> tuple[list[_Piece], list[tuple[_Piece, _Piece]]]:
    """Return pieces of whole vectors, at least one, and what of the last belongs to `flat`."""
    count = flat.weights.numel()
    end = count // _WHOLE * _WHOLE
    parts = [flat.each(lambda tensor: tensor[:end])]
    if end == count:
        return parts, []
    rest = flat.each(lambda tensor: tensor[end:])
    padded = rest.each(lambda tensor: nn.functional.pad(tensor, (0, _WHOLE - count + end)))
    mine = padded.each(lambda tensor: tensor[: count - end])
    return [*(parts if end else []), padded], [(rest, mine)]
