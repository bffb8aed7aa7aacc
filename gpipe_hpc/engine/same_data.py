"""Check that the ranks of a replica get the same samples, by digests in the step's all-reduce.

The first rank uses inputs and the last one targets. If each shuffles on its own, inputs are paired
with targets of other samples. So the ranks with data add digests of their targets, or of their
inputs if not all have targets, with factors that make the sum 0 if all digests are equal.
"""

import logging
import math
import zlib
from collections import deque
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from gpipe_hpc.device.deferred import AsyncHostTensor
from gpipe_hpc.device.device import on_host
from gpipe_hpc.pytree import Nest, flatten
from gpipe_hpc.schedule import Placement

log = logging.getLogger("gpipe_hpc.pipeline")

NUM_DIGESTS: Final = 4
"""Numbers in the all-reduce: for targets and inputs a digest, and a count of ranks without it."""

_FIRST_STEPS: Final = 3
_EVERY: Final = 1000
_MOST_NUMBERS: Final = 2**14  # of a tensor, spread over all of it
_MOST_VALUES: Final = 2**10  # of values in a nest that are not tensors
_MOST_TEXT: Final = 2**10
_BITS: Final = 36  # sums of digests are exact in float64, for 2**17 ranks with data
_PLAIN: Final = (type(None), bool, int, float, complex, str, bytes)
_FACTORS: Final = (0x9E3779B97F4A7C15 - 2**64, 0x3C79AC492BA7B653, 0x1C69B3F74AC4AE35)


class SameData:
    """Computes digests of a rank's data in the first steps and then rarely, and checks the sums."""

    def __init__(self, placement: Placement, stage_rank: int) -> None:
        holders = {*placement.holders(0), *placement.holders(placement.num_stages - 1)}
        self._has_data = stage_rank in holders and len(holders) > 1
        self._weight = float(len(holders) - 1 if stage_rank == min(holders) else -1)
        self._needs_targets = stage_rank in placement.holders(placement.num_stages - 1)
        self._num_steps = 0
        self._is_due = self._is_said = False
        self._unread: deque[tuple[int, AsyncHostTensor]] = deque(maxlen=_FIRST_STEPS)

    def says(self, step: int, inputs: Nest, targets: Nest) -> Sequence[Tensor | float]:
        """Return this rank's `NUM_DIGESTS` numbers for a step; empty in most steps.

        `inputs`, `targets`: as passed by the caller. Does not wait for a device.
        """
        self._num_steps += 1
        is_first = self._num_steps <= _FIRST_STEPS
        self._is_due = self._has_data and (is_first or step % _EVERY == 0)
        if not self._is_due:
            return ()
        # Inputs are compared only if other ranks have the targets.
        lacks_pair = inputs is None or (self._needs_targets and targets is None)
        return (*self._digested(targets, targets is None), *self._digested(inputs, lacks_pair))

    def note(self, step: int, sums: AsyncHostTensor) -> None:
        """Store the sums of a step over all ranks, to be checked when a loss is read."""
        if self._is_due and not self._is_said:
            self._unread.append((step, sums))

    @property
    def is_waiting(self) -> bool:
        """Return whether there are sums that have not been checked yet."""
        return bool(self._unread)

    def judge(self) -> None:
        """Warn, once, if ranks of a replica got different data."""
        # Only sums that have arrived on the host: reading later ones would wait for the device.
        while self._unread and (sums := self._unread[0][1].poll()) is not None:
            step, _ = self._unread.popleft()
            differing = _differing(sums.tolist())
            if differing and not self._is_said:
                self._is_said = True
                log.warning(
                    "step %d: ranks of one replica got different %s, so outputs are compared with "
                    "targets of other samples. Use the same order on all ranks: DataLoader(..., "
                    "shuffle=True, generator=torch.Generator().manual_seed(seed)), and select this "
                    "replica's part with pipe.share, not with a DistributedSampler over all ranks. "
                    "A rank without pipe.needs_inputs or pipe.needs_targets may pass None for them",
                    step,
                    differing,
                )

    def _digested(self, nest: Nest, is_missing: bool) -> tuple[Tensor | float, float]:
        return (0.0, 1.0) if is_missing else (digest(nest) * self._weight, 0.0)


def _differing(sums: Sequence[float]) -> str | None:
    targets, lack_targets, inputs, lack_inputs = sums
    if not lack_targets:
        return "targets" if targets else None
    return "inputs" if inputs and not lack_inputs else None


def digest(nest: Nest) -> Tensor | float:
    """Return an integer below 2**36 that depends on the values of a nest and their order.

    Equal nests have equal digests on any device and in any precision from float32 up. Only some
    elements of a large tensor are read. If tensors are on an accelerator, the digest is a float64[]
    on that device.
    """
    leaves, _ = flatten(nest)
    known = len(leaves)
    on_device: Tensor | None = None
    texts: list[str] = []
    for index, leaf in enumerate(leaves):
        found = _mixed(leaf)
        if found is None:
            texts += [_text(leaf)] if len(texts) < _MOST_VALUES else []
            continue
        factor = 2 * index + 1
        known += zlib.crc32(repr(tuple(leaf.shape)).encode()) * factor
        if on_host(found):
            known += int(found) * factor
        elif on_device is None:
            on_device = found * factor
        elif on_device.device == found.device:
            on_device += found * factor
    known += zlib.crc32("\0".join(texts).encode(errors="replace")) * _FACTORS[1]
    known = (known + 2**63) % 2**64 - 2**63
    mask = 2**_BITS - 1
    if on_device is None:
        return float(known >> 64 - _BITS & mask)
    return torch.bitwise_and(on_device + known >> 64 - _BITS, mask).to(torch.float64)


def _text(value: object) -> str:
    """Return a text of bounded length that is equal on all ranks for equal values."""
    if isinstance(value, str | bytes):
        return repr(value[:_MOST_TEXT])
    return repr(value) if isinstance(value, _PLAIN) else type(value).__qualname__


def _mixed(leaf: object) -> Tensor | None:
    """Return int64[], a hash of some elements of a tensor or array and their positions.

    None for any other value.
    """
    try:
        with torch.no_grad():
            numbers = _integers(leaf)
            if numbers is None:
                return None
            place = _counting(numbers, len(numbers)) * _FACTORS[0]
            weights = (place ^ (place >> 29)) * _FACTORS[1] | 1
            numbers = numbers * _FACTORS[2]
            # Mix high bits into low ones, as floats with few digits differ in high bits only.
            return ((numbers ^ (numbers >> 32 & 2**32 - 1)) * weights).sum()
    except (RuntimeError, TypeError, ValueError):  # a kind of tensor without these operators
        return None


def _integers(leaf: object) -> Tensor | None:
    """Return the bits of some elements as int64[n], spread over samples and features.

    Elements are converted to float32, so that data in another precision has the same digest.
    """
    if isinstance(leaf, np.ndarray):
        step = _stride(leaf.size, len(leaf)) if leaf.ndim else 1
        some = np.ascontiguousarray(leaf.flat[::step])
        own = torch.from_numpy(some.astype(some.dtype.newbyteorder("=")))
        return _as_float32(torch.view_as_real(own) if own.is_complex() else own)
    if not isinstance(leaf, Tensor) or type(leaf) not in (Tensor, torch.nn.Parameter):
        return None
    if leaf.layout is not torch.strided or leaf.is_meta or leaf.is_quantized or leaf.is_nested:
        return None
    step = _stride(leaf.numel(), len(leaf)) if leaf.dim() else 1
    numbers = leaf.detach().resolve_conj().resolve_neg()
    numbers = torch.view_as_real(numbers) if numbers.is_complex() else numbers
    width = numbers.numel() // max(1, leaf.numel())  # a complex number has two
    bits = _bits(numbers)  # elements of any dtype can be taken
    bits = bits.view(-1, width) if bits.is_contiguous() else bits
    if bits.is_contiguous():
        some_bits = bits[::step].flatten()
    else:
        first = (_counting(bits, -(-leaf.numel() // step)) - 1) * (step * width)
        some_bits = bits.take(torch.stack([first + i for i in range(width)], 1).flatten())
    return _as_float32(some_bits.view(numbers.dtype))


def _as_float32(numbers: Tensor) -> Tensor:
    return numbers.flatten().to(torch.float32).view(torch.int32).long()


def _counting(tensor: Tensor, count: int) -> Tensor:
    """Return the integers 1 to `count` on the device of a tensor."""
    return tensor.new_ones(count, dtype=torch.int64).cumsum(0)


def _stride(num_elements: int, num_samples: int) -> int:
    """Return the step between sampled elements, which does not divide the size of a sample."""
    step = num_elements // _MOST_NUMBERS
    if step <= 1:
        return 1
    width = max(1, num_elements // max(1, num_samples))
    step |= 1
    while math.gcd(step, width) != 1:
        step += 2
    return step


def _bits(tensor: Tensor) -> Tensor:
    kinds = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
    return tensor.view(kinds[tensor.itemsize])
