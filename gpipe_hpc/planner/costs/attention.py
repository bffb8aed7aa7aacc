"""Run attention and dropout on the meta device as fused kernels, to count memory and FLOPs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gpipe_hpc.torch_compat import operator

# Its shapes and saved tensors equal those of the fused kernels of other devices.
_FUSED: Final = operator("_scaled_dot_product_flash_attention_for_cpu")
_FUSED_BACKWARD: Final = operator("_scaled_dot_product_flash_attention_for_cpu_backward")


class FusedKernels(TorchFunctionMode):
    """Replace attention and dropout on the meta device by the fused kernels of a device.

    On the meta device torch has only the unfused kernels. Fused attention saves no score matrix; on
    CPUs it does not support dropout, for which torch uses the unfused kernel. Fused dropout, which
    CPUs lack, saves one byte per element.
    """

    def __init__(self, device_type: str) -> None:
        """Select the kernels of a device type, ``cpu`` or ``cuda``."""
        super().__init__()
        self._fuses_dropout = device_type != "cpu"

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one torch function; replace attention and dropout if the device would fuse them."""
        keywords = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **keywords)
        if func is F.dropout and self._fuses_dropout:
            return _drop(*args, **keywords)
        return func(*args, **keywords)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        query, key, value = map(_cast, (query, key, value))
        attn_mask = attn_mask if attn_mask is None else _cast(attn_mask)
        if self._fuses(query, key, value, attn_mask, dropout_p, enable_gqa):
            if attn_mask is not None and attn_mask.dtype == torch.bool:
                # As torch does: each call converts the mask to floats and saves them.
                attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
            fused: Tensor = _FUSED(
                query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale
            )[0]
            return fused
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )

    def _fuses(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        dropout: float,
        enable_gqa: bool,
    ) -> bool:
        """Return whether the device has a fused kernel for a call, by torch's rules.

        Source for CPUs: `use_flash_attention_cpp` of torch 2.13 (sdp_utils_cpp.cpp). On GPUs only
        the flash kernel supports grouped heads, with 16-bit types and no mask.
        """
        on_cpu = not self._fuses_dropout
        if query.ndim != 4 or key.ndim != 4 or value.ndim != 4 or (dropout > 0 and on_cpu):
            return False
        if mask is not None and (mask.ndim not in (2, 4) or mask.requires_grad):
            return False
        if not query.shape[-1] == key.shape[-1] == value.shape[-1]:
            return False
        if query.shape[1] != key.shape[1] or key.shape[1] != value.shape[1]:
            groups = enable_gqa and key.shape[1] == value.shape[1]
            if not groups or query.shape[1] % key.shape[1]:
                return False
            if not (on_cpu or (mask is None and query.dtype.itemsize == 2)):
                return False
        several = (query, key, value)
        return (
            query.shape[0] == key.shape[0] == value.shape[0]
            and all(each.shape[-2] > 0 for each in several)
            and all(each.stride(-1) == 1 for each in several)
        )


def _cast(tensor: Tensor) -> Tensor:
    """Cast an attention argument as autocast would, which does not handle the fused kernel."""
    kind = tensor.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return tensor
    casts = tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.to(torch.get_autocast_dtype(kind)) if casts else tensor


def _drop(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if inplace or not (training and 0 < p < 1):
        return F.dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, training)[0]


def _attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> int:
    """Return the FLOPs of both matrix products of attention; a causal mask does not reduce them."""
    return 2 * query[0] * query[1] * query[2] * key[2] * (query[3] + value[3])


def _forward_formula(
    query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any
) -> int:
    """Return the FLOPs of an attention forward from the shapes of its arguments."""
    return _attention_flops(query, key, value)


def _backward_formula(
    gradient: Sequence[int],
    query: Sequence[int],
    key: Sequence[int],
    value: Sequence[int],
    *_: Any,
    **__: Any,
) -> int:
    """Return the FLOPs of an attention backward: five matrix products, one for the scores."""
    scores = 2 * query[0] * query[1] * query[2] * key[2] * query[3]
    return 2 * _attention_flops(query, key, value) + scores


FLOP_FORMULAS: Final[Mapping[Any, Callable[..., int]]] = MappingProxyType(
    {_FUSED: _forward_formula, _FUSED_BACKWARD: _backward_formula}
)
