"""Assignment of parameters to buckets, and of bucket elements to replicas."""

import pytest
import torch

from gpipe_hpc.data_parallel import FlatLayout, GradientSize, fill_buckets

SINGLE, DOUBLE = torch.float32, torch.float64


def named(*sizes, dtype=SINGLE):
    return {str(i): GradientSize(size, dtype) for i, size in enumerate(sizes)}


def test_buckets_are_filled_from_the_last_parameter_up_to_the_limit():
    """The backward pass computes the gradients of the last layers first."""
    assert fill_buckets(named(2, 2, 2, 2), 16) == (("3", "2"), ("1", "0"))
    assert fill_buckets(named(2, 2, 2, 2), 15) == (("3",), ("2",), ("1",), ("0",))


def test_oversized_parameter_gets_its_own_bucket():
    assert fill_buckets(named(1, 100, 1), 16) == (("2",), ("1",), ("0",))


def test_each_parameter_is_in_one_bucket_within_the_limit():
    sizes = named(*range(1, 60))
    for limit in (1, 40, 400, 1e9):
        buckets = fill_buckets(sizes, limit)
        assert sorted(name for names in buckets for name in names) == sorted(sizes)
        for names in buckets:
            assert len(names) == 1 or sum(sizes[name].num_bytes for name in names) <= limit


def test_buckets_have_one_dtype_and_are_ordered_by_completion():
    """Parameters of two dtypes are interleaved; the bucket that is complete last comes last."""
    sizes = {
        "a": GradientSize(1, SINGLE),
        "b": GradientSize(1, DOUBLE),
        "c": GradientSize(1, DOUBLE),
    }
    sizes["d"] = GradientSize(1, SINGLE)
    assert fill_buckets(sizes, 1e9) == (("c", "b"), ("d", "a"))


def test_stage_without_parameters_has_no_buckets():
    assert fill_buckets({}, 10) == ()


@pytest.mark.parametrize("num_elements", [1, 3, 4, 7, 100])
@pytest.mark.parametrize("copies", [1, 2, 3, 8])
def test_shards_cover_each_element_once(num_elements, copies):
    sizes = {"a": num_elements // 3, "b": num_elements - num_elements // 3, "c": 0}
    layout = FlatLayout(sizes, copies)
    length = layout.num_elements
    assert layout.padded_elements >= length >= num_elements
    assert layout.padded_elements - length < copies
    found = {name: [] for name in sizes}
    for position in range(copies):
        slices = list(layout.slices(position))
        assert sum(stop - start for _, start, stop in slices) <= layout.shard_elements
        for name, start, stop in slices:
            found[name] += range(start, stop)
    assert {name: list(range(size)) for name, size in sizes.items()} == found
