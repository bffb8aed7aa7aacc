"""The global gradient norm: one number, the same bits for every cut."""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn

from gpipe_hpc.comm.group import Group


def clip_by_global_norm(
    own: Mapping[str, nn.Parameter],
    counted: Collection[str],
    all_names: Sequence[str],
    max_norm: float,
    group: Group,
    device: torch.device,
) -> torch.Tensor:
    """Scale the gradients of `own` in place so that the norm over all stages is at most max_norm.

    Norms of single parameters are put in global order before they are combined, as
    `torch.nn.utils.clip_grad_norm_` does in one process: never per bucket or stage, which
    would change the last bit with the cut. A parameter held by several ranks is among `counted`
    on one of them. Returns the norm before clipping, a scalar tensor.
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
    total = _combine(norms, present)
    if max_norm < float("inf"):
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for gradient in gradients.values():
            gradient.mul_(factor.to(gradient.dtype))
    return total


def _combine(norms: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
    """Return the norm of the norms of those that have a gradient, in the model's precision."""
    kinds = present.tolist()
    if not any(kinds):
        return norms.new_zeros(())
    if not all(kinds):
        norms = norms[present.to(norms.device) > 0]
    if max(kinds) == 1:
        norms = norms.to(torch.float32)
    combined: torch.Tensor = torch.linalg.vector_norm(norms)
    return combined


def _norms(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    return list(torch._foreach_norm(gradients)) if gradients else []
