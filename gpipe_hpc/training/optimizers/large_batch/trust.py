"""What LARS and LAMB have in common; the host waits for no device."""

from collections.abc import Iterable

import torch
from torch import Tensor


def dense_gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients of parameters that have one; sparse ones made dense."""
    found = [parameter.grad for parameter in parameters]
    return [g.to_dense() if g.is_sparse else g for g in found if g is not None]


def ratio_or_one(above: Tensor, below: Tensor) -> Tensor:
    """Return above / below; 1 where one of them is 0, as of a weight that begins at 0."""
    has_both = (above > 0) & (below > 0)
    return torch.where(has_both, above / below, torch.ones_like(above))
