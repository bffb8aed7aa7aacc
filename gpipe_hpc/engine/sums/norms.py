"""The global gradient norm: one number, the same bits for every cut."""

from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from gpipe_hpc.comm.device import Device
from gpipe_hpc.comm.group import Gathering

_LOW: Final = (torch.bfloat16, torch.float16)


class Norms(NamedTuple):
    """The norm of each parameter's gradient, over all stages; the same on every rank.

    `names`: of all parameters, in global order. `values`: float64[names], 0 where there is no
    gradient. `present`: float64[names], above 0 where there is one; of no elements on a GPU, which
    would have to be waited for to know. `dtype`: the model's widest, at least float32.
    """

    names: Sequence[str]
    values: Tensor
    present: Tensor
    dtype: torch.dtype

    def total(self) -> Tensor:
        """Return the norm of the norms, in the model's precision.

        Of those alone that have a gradient, as torch takes it; on a GPU zeros stand for the others,
        which may change the last bit.
        """
        norms = self.values[self.present > 0] if len(self.present) else self.values
        combined: Tensor = torch.linalg.vector_norm(norms.to(self.dtype))
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
    group: Gathering,
    device: Device,
    dtype: torch.dtype = torch.float32,
) -> Norms:
    """Put together the norms of single parameters, in global order; all ranks of a pipeline call.

    As `torch.nn.utils.clip_grad_norm_` does in one process: never per bucket or stage, which
    would change the last bit with the cut. Ranks that hold parts of a parameter each count theirs:
    the squares of the parts' norms are added. A parameter that several ranks hold as a whole is
    among `counted` on one of them. `dtype`: the widest of the model's parameters, at least float32.
    One sum over the group.
    """
    gradients = {n: p.grad for n, p in own.items() if p.grad is not None and n in counted}
    pairs = zip(gradients, _norms(list(gradients.values())), strict=True)
    # The root of a number's square is the number again, to the bit, so nothing is lost where a
    # place has one contributor. Wide enough for every stage's dtype.
    by_name = {name: norm.double().square() for name, norm in pairs}
    zero = torch.zeros((), dtype=torch.float64, device=device.torch)
    sums = torch.stack([zero, *(by_name.get(name, zero) for name in all_names)])[1:]
    if not device.is_accelerator:
        present = [name in by_name for name in all_names]
        sums = torch.cat([sums, torch.tensor(present, dtype=torch.float64)])
    group.all_reduce(sums)
    squares, kinds = sums[: len(all_names)], sums[len(all_names) :]
    return Norms(all_names, squares.sqrt(), kinds, dtype)


def clip_by_norm(own: Mapping[str, nn.Parameter], norms: Norms, max_norm: float) -> Tensor:
    """Scale the gradients of `own` in place so that the norm over all stages is at most max_norm.

    Returns the norm before clipping, a scalar tensor.
    """
    total = norms.total()
    if max_norm < float("inf"):
        gradients = [p.grad for p in own.values() if p.grad is not None]
        _scale(gradients, torch.clamp(max_norm / (total + 1e-6), max=1.0))
    return total


def _scale(gradients: list[Tensor], factor: Tensor) -> None:
    """Multiply gradients by a factor of at most 1; where it is known to be 1 they stay."""
    if factor.device.type == "cpu" and factor == 1.0:
        return
    for dtype in {gradient.dtype for gradient in gradients}:
        kind = [gradient for gradient in gradients if gradient.dtype == dtype]
        torch._foreach_mul_(kind, factor.to(dtype))


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
