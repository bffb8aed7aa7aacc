"""Gradient buckets of a stage, and the global gradient norm."""

import pytest
import torch
from torch import nn

from gpipe_hpc.comm.collectives.group import SoloGroup
from gpipe_hpc.comm.world.threads import run_on_threads
from gpipe_hpc.data_parallel import Divisor, GradientBuckets, choose_strategy
from gpipe_hpc.device.device import HostDevice
from gpipe_hpc.engine.gradient_norms import clip_by_norm, gather_norms
from gpipe_hpc.engine.step_reduction import unite_flags
from gpipe_hpc.settings import Outer

SOLO, CPU = SoloGroup(0), HostDevice()
NAMES = [["2"], ["1", "0"]]
ONE = Divisor(torch.tensor(1.0, dtype=torch.float64), CPU)


def parameters(*shapes, dtype=torch.float32):
    return {str(i): nn.Parameter(torch.ones(shape, dtype=dtype)) for i, shape in enumerate(shapes)}


def on_two_ranks(body):
    """Run `body(group, rank)` on two ranks and return both results."""
    return run_on_threads(2, lambda world: body(world.group([(0, 1)]), world.rank))


def summed(named, group=SOLO, names=()):
    """Return the gradient buckets of parameters at the start of a step, reduced over a group."""
    gradients = GradientBuckets(named, CPU)
    gradients.reduce_by(choose_strategy(Outer(), group), names)
    gradients.rebuild()
    gradients.clear()
    return gradients


def finish(gradients, group=SOLO):
    for number in range(gradients.num_buckets):
        gradients.start_reduction(number)
    gradients.finish(ONE, unite_flags(gradients.used_flags(), group))


def test_reduced_gradients_share_one_buffer():
    def body(group, rank):
        named = parameters((2, 3), (4,))
        gradients = summed(named, group)
        for parameter in named.values():
            for _ in range(2):
                (parameter.square() * (rank + 1)).sum().backward()
        finish(gradients, group)
        return [p.grad for p in named.values()]

    for first, second in on_two_ranks(body):
        assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
        assert first.shape == (2, 3) and torch.equal(first, torch.full((2, 3), 12.0))
        assert torch.equal(second, torch.full((4,), 12.0))


def test_given_buckets_have_separate_buffers():
    """Freezing a parameter keeps the bucket numbers, because the schedule table refers to them."""
    named = parameters((2,), (3,), (4,))

    def body(group, rank):
        gradients = summed(named if rank == 0 else parameters((2,), (3,), (4,)), group, NAMES)
        parts = [gradients.parameters_of(number) for number in range(gradients.num_buckets)]
        starts = [[p.grad.untyped_storage().data_ptr() for p in part] for part in parts]
        gradients.named["2"].requires_grad_(False)
        gradients.rebuild()
        gradients.clear()
        frozen = [len(gradients.parameters_of(n)) for n in range(gradients.num_buckets)]
        finish(gradients, group)
        return [[p.numel() for p in part] for part in parts], starts, frozen

    for sizes, starts, frozen in on_two_ranks(body):
        assert sizes == [[4], [3, 2]] and frozen == [0, 2]
        assert len({start for part in starts for start in part}) == 2


def test_unreduced_gradients_use_no_memory_before_first_backward():
    # Schedules such as gpipe keep the most activations just before it.
    named = parameters((2, 3), (4,))
    gradients = GradientBuckets(named, CPU)
    for _ in range(2):
        gradients.clear()
        assert [p.grad for p in named.values()] == [None, None]
        for parameter in named.values():
            for _ in range(2):
                parameter.square().sum().backward()
        finish(gradients)
        assert [p.grad.unique().item() for p in named.values()] == [4.0, 4.0]


def test_gradient_with_its_own_memory_is_not_copied():
    """Regression: all gradients were copied, which could double their memory on a CPU."""
    named = parameters((2, 3), (4,))
    gradients = summed(named)
    for parameter in named.values():
        parameter.square().sum().backward()
    places = [p.grad.data_ptr() for p in named.values()]
    gradients.unshare()
    assert [p.grad.data_ptr() for p in named.values()] == places


class ReturnGradient(torch.autograd.Function):
    """Identity whose backward returns a given tensor as the gradient."""

    @staticmethod
    def forward(ctx, values, gradient):
        ctx.gradient = gradient
        return values.clone()

    @staticmethod
    def backward(ctx, _):
        return ctx.gradient(), None


@pytest.mark.parametrize(
    "gradient",
    [
        lambda kept: kept.view(4),
        lambda kept: torch.from_numpy(kept.numpy()),
        lambda kept: torch.from_dlpack(kept),
        lambda kept: torch.cat([kept, kept])[:4],
    ],
    ids=["another tensor's", "an array's", "another library's", "a part"],
)
def test_gradient_with_shared_memory_is_copied(gradient):
    """Otherwise the next micro-batch would change another tensor, or a slice keep it alive."""
    named, kept = parameters((4,)), torch.ones(4)
    gradients = summed(named)
    for _ in range(2):
        ReturnGradient.apply(named["0"], lambda: gradient(kept)).sum().backward()
        gradients.unshare()
    assert named["0"].grad.tolist() == [2.0] * 4
    assert kept.tolist() == [1.0] * 4
    assert named["0"].grad.untyped_storage().nbytes() == 16


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_sparse_gradient_becomes_dense(num_ranks):
    def body(world):
        table = nn.Embedding(4, 2, sparse=True)
        group = world.group([tuple(range(num_ranks))])
        gradients = summed(dict(table.named_parameters()), group)
        for _ in range(2):
            table(torch.tensor([1, 1, 3])).sum().backward()
            gradients.unshare()
        finish(gradients, group)
        return table.weight.grad.tolist()

    expected = [[0.0] * 2, [4.0 * num_ranks] * 2, [0.0] * 2, [2.0 * num_ranks] * 2]
    assert run_on_threads(num_ranks, body) == [expected] * num_ranks


def test_each_dtype_has_a_bucket():
    named = parameters((2,)) | {"double": nn.Parameter(torch.ones(3, dtype=torch.float64))}
    gradients = summed(named)
    named["double"].sum().backward()
    finish(gradients)
    assert named["0"].grad is None and named["double"].grad.dtype == torch.float64


def test_zero_gradient_is_kept_and_missing_gradient_is_none():
    named = parameters((2,), (2,))
    gradients = summed(named)
    (named["0"] * 0).sum().backward()
    finish(gradients)
    assert named["0"].grad.tolist() == [0.0, 0.0] and named["1"].grad is None


def test_replaced_gradient_is_kept():
    named = parameters((2,))
    gradients = summed(named)
    named["0"].grad = torch.full((2,), 5.0)
    finish(gradients)
    assert named["0"].grad.tolist() == [5.0, 5.0]


def test_parameter_used_on_one_replica_gets_a_gradient_on_all():
    def body(world):
        group = world.group([(0, 1)])
        named = parameters((2,), (2,), (2,))
        gradients = summed(named, group)
        named[str(world.rank)].sum().backward()
        finish(gradients, group)
        return [None if p.grad is None else p.grad.tolist() for p in named.values()]

    assert run_on_threads(2, body) == [[[1.0, 1.0], [1.0, 1.0], None]] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("cut", [1, 3, 6])
def test_norm_and_clipping_are_bitwise_equal_to_torch(cut, dtype):
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
        norms = gather_norms(own, set(own), names, group, world.device, dtype)
        got = clip_by_norm(own, norms, 0.5)
        return got, {name: p.grad for name, p in own.items()}

    for got, gradients in run_on_threads(2, body):
        assert got.item() == norm.item()
        for name, gradient in gradients.items():
            wanted = expected[name].grad
            assert gradient is wanted if wanted is None else torch.equal(gradient, wanted)


def test_norm_without_any_gradient_is_zero():
    assert clip_by_norm({}, gather_norms({}, set(), ["a"], SOLO, CPU), 1.0).item() == 0.0


def test_parameter_held_by_two_ranks_counts_once_and_is_clipped_on_both():
    def body(world):
        own = parameters((2,))
        own["0"].grad = torch.tensor([3.0, 4.0])
        counted = {"0"} if world.rank == 1 else set()
        norms = gather_norms(own, counted, ["0"], world.group([(0, 1)]), CPU)
        norm = clip_by_norm(own, norms, 1.0)
        return norm.item(), own["0"].grad

    for norm, gradient in run_on_threads(2, body):
        assert norm == 5.0
        torch.testing.assert_close(gradient, torch.tensor([0.6, 0.8]))
