"""Split backward: I followed by W gives the gradients of B, and W computes weight gradients."""

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpipe_hpc.device.device import HostDevice
from gpipe_hpc.engine.layer_runner import RunMode
from gpipe_hpc.engine.run import Outcome, Run
from gpipe_hpc.engine.stage import Stage
from gpipe_hpc.engine.stage_runner import ForwardPlan, StageRunner
from gpipe_hpc.engine.wiring import StageRoutes
from gpipe_hpc.models import build_layer, build_model

CPU = HostDevice()
MIDDLE = StageRoutes({-1: ()}, {1: ()})


class Apply(nn.Module):
    """Turn a function of (layer, input) into a layer with parameters of the given shapes."""

    def __init__(self, function, **shapes):
        super().__init__()
        self.function = function
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))

    def forward(self, x):
        return self.function(self, x)


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).flatten(0, -2).sum(0)


class Shared(nn.Module):
    """Apply one linear layer three times."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        for _ in range(3):
            x = torch.tanh(self.linear(x))
        return x


class Tied(nn.Module):
    """Use one matrix as embedding and, transposed, as output layer."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, 4)

    def forward(self, tokens):
        return F.linear(torch.tanh(self.embedding(tokens)), self.embedding.weight)


class Attention(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x)[0]


def frozen(layer, *names):
    for name in names:
        layer.get_parameter(name).requires_grad_(False)
    return layer


def vectors(*shape):
    return lambda dtype: torch.randn(shape).to(dtype)


def tokens(dtype):
    return torch.randint(0, 9, (5, 3))


def gpt(index):
    """Return a layer of a GPT: 0 embedding, 1 attention, 2 MLP, 3 norm, 4 head."""
    sizes = {"vocab_size": 9, "block_size": 3, "num_layers": 1, "num_heads": 2, "width": 4}
    return build_layer(build_model("gpt", **sizes)[index], index=index, seed=0, device=CPU)


def in_place():
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))


def by_keywords(layer, x):
    return F.linear(input=x, weight=layer.w)


def computed_bias(layer, x):
    return F.linear(x, layer.w, x[0, :3])


def around_the_edges():
    return nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular")


def normed():
    return torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))


X2, X3 = vectors(5, 4), vectors(2, 5, 4)
conv = {"kernel_size": 3, "stride": 2, "padding": 1, "groups": 2}
ALL = [  # layers whose weight gradients are all computed in W
    ("linear of 1 dimension", partial(nn.Linear, 4, 3), vectors(4)),
    ("linear of 2 dimensions", partial(nn.Linear, 4, 3), X2),
    ("linear of 3 dimensions", partial(nn.Linear, 4, 3), X3),
    ("linear without bias", partial(nn.Linear, 4, 3, bias=False), X3),
    ("linear with a frozen weight", lambda: frozen(nn.Linear(4, 3), "weight"), X3),
    ("linear with a frozen bias", lambda: frozen(nn.Linear(4, 3), "bias"), X3),
    ("linear by keywords", partial(Apply, by_keywords, w=(3, 4)), X3),
    ("linear with a vector", partial(Apply, lambda s, x: F.linear(x, s.w), w=4), X2),
    ("linear of a parameter", partial(Apply, lambda s, x: F.linear(s.p, x), p=(2, 4)), X2),
    ("linear with a bias that is no parameter", partial(Apply, computed_bias, w=(3, 4)), X2),
    ("linear with only a bias", partial(Apply, lambda s, x: F.linear(x, x * 2, s.b), b=5), X2),
    ("in place between linears", in_place, X3),
    ("bilinear", partial(Apply, lambda s, x: F.bilinear(x, x, s.w), w=(3, 4, 4)), X2),
    ("conv1d", partial(nn.Conv1d, 4, 6, **conv), vectors(2, 4, 9)),
    ("conv2d", partial(nn.Conv2d, 4, 6, **conv), vectors(2, 4, 7, 9)),
    ("conv2d without bias", partial(nn.Conv2d, 4, 6, 3, bias=False), vectors(2, 4, 7, 9)),
    ("conv2d around the edges", around_the_edges, vectors(2, 4, 5, 5)),
    ("conv3d", partial(nn.Conv3d, 4, 6, **conv), vectors(2, 4, 5, 5, 5)),
    ("conv_transpose1d", partial(nn.ConvTranspose1d, 4, 6, **conv), vectors(2, 4, 9)),
    ("conv_transpose2d", partial(nn.ConvTranspose2d, 4, 6, **conv), vectors(2, 4, 5, 5)),
    ("conv_transpose3d", partial(nn.ConvTranspose3d, 4, 6, **conv), vectors(2, 4, 3, 3, 3)),
    ("embedding", partial(nn.Embedding, 9, 4), tokens),
    ("embedding with padding", partial(nn.Embedding, 9, 4, padding_idx=2), tokens),
    ("embedding with a largest norm", partial(nn.Embedding, 9, 4, max_norm=1.0), tokens),
    ("embedding_bag", partial(nn.EmbeddingBag, 9, 4), tokens),
    ("matmul with a bare parameter", partial(Apply, lambda s, x: x @ s.w, w=(4, 4)), X3),
    ("matmul of a bare parameter", partial(Apply, lambda s, x: s.w @ x, w=(5, 5)), X3),
    ("addmm", partial(Apply, lambda s, x: torch.addmm(s.b, x, s.w), b=3, w=(4, 3)), X2),
    ("einsum", partial(Apply, lambda s, x: torch.einsum("bsi,hij->bhsj", x, s.w), w=(2, 4, 3)), X3),
    ("tensordot", partial(Apply, lambda s, x: torch.tensordot(x, s.w, 1), w=(4, 2, 2)), X3),
    ("gpt head", partial(gpt, 4), vectors(2, 3, 4)),
    ("a parameter used three times", Shared, X3),
    ("a parameter tied within a stage", Tied, tokens),
]  # fmt: skip
NONE = [  # layers that are not split: W is empty
    ("layer_norm", partial(nn.LayerNorm, 4), X3),
    ("rms_norm", partial(nn.RMSNorm, 4), X3),
    ("group_norm", partial(nn.GroupNorm, 2, 4), vectors(2, 4, 6)),
    ("batch_norm", partial(nn.BatchNorm2d, 4), vectors(3, 4, 2, 2)),
    ("instance_norm", partial(nn.InstanceNorm1d, 4, affine=True), vectors(2, 4, 6)),
    ("multi-head attention", partial(Attention, 4, 2, batch_first=True), X3),
    ("an unknown function", partial(Apply, lambda s, x: _Scale.apply(x, s.w), w=4), X3),
    ("an elementwise product", partial(Apply, lambda s, x: x * s.w, w=4), X3),
    ("a transposed parameter", partial(Apply, lambda s, x: x @ s.w.t(), w=(3, 4)), X3),
    ("a recurrent layer", lambda: nn.Sequential(nn.GRU(4, 4), Apply(lambda s, x: x[0])), X3),
    ("nothing to train", lambda: frozen(nn.Linear(4, 3), "weight", "bias"), X3),
]  # fmt: skip
SOME = [  # layers with parameters of both kinds
    ("gpt attention", partial(gpt, 1), vectors(2, 3, 4)),
    ("gpt mlp", partial(gpt, 2), vectors(2, 3, 4)),
    ("gpt embedding", partial(gpt, 0), tokens),
    ("a weight that is computed", normed, X3),
]  # fmt: skip


@dataclass
class Step:
    """Results of one micro-batch."""

    output: torch.Tensor
    input_gradients: tuple
    after_i: list  # gradient of each parameter before W
    gradients: list  # gradient of each parameter after W
    has_weights: bool


RUN = Run("test", lambda microbatch: lambda layer: 17, 1)


def run_stage(layer, boundary, *, splits, recomputes=False, context=nullcontext, num_steps=2):
    """Run micro-batches through a layer one after the other; return the results of the last one."""
    stage = Stage(0, {0: layer}, CPU, MIDDLE)
    work = StageRunner(stage)
    keep = RunMode.RECORD if recomputes else RunMode.TRAIN
    for microbatch in range(num_steps):  # the first one copies inputs to detect in-place writes
        boundary = boundary.detach().requires_grad_(boundary.dtype != torch.int64)
        stage.gradients.clear()
        with context():
            (output,) = work.forward(
                RUN, microbatch, [boundary], 2, ForwardPlan(keep, splits), Outcome()
            )
            if recomputes:
                assert work.recompute(RUN, microbatch)
        ramp = torch.linspace(0.1, 1, output.numel()).view(output.shape).to(output.dtype)
        (given,) = work.backward(microbatch, [ramp] if output.requires_grad else [])
        parameters = list(stage.named_parameters().values())
        after_i = [None if p.grad is None else p.grad.clone() for p in parameters]
        has_weights = work.weights(microbatch) if splits else False
        assert work.num_kept == 0
    gradients = [p.grad for p in parameters]
    return Step(output.detach(), given, after_i, gradients, has_weights)


def same(left, right):
    if left is None or right is None:
        return left is right
    return left.dtype == right.dtype and torch.equal(left.to_dense(), right.to_dense())


def assert_equal(whole, split):
    """Assert that outputs and the gradients of inputs and parameters are bitwise equal."""
    assert same(whole.output, split.output)
    assert len(whole.input_gradients) == len(split.input_gradients)
    assert all(map(same, whole.input_gradients, split.input_gradients))
    assert len(whole.gradients) == len(split.gradients)
    assert all(map(same, whole.gradients, split.gradients))


def run_both(make, make_input, dtype=torch.float64, **how):
    """Run `make()` with B and with I and W; assert equal results and return those of I and W."""
    steps = []
    for splits in (False, True):
        torch.manual_seed(0)
        steps.append(run_stage(make().to(dtype), make_input(dtype), splits=splits, **how))
    assert_equal(*steps)
    return steps[1]


def cases(*lists):
    return pytest.mark.parametrize(
        ("make", "make_input"),
        [pytest.param(*rest, id=name) for each in lists for name, *rest in each],
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@cases(ALL)
def test_w_computes_all_weight_gradients(make, make_input, dtype):
    split = run_both(make, make_input, dtype)
    assert split.has_weights
    assert all(g is None for g in split.after_i), "I computed a weight gradient"
    assert any(g.any() for g in split.gradients if g is not None)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@cases(NONE)
def test_layers_that_cannot_be_split_get_all_gradients_in_i(make, make_input, dtype):
    split = run_both(make, make_input, dtype)
    assert not split.has_weights
    assert all(map(same, split.after_i, split.gradients))


@cases(SOME)
def test_mixed_layers_get_some_gradients_in_i_and_others_in_w(make, make_input):
    split = run_both(make, make_input)
    assert split.has_weights
    early = [gradient is not None for gradient in split.after_i]
    assert any(early) and not all(early)


@cases(
    [c for c in ALL if c[0].startswith(("linear of 3", "gpt", "conv2d", "layer", "embed"))], SOME
)
def test_split_backward_after_recomputation_is_bitwise_equal(make, make_input):
    assert run_both(make, make_input, recomputes=True).has_weights


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("make", [partial(gpt, 1), partial(gpt, 2), Shared, normed])
def test_split_backward_under_autocast_is_bitwise_equal(make, cache, recomputes):
    autocast = partial(torch.autocast, "cpu", torch.bfloat16, cache_enabled=cache)
    how = {"recomputes": recomputes, "context": autocast}
    split = run_both(make, vectors(2, 3, 4), torch.float32, **how)
    assert split.has_weights
    exact = run_both(make, vectors(2, 3, 4), torch.float32)
    assert not same(split.gradients[-1], exact.gradients[-1]), "autocast changed no gradient"


def test_split_convolution_and_batch_norm_under_autocast_are_equal():
    def make():
        return nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True))

    autocast = partial(torch.autocast, "cpu", torch.bfloat16)
    assert run_both(make, vectors(2, 4, 5, 5), torch.float32, context=autocast).has_weights


@pytest.mark.filterwarnings("ignore:Complex modules")
def test_split_backward_of_complex_linear_is_bitwise_equal():
    """Regression: the input gradient of a complex linear layer lacked the conjugate."""
    make = partial(nn.Linear, 4, 3, dtype=torch.complex128)
    assert make().weight.imag.any()
    assert run_both(make, X3, torch.complex128).has_weights


def test_stage_with_data_input_computes_all_gradients_in_w():
    """The input also contains values that are no tensors; no gradient is sent back."""
    layer = Apply(lambda s, nest: F.linear(nest["x"], s.w) * nest["scale"], w=(3, 4))
    for splits in (False, True):
        work = StageRunner(Stage(0, {0: layer}, CPU, MIDDLE))
        work.stage.gradients.clear()
        nest = {"x": torch.ones(2, 4), "scale": 2, "none": None}
        (output,) = work.forward(RUN, 0, [nest], 2, ForwardPlan(RunMode.TRAIN, splits), Outcome())
        assert work.backward(0, [torch.ones_like(output)]) == [()]
        assert layer.w.grad is None if splits else layer.w.grad.eq(4).all()
        assert work.weights(0) is splits
        assert layer.w.grad.eq(4).all()


def test_split_backward_of_sparse_embedding_is_bitwise_equal():
    assert run_both(partial(nn.Embedding, 9, 4, sparse=True), tokens).has_weights
