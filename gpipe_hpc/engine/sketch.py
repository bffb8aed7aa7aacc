"""Sketches: a few numbers of a nest of tensors, by which it can be compared with another.

Of each tensor the sums of 64 classes of its elements, with random signs (Charikar, Chen,
Farach-Colton: Finding frequent items in data streams, 2002): the length of the difference of two
sketches is about that of the difference of the tensors.
"""

from typing import Final

import torch

from gpipe_hpc.pytree import Nest, tensors_of

_CLASSES: Final = 64

_NARROW: Final = (torch.float32, torch.bfloat16, torch.float16)

Sketch = tuple[tuple[torch.Tensor, float], ...]
"""For each tensor the sums, and the relative difference that rounding may make."""


def sketch_of(nest: Nest) -> Sketch:
    """Return the sketch of a nest's tensors."""
    tensors = [tensor.detach() for tensor in tensors_of(nest) if tensor.numel()]
    if not tensors:
        return ()
    with torch.no_grad(), torch.autocast(tensors[0].device.type, enabled=False):
        return tuple(map(_sums, tensors))


def difference(one: Sketch, other: Sketch) -> float:
    """Return the largest relative difference between tensors, 0 if it may be rounding.

    Infinite where the tensors are not of the same number and kind. Waits for the device.
    """
    if len(one) != len(other):
        return float("inf")
    found = 0.0
    for (mine, rounding), (theirs, _) in zip(one, other, strict=True):
        length = float(torch.linalg.vector_norm(mine))
        apart = float(torch.linalg.vector_norm(mine - theirs))
        if apart > rounding * length:  # never so of what is not a number
            found = max(found, apart / length if length else float("inf"))
    return found


def _sums(tensor: torch.Tensor) -> tuple[torch.Tensor, float]:
    if tensor.is_nested:
        tensor = torch.cat([part.reshape(-1) for part in tensor.unbind()])
    elif tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    # Kernels with and without a graph may round otherwise: by some units in the last place.
    rounding = torch.finfo(tensor.dtype).eps ** 0.75 if tensor.is_floating_point() else 0.0
    wide = torch.float32 if tensor.dtype in _NARROW else torch.float64
    flat = tensor.reshape(-1).to(wide)
    num_rows = -(-flat.numel() // _CLASSES)
    rows = torch.nn.functional.pad(flat, (0, num_rows * _CLASSES - flat.numel()))
    coins = torch.randint(0, 2, (num_rows,), generator=torch.Generator().manual_seed(num_rows))
    signs = (2 * coins - 1).to(rows)
    return signs @ rows.view(num_rows, _CLASSES), rounding
