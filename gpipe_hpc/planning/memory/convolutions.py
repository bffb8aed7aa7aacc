"""What convolutions on the host take within one operator, of which no tensor is seen.

torch hands those in 32 and 16 bits to oneDNN, which works on copies in blocks of channels: of the
input, the weight and the output, or their gradients. Those in 64 bits are products of a matrix
that holds each element of the input once for every place of the kernel; so are those in 16 bits on
processors without AVX-512, where their gradients are also summed in float32. Found with torch's
profiler (2.13): within a quarter for kernels of 3 x 3 to 7 x 7, strides, groups, one and three
dimensions, with one thread. Each thread more has one more gradient of a weight in 16 bits, in
float32. A processor with AMX takes up to twice as much in 16 bits, as its copies have channels
filled up to its tiles. Nothing is taken for kernels of one place where one thread works on few
samples; it is counted all the same, as the threads of a run are not known here.
"""

import math
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

_CHANNELS_LAST: Final = MappingProxyType({4: torch.channels_last, 5: torch.channels_last_3d})


def bytes_within(func: Any, args: Sequence[Any], result: Any) -> int:
    """Return the bytes that an operator takes beside its inputs and what it returns.

    0 for all but convolutions; torch's operators, called with tensors by position.
    """
    if func is torch.ops.aten.convolution.default:
        given, weight, is_transposed, groups = args[0], args[1], args[6], args[8]
        return _forward(given, weight, result, is_transposed=is_transposed, groups=groups)
    if func is torch.ops.aten.convolution_backward.default:
        came, given, weight, is_transposed, groups = *args[:3], args[7], args[9]
        return _backward(given, weight, came, is_transposed=is_transposed, groups=groups)
    return 0


def _forward(
    given: Tensor, weight: Tensor, output: Tensor, *, is_transposed: bool, groups: int
) -> int:
    if _is_a_product(given):
        columns = _columns(given, weight, output, is_transposed=is_transposed)
        return columns if groups == 1 else columns // groups + output.nbytes
    if _has_channels_last(given):
        return weight.nbytes
    copies = output.nbytes if is_transposed else 0
    return max(given.nbytes, output.nbytes) + weight.nbytes + copies


def _backward(
    given: Tensor, weight: Tensor, came: Tensor, *, is_transposed: bool, groups: int
) -> int:
    if _is_a_product(given):
        columns = _columns(given, weight, came, is_transposed=is_transposed)
        if is_transposed:
            columns //= max(1, len(given))  # one sample after the other
        elif groups > 1:
            columns = columns // groups + given.nbytes
        summed = 2 * came.nbytes // groups if given.element_size() == 2 else 0
        return max(columns, summed)
    if _has_channels_last(given):
        return 2 * weight.nbytes
    both = given.nbytes + came.nbytes
    if given.element_size() == 2:
        return both + 4 * weight.numel()  # the weight's gradient in float32
    return max(both, weight.nbytes)


def _is_a_product(given: Tensor) -> bool:
    """Say whether torch does a convolution of such an input as a product, on such a processor."""
    onednn: Any = torch.ops.mkldnn
    if given.dtype == torch.bfloat16:
        return not onednn._is_mkldnn_bf16_supported()
    if given.dtype == torch.float16:
        return not onednn._is_mkldnn_fp16_supported()
    return given.dtype == torch.float64


def _columns(given: Tensor, weight: Tensor, output: Tensor, *, is_transposed: bool) -> int:
    """Return the bytes of a matrix of all places that the kernel has, for all samples.

    0 where that is the input itself: a kernel of one place that is put everywhere.
    """
    if given.shape[2:] == output.shape[2:] and math.prod(weight.shape[2:]) == 1:
        return 0
    small, wide = (given, output) if is_transposed else (output, given)
    num_places = len(small) * math.prod(small.shape[2:]) * math.prod(weight.shape[2:])
    return num_places * wide.shape[1] * given.element_size()


def _has_channels_last(tensor: Tensor) -> bool:
    last = _CHANNELS_LAST.get(tensor.ndim)
    if last is None or tensor.is_contiguous():
        return False
    return tensor.is_contiguous(memory_format=last)
