"""Gradient compressors: no value is lost, replicas get the same bits, bytes are counted."""

import math

import pytest
import torch

from gpipe_hpc import run_on_threads
from gpipe_hpc.data_parallel import BucketItem
from gpipe_hpc.data_parallel.compressors import (
    QSGD,
    QSGD_GROUP,
    BFloat16,
    Float16,
    make_compressor,
)
from gpipe_hpc.errors import ConfigError
from gpipe_hpc.settings import Outer
from tests.support import choices_of

SHAPES = [(20, 30), (30,), (8, 4, 4), (1,), (600,)]
NAMES = choices_of(Outer, "compress")[1:]


def items_of(shapes):
    items, start = [], 0
    for number, shape in enumerate(shapes):
        stop = start + math.prod(shape)
        items.append(BucketItem(f"layers.{number}.weight", torch.Size(shape), start, stop))
        start = stop
    return tuple(items), start


def summed(outer, owns, shapes=SHAPES, steps=1):
    """Return for each replica (result, residual, bytes sent) of the last of `steps` sums."""
    items, _ = items_of(shapes)

    def body(world):
        group = world.group([tuple(range(world.size))])
        compressor = make_compressor(outer)
        for step in range(steps):
            own = owns[world.rank].clone()
            before = group.sent.num_bytes
            result = compressor.sum(own, group, items, 7 * step + world.rank)
        return result, own, group.sent.num_bytes - before

    return run_on_threads(len(owns), body)


def draw(copies, shapes=SHAPES, dtype=torch.float32, scale=1.0):
    _, count = items_of(shapes)
    generator = torch.Generator().manual_seed(3)
    return [
        scale * torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)
        for _ in range(copies)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("copies", [2, 3, 4])
@pytest.mark.parametrize("name", NAMES)
def test_result_plus_residuals_equals_exact_sum(name, copies, dtype):
    owns = draw(copies, dtype=dtype)
    found = summed(Outer(compress=name, topk_fraction=0.05), owns)
    results = [result for result, _, _ in found]
    assert all(torch.equal(results[0], each) for each in results), "copies differ"
    residual = sum(own.double() for _, own, _ in found)
    exact = sum(own.double() for own in owns)
    near = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(results[0].double() + residual, exact, rtol=0, atol=near)
    assert residual.abs().max() > 1e-4, "the data is compressed without loss, so this tests nothing"
    assert results[0].norm() > 0.05 * exact.norm()


@pytest.mark.parametrize("scale", [1e-300, 1e-69, 1e69, 1e300])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "bfloat16"])
def test_float64_values_outside_float32_range_are_summed(name, scale):
    """Regression: QSGD turned 1e69 into NaN, float16 into inf. bfloat16 has float32's range."""
    owns = draw(2, dtype=torch.float64, scale=scale)
    found = summed(Outer(compress=name, topk_fraction=0.05), owns)
    whole = (owns[0] + owns[1]) / scale
    residual = sum(own for _, own, _ in found) / scale
    torch.testing.assert_close(found[0][0] / scale + residual, whole, rtol=0, atol=1e-9)
    assert (found[0][0] / scale).norm() > 0.05 * whole.norm()


def test_topk_sends_the_largest_values_and_keeps_the_rest_exactly():
    """Each number is either sent or kept, so none is rounded."""
    owns = draw(3)
    found = summed(Outer(compress="topk", topk_fraction=0.1), owns)
    for (_, residual, _), own in zip(found, owns, strict=True):
        kept = residual != 0
        assert torch.equal(residual[kept], own[kept])
        assert own[~kept].abs().min() >= own[kept].abs().max()


@pytest.mark.parametrize("copies", [2, 3, 4])
def test_sent_bytes_match_theory(copies):
    owns = draw(copies)
    count = owns[0].numel()

    def sent(**outer):
        return [num_bytes for _, _, num_bytes in summed(Outer(**outer), owns)]

    shards = [count // copies + (each < count % copies) for each in range(copies)]
    for rank, own in enumerate(shards):
        others = count - own
        assert sent(compress="bfloat16")[rank] == 2 * (others + (copies - 1) * own)
        assert sent(compress="float16")[rank] == (
            2 * (others + (copies - 1) * own) + 4 * 2 * (copies - 1)
        )
        groups = [math.ceil(each / QSGD_GROUP) for each in shards]
        coded = sum(groups) - groups[rank] + (copies - 1) * groups[rank]
        assert sent(compress="qsgd")[rank] == coded * (QSGD_GROUP // 2 + 4)
        assert sent(compress="qsgd", qsgd_levels=127)[rank] == coded * (QSGD_GROUP + 4)
    chosen = math.ceil(0.01 * count)
    assert sent(compress="topk") == [(copies - 1) * chosen * 8] * copies
    # Rank-2 factors of matrices 20 x 30 and 8 x 16: first P and all vectors, then Q.
    first, then = 2 * (20 + 8) + 30 + 1 + 600, 2 * (30 + 16)
    total = sum(sent(compress="powersgd", powersgd_rank=2))
    assert total == 2 * (copies - 1) * 4 * (first + then)


def test_powersgd_is_exact_for_matrices_of_its_rank():
    """After the first step, Q spans the rows of the sum, so no part of a rank-2 matrix is lost."""
    shapes = [(40, 25)]
    generator = torch.Generator().manual_seed(5)
    left, right = (torch.randn(n, 2, generator=generator) for n in (40, 25))
    owns = [((left * scale) @ right.T).reshape(-1) for scale in (1.0, 2.0)]
    found = summed(Outer(compress="powersgd", powersgd_rank=2), owns, shapes, steps=2)
    torch.testing.assert_close(found[0][0], sum(owns), rtol=1e-4, atol=1e-4)


def test_powersgd_recovers_from_zero_and_nan_gradients():
    items, count = items_of([(40, 25)])

    def body(world):
        group = world.group([(0, 1)])
        compressor = make_compressor(Outer(compress="powersgd"))
        for own in (torch.ones(count), torch.zeros(count), torch.full((count,), torch.nan)):
            compressor.sum(own, group, items, 0)
        return compressor.sum(torch.ones(count), group, items, 0)

    for result in run_on_threads(2, body):
        torch.testing.assert_close(result, torch.full((count,), 2.0))


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1.0, 1e12, 1e30])
def test_float16_neither_overflows_nor_underflows(scale):
    owns = draw(2, scale=scale)
    found = summed(Outer(compress="float16"), owns)
    whole = sum(owns)
    assert torch.isfinite(found[0][0]).all()
    assert (found[0][0] - whole).norm() <= 1e-3 * whole.norm()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_non_finite_gradient_gives_non_finite_result(name, bad):
    """Otherwise no replica would detect an overflow on another one."""
    owns = draw(2)
    owns[1][17] = bad
    for result, _, _ in summed(Outer(compress=name), owns):
        assert not torch.isfinite(result).all()


def test_qsgd_rounding_is_unbiased_and_repeatable():
    code = QSGD(7)
    numbers = torch.linspace(-1, 1, 300)
    drawn = torch.stack(
        [code.decode(code.encode(numbers, key), 300, torch.float64) for key in range(400)]
    )
    assert (drawn.mean(0) - numbers).abs().max() < 4 * 0.5 / 7 / math.sqrt(400)
    assert torch.equal(drawn[0], code.decode(code.encode(numbers, 0), 300, torch.float64))
    assert len(drawn[0].unique()) <= 2 * 15


@pytest.mark.parametrize("levels", [7, 8, 127])
def test_qsgd_error_is_smaller_than_the_gradient(levels):
    """Otherwise residuals would grow. The worst case is one large number among small ones."""
    code = QSGD(levels)
    for small in (0.0, 0.01, 0.03, 0.05, 0.07, 0.2):
        numbers = torch.full((QSGD_GROUP,), small)
        numbers[0] = 1.0
        lost = [
            (numbers - code.decode(code.encode(numbers, key), QSGD_GROUP, torch.float32))
            .square()
            .sum()
            for key in range(100)
        ]
        assert torch.stack(lost).mean() < 0.75 * numbers.square().sum()


@pytest.mark.parametrize("code", [Float16(), QSGD(7), QSGD(100)])
@pytest.mark.parametrize("count", [0, 1, 255, 256, 257])
def test_encoded_size_equals_num_bytes(code, count):
    numbers = torch.randn(count)
    coded = code.encode(numbers, 1)
    assert coded.numel() == code.num_bytes(count)
    assert code.decode(coded, count, torch.float32).shape == (count,)
    zeros = torch.zeros(count)
    assert torch.equal(code.decode(code.encode(zeros, 1), count, torch.float32), zeros)


@pytest.mark.parametrize("name", NAMES)
def test_more_replicas_than_elements_are_summed(name):
    owns = [torch.full((1,), float(rank + 1)) for rank in range(3)]
    for result, _, _ in summed(Outer(compress=name, topk_fraction=0.5), owns, [(1,)]):
        torch.testing.assert_close(result, torch.tensor([6.0]))


@pytest.mark.parametrize(
    "setting",
    [{"topk_fraction": 0.0}, {"topk_fraction": 0.6}, {"powersgd_rank": 0}, {"qsgd_levels": 6}],
)
def test_invalid_compressor_setting_is_rejected_by_name(setting):
    (name,) = setting
    with pytest.raises(ConfigError, match=rf"bad outer\.{name}, expected"):
        Outer(compress=name.partition("_")[0], **setting).checked()


def test_unknown_compressor_error_lists_known_ones():
    with pytest.raises(ConfigError, match=r"none, bfloat16, float16, powersgd, topk, qsgd.*gzip"):
        Outer(compress="gzip").checked()


def test_replica_adds_its_own_shard_unencoded():
    """Otherwise each element would be rounded once more."""
    owns = [torch.full((4,), 1 + 2**-10) for _ in range(2)]
    result, residual, _ = summed(Outer(compress="bfloat16"), owns, [(4,)])[0]
    assert isinstance(make_compressor(Outer(compress="bfloat16")), BFloat16)
    assert torch.equal(result, torch.full((4,), 2.0))
    assert torch.equal(residual, torch.tensor([2**-10] * 4))
