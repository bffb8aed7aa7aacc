"""The global gradient norm: one number, the same bits for every cut."""

from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from gpipe_hpc.comm.collectives.group import Gathering
from gpipe_hpc.device.device import Device

_LOW: Final = (torch.bfloat16, torch.float16)


class Norms(NamedTuple):
    """The norm of each parameter's gradient, over all stages; the same on every rank.

    Args:
        names: All parameters, in global order.
        values: float64[names] on the device, 0 for a parameter without a gradient.
        present: float64[names] on the host, above 0 for a parameter with a gradient.
        dtype: The model's widest, at least float32.
        device: Where gradients are.
    """

    names: Sequence[str]
    values: Tensor
    present: Tensor
    dtype: torch.dtype
    device: Device

    def total(self) -> Tensor:
        """Return the norm of the norms that are present, in the model's precision, as torch does.

        No device is waited for.
        """
        is_counted = self.present > 0
        norms = self.values
        if not is_counted.all():
            # Not by a mask: the host would wait for the device to learn its places.
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
    """Return the norms of single parameters, in global order; a collective call of a pipeline.

    As `torch.nn.utils.clip_grad_norm_` does in one process: never per bucket or stage, which
    would change the last bit with the partition. The squares of the norms of a parameter's parts on
    several ranks are added. One all-reduce; with an accelerator one more, on the host.

    Args:
        own: This rank's parameters by global name.
        counted: Those whose gradients this rank counts: one rank of those that hold all of it, and
            each rank that holds a part.
        all_names: All parameters of the model.
        group: The ranks of the pipeline, or all ranks if gradients are sharded.
        device: Where gradients are.
        dtype: The widest of the model's parameters, at least float32.
    """
    gradients = {n: p.grad for n, p in own.items() if p.grad is not None and n in counted}
    # The root of a number's square is the number again, to the bit, so nothing is lost if a place
    # has one contributor. float64 is wide enough for every stage's dtype.
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
        if norms.device.is_accelerator or factor != 1.0:  # on a device, asking would wait
            _scale(gradients, factor)
    return total


def _scale(gradients: list[Tensor], factor: Tensor) -> None:
    """Multiply gradients by a factor, in their own dtype."""
    for dtype in {gradient.dtype for gradient in gradients}:
        kind = [gradient for gradient in gradients if gradient.dtype == dtype]
        torch._foreach_mul_(kind, factor.to(dtype))


def norms_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the 2-norm of each tensor, in float32 for tensors of 16 bits, which may overflow."""
    low = [tensor for tensor in tensors if tensor.dtype in _LOW]
    if not low:
        return _norms(tensors)
    wide = iter(torch._foreach_norm(low, 2, torch.float32))
    own = iter(_norms([tensor for tensor in tensors if tensor.dtype not in _LOW]))
    return [next(wide if tensor.dtype in _LOW else own) for tensor in tensors]


def stacked(numbers: Sequence[Tensor]) -> Tensor:
    """Return one or more scalars as float64[numbers], by few kernels."""
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
    """Return the runs of flags that are set."""
    found, start = [], 0
    for is_set, run in groupby(flags):
        stop = start + len(list(run))
        if is_set:
            found.append(slice(start, stop))
        start = stop
    return found
