"""What convolutions on the host take within one operator, of which no tensor is seen.

torch hands those in 32 and 16 bits to oneDNN, which works on copies in blocks of channels: of the
input, the weight and the output, or their gradients. Those in 64 bits are products of a matrix
that holds each element of the input once for every place of the kernel. So are those in 16 bits
where oneDNN has no kernels for that type: for bfloat16 on processors without AVX-512, for float16
without AVX512-FP16 or AVX-NE-CONVERT. There their gradients are also summed in float32. Found with
torch's profiler (2.13): within a quarter for kernels of 1 x 1 to 7 x 7, strides, groups, dilation,
one and three dimensions, with one thread. Each thread more has one more gradient of a weight in
16 bits, in float32. A processor with AMX takes up to twice as much in 16 bits, as its copies have
channels filled up to its tiles. oneDNN takes nothing for kernels of one place where one thread
works on few samples; it is counted all the same, as the threads of a run are not known here.
"""

import math
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from gpipe_hpc.torch_compat import onednn_takes

_CHANNELS_LAST: Final = MappingProxyType({4: torch.channels_last, 5: torch.channels_last_3d})


def bytes_within(func: Any, args: Sequence[Any], result: Any) -> int:
    """Return the bytes that an operator takes beside its inputs and what it returns.

    0 for all but convolutions; torch's operators, called with tensors by position.
    """
    if func is torch.ops.aten.convolution.default:
        return _forward(args[0], args[1], result, _Way.of(args[3:9], args[1]))
    if func is torch.ops.aten.convolution_backward.default:
        return _backward(args[1], args[2], args[0], _Way.of(args[4:10], args[2]))
    return 0


class _Way(NamedTuple):
    """How a convolution goes over its input.

    `is_everywhere`: its kernel has one place, which is put on each of the input's, and no other:
    then the matrix of its product is the input.
    """

    is_transposed: bool
    is_dilated: bool
    is_everywhere: bool
    groups: int

    @classmethod
    def of(cls, args: Sequence[Any], weight: Tensor) -> "_Way":
        """Read it off the operator's arguments, from the stride to the groups."""
        stride, padding, dilation, is_transposed, _, groups = args
        is_everywhere = (
            math.prod(weight.shape[2:]) == 1
            and all(step == 1 for step in stride)
            and not any(padding)
        )
        return cls(is_transposed, any(step != 1 for step in dilation), is_everywhere, groups)


def _forward(given: Tensor, weight: Tensor, output: Tensor, way: _Way) -> int:
    if _is_a_product(given):
        one_by_one = way.is_dilated or (way.is_transposed and given.ndim == 5)
        columns = _columns(given, weight, output, way, one_by_one=one_by_one)
        if way.is_everywhere and not way.is_transposed:
            columns = 0
        return columns if way.groups == 1 else columns // way.groups + output.nbytes
    if _has_channels_last(given):
        return weight.nbytes
    copies = output.nbytes if way.is_transposed else 0
    return max(given.nbytes, output.nbytes) + weight.nbytes + copies


def _backward(given: Tensor, weight: Tensor, came: Tensor, way: _Way) -> int:
    if _is_a_product(given):
        one_by_one = way.is_dilated or way.is_transposed
        columns = _columns(given, weight, came, way, one_by_one=one_by_one)
        if way.is_everywhere and not way.is_transposed and way.groups == 1 and given.ndim < 5:
            columns = 0
        summed = 2 * came.nbytes // way.groups if given.element_size() == 2 else 0
        if way.groups > 1 and not way.is_transposed:
            return columns // way.groups + given.nbytes + summed
        return max(columns, summed)
    if _has_channels_last(given):
        return 2 * weight.nbytes
    both = given.nbytes + came.nbytes
    if given.element_size() == 2:
        return both + 4 * weight.numel()  # the weight's gradient in float32
    return max(both, weight.nbytes)


def _is_a_product(given: Tensor) -> bool:
    """Say whether torch does a convolution of such an input as a product, on such a processor."""
    onednn: Any = torch.backends.mkldnn
    if not onednn.is_available():
        return True
    if given.dtype in (torch.bfloat16, torch.float16):
        return not onednn_takes(given.dtype)
    return given.dtype == torch.float64


def _columns(given: Tensor, weight: Tensor, output: Tensor, way: _Way, *, one_by_one: bool) -> int:
    """Return the bytes of a matrix of all places that the kernel has, for one sample or all."""
    small, wide = (given, output) if way.is_transposed else (output, given)
    num_samples = min(1, len(small)) if one_by_one else len(small)
    num_places = num_samples * math.prod(small.shape[2:]) * math.prod(weight.shape[2:])
    return num_places * wide.shape[1] * given.element_size()


def _has_channels_last(tensor: Tensor) -> bool:
    last = _CHANNELS_LAST.get(tensor.ndim)
    if last is None or tensor.is_contiguous():
        return False
    return tensor.is_contiguous(memory_format=last)
