"""AdamW that gives bitwise equal results for a weight and for shards of it.

Torch's fused AdamW allocates no temporaries of a weight's size, and on a CPU it takes a quarter of
the time of the other implementations. But on a CPU it computes the elements after the last complete
SIMD vector with other instructions, which may differ in the last bit, so a shard would not equal
the same part of the whole weight. Here those elements are padded to a complete vector.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from gpipe_hpc.device.device import on_host
from gpipe_hpc.optim.group_steps import GroupSteps

# A number of elements that fills complete vectors on any CPU: 512 bits of 16-bit elements.
_WHOLE: Final = 32


class _Piece(NamedTuple):
    """Some elements of a weight, with their gradients and optimizer state."""

    weights: Tensor
    gradients: Tensor
    means: Tensor
    squares: Tensor

    def each(self, function: Callable[[Tensor], Tensor]) -> "_Piece":
        """Return a piece with `function` applied to each of the four tensors."""
        return _Piece(*map(function, self))

    def take(self, stepped: "_Piece") -> None:
        """Copy weights and state from an updated piece, unless both share the same memory."""
        for own, changed in (
            (self.weights, stepped.weights),
            (self.means, stepped.means),
            (self.squares, stepped.squares),
        ):
            if own.data_ptr() != changed.data_ptr():
                own.copy_(changed.view_as(own))


class AdamW(GroupSteps, torch.optim.AdamW):
    """AdamW of ``torch.optim`` (Loshchilov and Hutter, arXiv 1711.05101), always fused.

    `params` are weights, (name, weight) pairs or groups, of any floating or complex dtype. The
    other arguments and the state equal those of torch.
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
        copied_back: list[tuple[_Piece, _Piece]] = []
        for parameter in parameters:
            whole, step = self._with_state(parameter)
            flat = whole.each(lambda tensor: tensor.reshape(-1))
            parts, tails = _in_vectors(flat) if on_host(parameter) else ([flat], [])
            pieces += parts
            steps += [step, *(step.clone() for _ in parts[1:])]
            copied_back += [*tails, (whole, flat)]
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
        for own, stepped in copied_back:
            own.take(stepped)

    def _with_state(self, parameter: Tensor) -> tuple[_Piece, Tensor]:
        """Return a parameter with its gradient and state as real tensors, and its step counter."""
        state: dict[str, Any] = self.state[parameter]
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        # The fused kernel reads it on the device; other implementations keep it on the host.
        step = state["step"] = state["step"].to(parameter.device, torch.float32)
        assert parameter.grad is not None, "chosen so"
        found = _Piece(parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
        return found.each(torch.view_as_real) if parameter.is_complex() else found, step


def _in_vectors(flat: _Piece) -> tuple[list[_Piece], list[tuple[_Piece, _Piece]]]:
    """Split a flat piece into complete SIMD vectors and a tail that is padded to one.

    Also returns (original tail, updated part of the padded copy), if there is a tail.
    """
    count = flat.weights.numel()
    end = count // _WHOLE * _WHOLE
    parts = [flat.each(lambda tensor: tensor[:end])]
    if end == count:
        return parts, []
    rest = flat.each(lambda tensor: tensor[end:])
    padded = rest.each(lambda tensor: nn.functional.pad(tensor, (0, _WHOLE - count + end)))
    mine = padded.each(lambda tensor: tensor[: count - end])
    return [*(parts if end else []), padded], [(rest, mine)]
