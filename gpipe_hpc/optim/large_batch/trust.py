"""Functions that LARS and LAMB share; none of them synchronizes with the device."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from gpipe_hpc.comm.collectives.packed import PACK, packs
from gpipe_hpc.device.device import on_host


def in_packs(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield groups of parameters to update together, which limits temporary memory.

    On the host a group is one parameter, as kernel launches are cheap; on a device it has at most
    `PACK` elements.
    """
    yield from packs(parameters, 0 if on_host(parameters[0]) else PACK)


def dense_gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients of parameters that have one; sparse gradients become dense tensors."""
    found = [parameter.grad for parameter in parameters]
    return [g.to_dense() if g.is_sparse else g for g in found if g is not None]


def ratio_or_one(above: Tensor, below: Tensor) -> Tensor:
    """Return above / below, or 1 if one of them is 0, as for a weight initialized with zeros."""
    has_both = (above > 0) & (below > 0)
    return torch.where(has_both, above / below, torch.ones_like(above))
