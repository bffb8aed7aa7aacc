"""The global gradient norm: one number, the same bits for every cut."""

from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from gpipe_hpc.comm.group import Group

_LOW: Final = (torch.bfloat16, torch.float16)


class Norms(NamedTuple):
    """The norm of each parameter's gradient, over all stages; the same on every rank.

    `names`: of all parameters, in global order. `values`: float64[names], 0 where there is no
    gradient. `present`: int32[names] on the host: 0 for no gradient, 2 where the model is of
    float64, else 1.
    """

    names: Sequence[str]
    values: Tensor
    present: Tensor

    def total(self) -> Tensor:
        """Return the norm of the norms of those that have a gradient, in the model's precision."""
        kinds, norms = self.present.tolist(), self.values
        if not any(kinds):
            return norms.new_zeros(())
        if not all(kinds):
            norms = norms[self.present.to(norms.device) > 0]
        if max(kinds) == 1:
            norms = norms.to(torch.float32)
        combined: Tensor = torch.linalg.vector_norm(norms)
        return combined

    def square_without(self, left_out: Collection[str]) -> float:
        """Return the sum of squares over all names except some; waits for the device."""
        values: list[float] = self.values.tolist()
        pairs = zip(self.names, values, strict=True)
        return sum(value * value for name, value in pairs if name not in left_out)


def gather_norms(
    own: Mapping[str, nn.Parameter],
    counted: Collection[str],
    all_names: Sequence[str],
    group: Group,
    device: torch.device,
) -> Norms:
    """Put together the norms of single parameters, in global order; all ranks of a pipeline call.

    As `torch.nn.utils.clip_grad_norm_` does in one process: never per bucket or stage, which
    would change the last bit with the cut. A parameter held by several ranks is among `counted`
    on one of them.
    """
    place = {name: index for index, name in enumerate(all_names)}
    present = torch.zeros(len(all_names), dtype=torch.int32)
    gradients = {name: p.grad for name, p in own.items() if p.grad is not None}
    dtype = torch.float32
    for gradient in gradients.values():
        dtype = torch.promote_types(dtype, gradient.dtype)
    # Wide enough for every stage's dtype; exact, as each place has one contributor.
    norms = torch.zeros(len(all_names), dtype=torch.float64, device=device)
    for name, norm in zip(gradients, _norms(list(gradients.values())), strict=True):
        if name not in counted:
            continue
        norms[place[name]] = norm
        present[place[name]] = 2 if dtype == torch.float64 else 1
    group.all_reduce(norms)
    group.all_reduce(present)
    return Norms(all_names, norms, present)


def clip_by_norm(own: Mapping[str, nn.Parameter], norms: Norms, max_norm: float) -> Tensor:
    """Scale the gradients of `own` in place so that the norm over all stages is at most max_norm.

    Returns the norm before clipping, a scalar tensor.
    """
    total = norms.total()
    if max_norm < float("inf"):
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for parameter in own.values():
            if parameter.grad is not None:
                parameter.grad.mul_(factor.to(parameter.grad.dtype))
    return total


def norms_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the 2-norm of each tensor; of those in 16 bits in float32, which holds it."""
    if any(tensor.dtype in _LOW for tensor in tensors):
        return [
            torch.linalg.vector_norm(t, dtype=torch.float32 if t.dtype in _LOW else t.dtype)
            for t in tensors
        ]
    return _norms(list(tensors))


def _norms(gradients: list[Tensor]) -> list[Tensor]:
    return list(torch._foreach_norm(gradients)) if gradients else []
