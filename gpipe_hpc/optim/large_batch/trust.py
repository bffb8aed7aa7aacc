"""What LARS and LAMB have in common; the host waits for no device."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from gpipe_hpc.comm.collectives.packed import PACK, packs
from gpipe_hpc.device.device import on_host


def in_packs(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield parameters that are updated together, so that few copies live at a time.

    On the host, where kernels cost nothing to start, one by one; else at most `PACK` elements.
    """
    yield from packs(parameters, 0 if on_host(parameters[0]) else PACK)


def dense_gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients of parameters that have one; sparse ones made dense."""
    found = [parameter.grad for parameter in parameters]
    return [g.to_dense() if g.is_sparse else g for g in found if g is not None]


def ratio_or_one(above: Tensor, below: Tensor) -> Tensor:
    """Return above / below; 1 where one of them is 0, as of a weight that begins at 0."""
    has_both = (above > 0) & (below > 0)
    return torch.where(has_both, above / below, torch.ones_like(above))
