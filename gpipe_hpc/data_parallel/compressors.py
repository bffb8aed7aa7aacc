"""Compressors: sum flat tensors over replicas with less communication.

    bfloat16, float16, qsgd   numbers encoded in fewer bits, summed by `CodedAllReduce`
    topk                      the numbers of largest magnitude and their indices
    powersgd                  low-rank factors of matrices

All replicas get the same bits. Each keeps its compression error: see `compression`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Final, Protocol
from zlib import crc32

import torch

from gpipe_hpc.comm.collectives.group import Group
from gpipe_hpc.comm.collectives.plan import even_counts
from gpipe_hpc.comm.collectives.planned import start_ring_all_reduce
from gpipe_hpc.comm.transport.wire import as_bytes
from gpipe_hpc.data_parallel.layout import BucketItem
from gpipe_hpc.errors import ModelError
from gpipe_hpc.models import mix64
from gpipe_hpc.settings import Outer


class Compressor(Protocol):
    """Sums flat tensors over the replicas of a stage in fewer bytes."""

    def sum(
        self, own: torch.Tensor, group: Group, items: Sequence[BucketItem], key: int
    ) -> torch.Tensor:
        """Return an approximate sum of every replica's `own`, as a new tensor.

        All replicas get the same bits. On return, `own` contains this replica's compression error:
        the errors of all replicas and the result add up to the exact sum. All replicas call this in
        the same order, possibly on a background thread.

        Args:
            own: The bucket of this replica, float32[n] or float64[n].
            group: The replicas.
            items: The parameters in the bucket.
            key: Random seed, different for each replica, step and bucket (0 <= key < 2**63).
        """

    def state(self) -> Mapping[str, torch.Tensor]:
        """Return the tensors kept between steps, equal on all replicas, by parameter name."""
        return {}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore the tensors of `state` from a checkpoint."""
        return None


class CodedAllReduce(Compressor, Protocol):
    """All-reduce that exchanges encoded shards and all-gathers the encoded sums.

    Subclasses define the encoding: `num_bytes`, `encode`, `decode`.

    Numbers are encoded twice: when they are sent to the replica that sums a shard, and as the sum
    of that shard. The sender keeps the error of the first encoding, the summing replica that of the
    second. A rank sends 2 (n-1) shards of 1/n of the numbers, like a ring all-reduce; n is the
    number of replicas. If replicas are not all connected, others forward the encoded shards. Sums
    are in float32 or wider.
    """

    def num_bytes(self, count: int) -> int:
        """Return the size in bytes of `count` encoded numbers; 0 for 0."""

    def encode(self, numbers: torch.Tensor, key: int) -> torch.Tensor:
        """Return float[n] encoded as uint8[num_bytes(n)]; `key` is the random seed."""

    def decode(self, code: torch.Tensor, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the decoded numbers, float[count] of `dtype`."""

    def sum(
        self, own: torch.Tensor, group: Group, items: Sequence[BucketItem], key: int
    ) -> torch.Tensor:
        """Return the sum of the decoded numbers; see `Compressor`."""
        size, position, dtype = group.size, group.position, own.dtype
        counts = even_counts(own.numel(), size)
        shards = torch.split(own, list(counts))
        sizes = [self.num_bytes(count) for count in counts]
        codes = torch.empty(sum(sizes), dtype=torch.uint8, device=own.device)
        parts = torch.split(codes, sizes)
        for at in range(size):
            if at != position:
                coded = self.encode(shards[at], _mix_key(key, at))
                parts[at].copy_(coded)
                shards[at].sub_(self.decode(coded, counts[at], dtype))
        received = group.all_to_all(codes, sizes)
        total = torch.zeros_like(shards[position])
        for at in range(size):
            is_own = at == position
            # Decoders read whole words; a part of a message may be unaligned, its copy is not.
            total += shards[at] if is_own else self.decode(received[at].clone(), len(total), dtype)
        parts[position].copy_(self.encode(total, _mix_key(key, size)))
        group.all_gather(codes, sizes)
        numbered = zip(parts, counts, strict=True)
        result = torch.cat([self.decode(part.clone(), n, dtype) for part, n in numbered])
        torch.sub(total, torch.split(result, list(counts))[position], out=shards[position])
        return result


def _mix_key(key: int, number: int) -> int:
    return mix64(mix64(key) + number & 2**64 - 1) >> 1


class BFloat16(CodedAllReduce):
    """All-reduce in bfloat16: half the bytes of float32, its range, 8 bits of precision."""

    def num_bytes(self, count: int) -> int:
        """Return two bytes per number."""
        return 2 * count

    def encode(self, numbers: torch.Tensor, key: int) -> torch.Tensor:
        """Return the numbers rounded to nearest."""
        return as_bytes(numbers.to(torch.bfloat16))

    def decode(self, code: torch.Tensor, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the decoded numbers."""
        return code.view(torch.bfloat16).to(dtype)


_SCALE_BYTES: Final = 4
_TOP_EXPONENT: Final = 15  # the largest number is at least 2 ** 14 and below 2 ** 15
# Powers of two that the numbers' own dtype can hold, as can their inverses.
_MAX_SHIFT: Final = 120
_MAX_SHIFT_OF_DOUBLE: Final = 1000


class Float16(CodedAllReduce):
    """All-reduce in float16: half the bytes of float32, with 11 bits of precision.

    The range of float16 is small: 6e-8 to 65504. So each message is multiplied by a power of two
    that brings its largest number near the top of the range; the exponent is sent first. Nothing
    overflows, and numbers that underflow remain in the compression error.
    """

    def num_bytes(self, count: int) -> int:
        """Return two bytes per number, and four for the exponent."""
        return 2 * count + _SCALE_BYTES if count else 0

    def encode(self, numbers: torch.Tensor, key: int) -> torch.Tensor:
        """Return the exponent and the scaled numbers, rounded to nearest.

        Infinities and NaN are preserved.
        """
        if not numbers.numel():
            return numbers.new_empty(0, dtype=torch.uint8)
        largest = numbers.abs().amax()
        _, exponent = torch.frexp(largest)
        has_scale = torch.isfinite(largest) & (largest > 0)
        most = _MAX_SHIFT_OF_DOUBLE if numbers.dtype == torch.float64 else _MAX_SHIFT
        shift = torch.where(has_scale, (_TOP_EXPONENT - exponent).clamp(-most, most), 0).int()
        scaled = _times_power_of_two(numbers, shift).to(torch.float16)
        return torch.cat([as_bytes(shift), as_bytes(scaled)])

    def decode(self, code: torch.Tensor, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the decoded numbers with the original scale."""
        if not count:
            return code.new_empty(0, dtype=dtype)
        shift = code[:_SCALE_BYTES].view(torch.int32)
        return _times_power_of_two(code[_SCALE_BYTES:].view(torch.float16).to(dtype), -shift)


def _times_power_of_two(numbers: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    # Not `ldexp`, which takes the power of two in float32, whatever the numbers are.
    return numbers * _power_of_two(exponent).to(numbers.dtype)


_FLOAT64_BIAS: Final = 1023  # of the exponent
_FLOAT64_FRACTION_BITS: Final = 52


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """Return 2 ** exponent as float64, for exponents from -1022 to 1023.

    The bits are set directly: `torch.ldexp` multiplies by `torch.pow(2, n)` in float32, which a
    device may round.
    """
    bits = (exponent.to(torch.int64) + _FLOAT64_BIAS) << _FLOAT64_FRACTION_BITS
    return bits.view(torch.float64)


QSGD_GROUP: Final = 256
_LEVELS_OF_4_BITS: Final = 7  # two numbers in a byte
_EXPONENT_SHIFT: Final = 2048  # more than any exponent of float64
_MAX_EXPONENT: Final = 1023  # of a power of two that float64 can hold
_TINY, _HUGE = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


class QSGD(CodedAllReduce):
    """QSGD: numbers rounded stochastically to 2 s + 1 levels (Alistarh et al., arXiv 1610.02132).

    Legend: d numbers of a group, s levels, u uniform in [0, 1), m the largest magnitude of the
    group.

    A number x becomes ``sign(x) floor(|x| / m * s + u)``, an integer from -s to s; m is sent, too.
    (The paper divides by the 2-norm of the group, or by m, which has less error.) The expected
    value of the decoded number is x. A group loses at most ``sqrt(d) / (2 s) - 1/2`` of its squared
    norm. For d = 256 this is less than 1 from s = 7 on, so that error feedback stays bounded. A
    level takes 4 bits for s = 7, otherwise 8.

    m is sent as float32. A float64 m outside the range of float32 is replaced by the next power of
    two, sent as -(exponent + 2048).
    """

    def __init__(self, levels: int) -> None:
        self._levels = levels
        self._per_byte = 2 if levels <= _LEVELS_OF_4_BITS else 1

    def num_bytes(self, count: int) -> int:
        """Return 4 or 8 bits per number in whole groups, and four bytes per group."""
        num_groups = -(-count // QSGD_GROUP)
        return num_groups * (QSGD_GROUP // self._per_byte + 4)

    def encode(self, numbers: torch.Tensor, key: int) -> torch.Tensor:
        """Return the largest magnitude of each group, then the levels."""
        count, device = numbers.numel(), numbers.device
        num_groups = -(-count // QSGD_GROUP)
        padded = numbers.new_zeros(num_groups * QSGD_GROUP)
        padded[:count] = numbers
        groups = padded.view(num_groups, QSGD_GROUP)
        sent = _encode_largest(groups.abs().amax(1, keepdim=True) if count else groups[:, :1])
        largest = _decode_largest(sent, numbers.dtype)
        generator = torch.Generator(device).manual_seed(key)
        chance = torch.rand(groups.shape, generator=generator, device=device)
        # Below s + 1 even if u is nearly 1; the largest of a group is exact.
        share = (groups / torch.where(largest > 0, largest, 1)).abs_().mul_(self._levels)
        level = share.add_(chance).floor_().clamp_(max=self._levels).copysign_(groups)
        shifted = level.add_(self._levels).to(torch.uint8).view(-1)
        if self._per_byte == 2:
            shifted = shifted[0::2] | shifted[1::2] << 4
        return torch.cat([as_bytes(sent), shifted])

    def decode(self, code: torch.Tensor, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the decoded numbers."""
        num_groups = -(-count // QSGD_GROUP)
        largest = _decode_largest(code[: 4 * num_groups].view(torch.float32).view(-1, 1), dtype)
        shifted = code[4 * num_groups :]
        if self._per_byte == 2:
            shifted = torch.stack([shifted & 15, shifted >> 4], 1)
        level = shifted.view(num_groups, QSGD_GROUP).to(dtype).sub_(self._levels)
        return level.mul_(largest / self._levels).view(-1)[:count].contiguous()


def _encode_largest(largest: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude of each group in the format that is sent, float32[groups, 1]."""
    _, exponent = torch.frexp(largest)
    exponent = exponent.clamp(max=_MAX_EXPONENT)
    is_held = (largest == 0) | ((largest >= _TINY) & (largest <= _HUGE))
    fits = is_held | ~torch.isfinite(largest)
    shifted = -(exponent + _EXPONENT_SHIFT).to(torch.float32)
    sent = torch.where(fits, largest.to(torch.float32), shifted)
    return sent.contiguous()


def _decode_largest(sent: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Decode the result of `_encode_largest`: the largest magnitudes, or nearby powers of two."""
    wide = sent.to(dtype)
    return torch.where(sent < 0, torch.exp2(-wide - _EXPONENT_SHIFT), wide)


class TopK(Compressor):
    """Sends a fraction of the numbers in a bucket, those of largest magnitude.

    A number takes 4 bytes (8 in float64) and its index 4. Each replica receives the numbers of all
    others and adds them. Sources: Aji and Heafield, Sparse communication for distributed gradient
    descent, 2017; Lin et al., Deep gradient compression, 2018 (without its momentum correction,
    masking and warm-up).
    """

    def __init__(self, fraction: float) -> None:
        self._fraction = fraction

    def sum(
        self, own: torch.Tensor, group: Group, items: Sequence[BucketItem], key: int
    ) -> torch.Tensor:
        """Return the sum of the selected numbers, added in rank order; see `Compressor`."""
        count = own.numel()
        assert count < 2**31, f"a bucket of {count} numbers needs longer indices"
        kept = min(count, math.ceil(self._fraction * count))
        chosen = own.abs().topk(kept, sorted=False).indices.sort().values
        message = torch.cat([as_bytes(chosen.to(torch.int32)), as_bytes(own[chosen])])
        total = torch.zeros_like(own)
        sizes = [message.numel()] * group.size
        gathered = message.repeat(group.size)
        group.all_gather(gathered, sizes)
        for each in torch.split(gathered, sizes):
            places, values = each[: 4 * kept].clone().view(torch.int32), each[4 * kept :]
            # A replica sends each index once, so the result does not depend on their order.
            total.index_add_(0, places, values.clone().view(own.dtype))
        own[chosen] = 0
        return total


class PowerSGD(Compressor):
    """Sums low-rank approximations of matrices (Vogels et al., 2019, arXiv 1905.13727).

    Legend: M a gradient as a matrix of n rows (its first dimension) and m columns, r its rank.

    Each replica multiplies its M by Q (m x r, equal on all replicas). The products are summed and
    orthonormalised: P (n x r). The sum of ``M^T P`` over replicas is the next Q, with which the
    next step starts. ``P Q^T`` is the sum of the projections of all M onto the columns of P. A
    replica keeps its error ``M - P P^T M``.

    ``r (n + m)`` numbers are all-reduced for a matrix. Vectors, and matrices that factors would not
    shorten, are summed uncompressed. The ring all-reduce gives the same bits on all replicas; P is
    computed on each, so all replicas must have the same kind of hardware.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._starts: dict[str, torch.Tensor] = {}

    def sum(
        self, own: torch.Tensor, group: Group, items: Sequence[BucketItem], key: int
    ) -> torch.Tensor:
        """Return the low-rank approximation of the sum; see `Compressor`."""
        matrices = [item for item in items if self._rank_of(item)]
        whole = [item for item in items if not self._rank_of(item)]
        starts = [self._start(item, own) for item in matrices]
        products = [_matrix(own, i) @ start for i, start in zip(matrices, starts, strict=True)]
        vectors = [own[item.start : item.stop] for item in whole]
        summed = _ring_sum([*products, *vectors], group)
        sides = [torch.linalg.qr(each).Q for each in summed[: len(matrices)]]
        mine = [_matrix(own, item).T @ side for item, side in zip(matrices, sides, strict=True)]
        others = _ring_sum(mine, group)
        total = torch.zeros_like(own)
        for item, vector in zip(whole, summed[len(matrices) :], strict=True):
            total[item.start : item.stop] = vector
            own[item.start : item.stop] = 0
        for item, side, part, both in zip(matrices, sides, mine, others, strict=True):
            torch.mm(side, both.T, out=_matrix(total, item))
            _matrix(own, item).sub_(side @ part.T)
            # The next step cannot start from gradients of zeros, or from an overflow.
            is_good = torch.isfinite(both).all() & (both != 0).any()
            self._starts[item.name] = torch.where(is_good, both, self._start(item, own))
        return total

    def state(self) -> Mapping[str, torch.Tensor]:
        """Return Q of each matrix, by parameter name."""
        return self._starts

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Set the Q of each matrix with which the next step starts."""
        self._starts = dict(state)

    def _rank_of(self, item: BucketItem) -> int:
        """Return the number of columns of a parameter's factors; 0 if it is summed uncompressed."""
        if len(item.shape) < 2:
            return 0
        rows, columns = item.shape[0], item.shape[1:].numel()
        rank = min(self._rank, rows, columns)
        return rank if rank * (rows + columns) < rows * columns else 0

    def _start(self, item: BucketItem, like: torch.Tensor) -> torch.Tensor:
        """Return Q for the next step: the stored one, or random numbers equal on all replicas."""
        shape = (item.shape[1:].numel(), self._rank_of(item))
        kept = self._starts.get(item.name)
        if kept is None or kept.shape != shape:
            generator = torch.Generator().manual_seed(crc32(item.name.encode()))
            kept = torch.randn(shape, generator=generator, dtype=torch.float64)
        return kept.to(like)


def _matrix(flat: torch.Tensor, item: BucketItem) -> torch.Tensor:
    """Return a view of a parameter in a bucket's buffer, as a matrix with its first dimension."""
    return flat[item.start : item.stop].view(item.shape[0], -1)


def _ring_sum(parts: Sequence[torch.Tensor], group: Group) -> list[torch.Tensor]:
    """Return the sums of tensors over the group, with their shapes."""
    if not parts:
        return []
    flat = torch.cat([part.reshape(-1) for part in parts])
    start_ring_all_reduce(group, flat).wait()
    ends = [0]
    for part in parts:
        ends.append(ends[-1] + part.numel())
    return [
        flat[start:stop].view(part.shape)
        for part, (start, stop) in zip(parts, pairwise(ends), strict=True)
    ]


_MAKERS: Final[Mapping[str, Callable[[Outer], Compressor]]] = MappingProxyType(
    {
        "bfloat16": lambda outer: BFloat16(),
        "float16": lambda outer: Float16(),
        "powersgd": lambda outer: PowerSGD(outer.powersgd_rank),
        "topk": lambda outer: TopK(outer.topk_fraction),
        "qsgd": lambda outer: QSGD(outer.qsgd_levels),
    }
)


def make_compressor(outer: Outer) -> Compressor:
    """Return the compressor for ``outer.compress``."""
    return _MAKERS[outer.compress](outer)


def check_fits(compress: str, name: str, dtype: torch.dtype) -> None:
    """Raise ModelError for a parameter whose dtype the compressor does not support."""
    if compress == "none":
        return
    kind = str(dtype).removeprefix("torch.")
    if not dtype.is_floating_point:
        raise ModelError(
            f"outer.compress={compress} cannot compress {name} of {kind}, only real numbers; use "
            f"outer.compress=none"
        )
    if compress in ("bfloat16", "float16") and dtype.itemsize <= 2:
        raise ModelError(
            f"outer.compress={compress} sends 16 bits per number, which saves nothing for {name} "
            f"of {kind}; use outer.compress=none, qsgd, powersgd or topk"
        )
