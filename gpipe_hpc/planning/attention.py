"""Attention on the meta device: which kernel a real device would take, and what that costs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

# Its shapes and what it keeps are those of the fused kernels of other devices, too.
_FUSED: Final = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FUSED_BACKWARD: Final = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class FusedAttention(TorchFunctionMode):
    """Take attention as the device would run it: on the meta device torch has the plain one alone.

    The fused kernels keep no matrix of scores. Those of CPUs know no dropout: torch falls back.
    """

    def __init__(self, device_type: str) -> None:
        """Follow the kernels of a type of device, cpu or cuda."""
        super().__init__()
        self._drops = device_type != "cpu"

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one torch function; attention by the fused kernel where that would take it."""
        keywords = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **keywords)
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
        fits = query.ndim == 4 and query.shape[:2] == key.shape[:2] == value.shape[:2]
        if fits and attn_mask is None and (dropout_p == 0 or self._drops):
            fused: Tensor = _FUSED(query, key, value, 0.0, is_causal, scale=scale)[0]
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


def _attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> int:
    """Return the FLOPs of the scores and of the sums by them; a causal half counts in full."""
    return 2 * query[0] * query[1] * query[2] * key[2] * (query[3] + value[3])


def _forward_formula(
    query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any
) -> int:
    """Return the FLOPs of a forward by the shapes of its arguments."""
    return _attention_flops(query, key, value)


def _backward_formula(
    gradient: Sequence[int],
    query: Sequence[int],
    key: Sequence[int],
    value: Sequence[int],
    *_: Any,
    **__: Any,
) -> int:
    """Return 5 products: the fused kernel computes the scores again, and four gradients."""
    scores = 2 * query[0] * query[1] * query[2] * key[2] * query[3]
    return 2 * _attention_flops(query, key, value) + scores


FLOP_FORMULAS: Final[Mapping[Any, Callable[..., int]]] = MappingProxyType(
    {_FUSED: _forward_formula, _FUSED_BACKWARD: _backward_formula}
)
