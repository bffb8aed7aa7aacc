"""Gradient buckets and the global norm."""

import pytest
import torch
from torch import nn

from gpipe_hpc.comm.group import SoloGroup
from gpipe_hpc.comm.threads import run_on_threads
from gpipe_hpc.engine.gradients import StageGradients, unite_flags
from gpipe_hpc.engine.norms import clip_by_global_norm

SOLO, CPU = SoloGroup(0), torch.device("cpu")
ONE = torch.tensor(1.0, dtype=torch.float64)


def parameters(*shapes, dtype=torch.float32):
    return {str(i): nn.Parameter(torch.ones(shape, dtype=dtype)) for i, shape in enumerate(shapes)}


def finish(gradients, group=SOLO):
    gradients.start_reduction(group)
    gradients.finish(ONE, unite_flags(gradients.used_flags(), group))


def test_gradients_of_one_dtype_lie_in_one_buffer():
    named = parameters((2, 3), (4,))
    gradients = StageGradients(named)
    gradients.clear()
    for parameter in named.values():
        for _ in range(2):
            parameter.square().sum().backward()
    finish(gradients)
    first, second = (p.grad for p in named.values())
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert first.shape == (2, 3) and torch.equal(first, torch.full((2, 3), 4.0))
    assert torch.equal(second, torch.full((4,), 4.0))


def test_each_dtype_has_a_bucket():
    named = parameters((2,)) | {"double": nn.Parameter(torch.ones(3, dtype=torch.float64))}
    gradients = StageGradients(named)
    gradients.clear()
    assert [len(bucket.parameters) for bucket in gradients.buckets] == [1, 1]
    named["double"].sum().backward()
    finish(gradients)
    assert named["0"].grad is None and named["double"].grad.dtype == torch.float64


def test_zero_gradient_is_used_and_no_gradient_is_none():
    named = parameters((2,), (2,))
    gradients = StageGradients(named)
    gradients.clear()
    (named["0"] * 0).sum().backward()
    finish(gradients)
    assert named["0"].grad.tolist() == [0.0, 0.0] and named["1"].grad is None


def test_gradient_that_a_hook_replaced_is_kept():
    named = parameters((2,))
    gradients = StageGradients(named)
    gradients.clear()
    named["0"].grad = torch.full((2,), 5.0)
    finish(gradients)
    assert named["0"].grad.tolist() == [5.0, 5.0]


def test_used_on_any_replica_is_used_on_all():
    def body(world):
        group = world.group([(0, 1)])
        named = parameters((2,), (2,), (2,))
        gradients = StageGradients(named)
        gradients.clear()
        named[str(world.rank)].sum().backward()
        finish(gradients, group)
        return [None if p.grad is None else p.grad.tolist() for p in named.values()]

    assert run_on_threads(2, body) == [[[1.0, 1.0], [1.0, 1.0], None]] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("cut", [1, 3, 6])
def test_norm_and_clipping_are_torchs_to_the_bit_for_every_cut(cut, dtype):
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(n + 1, generator=generator, dtype=dtype) for n in range(7)]
    names = [str(i) for i in range(7)]

    def with_gradients():
        named = parameters(*((n + 1,) for n in range(7)), dtype=dtype)
        for parameter, value in zip(named.values(), values, strict=True):
            parameter.grad = value.clone()
        named["2"].grad = None
        return named

    expected = with_gradients()
    norm = torch.nn.utils.clip_grad_norm_(expected.values(), 0.5)

    def body(world):
        mine = names[:cut] if world.rank == 0 else names[cut:]
        own = {name: p for name, p in with_gradients().items() if name in mine}
        group = world.group([(0, 1)])
        got = clip_by_global_norm(own, set(own), names, 0.5, group, world.device)
        return got, {name: p.grad for name, p in own.items()}

    for got, gradients in run_on_threads(2, body):
        assert got.item() == norm.item()
        for name, gradient in gradients.items():
            wanted = expected[name].grad
            assert gradient is wanted if wanted is None else torch.equal(gradient, wanted)


def test_norm_without_any_gradient_is_zero():
    assert clip_by_global_norm({}, set(), ["a"], 1.0, SOLO, CPU).item() == 0.0


def test_parameter_held_by_two_ranks_counts_once_and_is_clipped_on_both():
    def body(world):
        own = parameters((2,))
        own["0"].grad = torch.tensor([3.0, 4.0])
        counted = {"0"} if world.rank == 1 else set()
        norm = clip_by_global_norm(own, counted, ["0"], 1.0, world.group([(0, 1)]), CPU)
        return norm.item(), own["0"].grad

    for norm, gradient in run_on_threads(2, body):
        assert norm == 5.0
        torch.testing.assert_close(gradient, torch.tensor([0.6, 0.8]))
