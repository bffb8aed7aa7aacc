"""The global gradient norm: one number, the same bits for every cut."""

from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from gpipe_hpc.comm.device import Device
from gpipe_hpc.comm.group import Gathering

_LOW: Final = (torch.bfloat16, torch.float16)


class Norms(NamedTuple):
    """The norm of each parameter's gradient, over all stages; the same on every rank.

    `names`: of all parameters, in global order. `values`: float64[names], 0 where there is no
    gradient, on the device. `present`: float64[names], above 0 where there is one, on the host.
    `dtype`: the model's widest, at least float32. `device`: where gradients are.
    """

    names: Sequence[str]
    values: Tensor
    present: Tensor
    dtype: torch.dtype
    device: Device

    def total(self) -> Tensor:
        """Return the norm of the norms, in the model's precision; no device is waited for.

        Of those alone that have a gradient, as torch takes it.
        """
        is_counted = self.present > 0
        norms = self.values
        if not is_counted.all():
            # Not by a mask, whose places the host would ask the device for.
            runs = [self.values[run] for run in _runs(is_counted.tolist())]
            norms = torch.cat(runs) if runs else self.values[:0]
        combined: Tensor = torch.linalg.vector_norm(norms.to(self.dtype))
        return combined

    def square_without(self, left_out: Collection[str]) -> float:
        """Return the sum of squares over all names except some; waits for the device."""
        values: list[float] = self.device.fetch(self.values).tolist()
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
    One sum over the group; with an accelerator one more, on the host, of what is there.
    """
    gradients = {n: p.grad for n, p in own.items() if p.grad is not None and n in counted}
    # The root of a number's square is the number again, to the bit, so nothing is lost where a
    # place has one contributor. Wide enough for every stage's dtype.
    norms = _norms(list(gradients.values()))
    squares = stacked(norms).square().unbind() if norms else ()
    by_name = dict(zip(gradients, squares, strict=True))
    zero = torch.zeros((), dtype=torch.float64, device=device.torch)
    sums = torch.stack([zero, *(by_name.get(name, zero) for name in all_names)])[1:]
    present = torch.tensor([name in by_name for name in all_names], dtype=torch.float64)
    if device.is_accelerator:
        pending = group.start_all_reduce(sums)
        group.all_reduce(present)
        pending.wait()
    else:
        both = torch.cat([sums, present])
        group.all_reduce(both)
        sums, present = torch.split(both, len(all_names)) if all_names else (sums, present)
    return Norms(all_names, sums.sqrt(), present, dtype, device)


def clip_by_norm(own: Mapping[str, nn.Parameter], norms: Norms, max_norm: float) -> Tensor:
    """Scale the gradients of `own` in place so that the norm over all stages is at most max_norm.

    Returns the norm before clipping, a scalar tensor.
    """
    total = norms.total()
    if max_norm < float("inf"):
        gradients = [p.grad for p in own.values() if p.grad is not None]
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        if norms.device.is_accelerator or factor != 1.0:  # nobody waits for a device to say it
            _scale(gradients, factor)
    return total


def _scale(gradients: list[Tensor], factor: Tensor) -> None:
    """Multiply gradients by a factor, in their own dtype."""
    for dtype in {gradient.dtype for gradient in gradients}:
        kind = [gradient for gradient in gradients if gradient.dtype == dtype]
        torch._foreach_mul_(kind, factor.to(dtype))


def norms_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the 2-norm of each tensor; of those in 16 bits in float32, which holds it."""
    low = [tensor for tensor in tensors if tensor.dtype in _LOW]
    if not low:
        return _norms(tensors)
    wide = iter(torch._foreach_norm(low, 2, torch.float32))
    own = iter(_norms([tensor for tensor in tensors if tensor.dtype not in _LOW]))
    return [next(wide if tensor.dtype in _LOW else own) for tensor in tensors]


def stacked(numbers: Sequence[Tensor]) -> Tensor:
    """Return at least one number of a device as float64[numbers]: not by a kernel for each."""
    kinds: dict[torch.dtype, list[int]] = {}
    for place, number in enumerate(numbers):
        kinds.setdefault(number.dtype, []).append(place)
    parts = [torch.stack([numbers[i] for i in places]).double() for places in kinds.values()]
    if len(parts) == 1:
        return parts[0]
    rows = {
        place: row
        for places, part in zip(kinds.values(), parts, strict=True)
        for place, row in zip(places, part.unbind(), strict=True)
    }
    return torch.stack([rows[place] for place in range(len(numbers))])


def _norms(gradients: Sequence[Tensor]) -> list[Tensor]:
    return list(torch._foreach_norm(list(gradients))) if gradients else []


def _runs(flags: Sequence[bool]) -> list[slice]:
    """Return where neighbours are set."""
    found, start = [], 0
    for is_set, run in groupby(flags):
        stop = start + len(list(run))
        if is_set:
            found.append(slice(start, stop))
        start = stop
    return found
