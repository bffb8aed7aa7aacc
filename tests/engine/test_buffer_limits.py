"""Layer state that cannot be kept per micro-batch raises an error or logs a warning."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gpipe_hpc import Pipeline, run_on_threads
from gpipe_hpc.engine.buffers import SMALL_BYTES
from gpipe_hpc.errors import ActionError
from tests.support import batch, buffers_of

WIDTH, MICROBATCHES = 4, 4
LARGE = SMALL_BYTES // 4 + 1


def train(
    layers, ranks=1, steps=2, loss_fn=nn.functional.mse_loss, copy_layers=copy.deepcopy, **options
):
    """Train; return the last gradients and the buffers of each rank."""

    def body(world):
        pipe = Pipeline(
            copy_layers(layers), loss_fn, microbatches=MICROBATCHES, world=world, **options
        )
        for seed in range(steps):
            pipe.step(*batch(seed=seed))
        return {n: p.grad for n, p in pipe.named_parameters()}, buffers_of(pipe)

    return run_on_threads(ranks, body)


class Counting(nn.Linear):
    """Scale the output by a Python number that each forward changes."""

    def __init__(self, by=0.1):
        super().__init__(WIDTH, WIDTH)
        self.factor, self.by = 1.0, by

    def forward(self, x):
        self.factor += self.by
        return super().forward(x) * self.factor


class Stateful(nn.Linear):
    """Add a tensor that is no buffer and that each forward replaces."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.last = torch.zeros(WIDTH)

    def forward(self, x):
        out = super().forward(x) + self.last
        self.last = x.detach().mean(0)
        return out


def warnings_of(caplog):
    return [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]


@pytest.mark.parametrize("kind", [Counting, Stateful])
@pytest.mark.parametrize("recompute", ["always", "except_last"])
def test_state_in_attributes_logs_one_warning_naming_the_layer(caplog, kind, recompute):
    """Regression: plain attributes cannot be restored, so gradients were silently wrong."""
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), kind(), nn.Linear(WIDTH, WIDTH)]
    train(layers, recompute=recompute, steps=3)
    (message,) = warnings_of(caplog)
    assert message.startswith(
        f"layers.2 ({kind.__name__}): recomputation gave a different output ("
    )
    assert "keep all state that a forward changes in buffers" in message


class Graphs(nn.Linear):
    """Scale the output differently if gradients are enabled."""

    def forward(self, x):
        return super().forward(x) * (2.0 if torch.is_grad_enabled() else 1.0)


def test_layer_that_depends_on_grad_mode_logs_warning(caplog):
    """The first forward builds a graph, so step 1 with its one recomputation cannot show it."""

    def body(world):
        layers = [nn.Linear(WIDTH, WIDTH), Graphs(WIDTH, WIDTH)]
        pipe = Pipeline(layers, nn.functional.mse_loss, microbatches=2, world=world)
        for seed in range(3):
            pipe.step(*batch(seed=seed))

    run_on_threads(1, body)
    (message,) = warnings_of(caplog)
    assert message.startswith("layers.1 (Graphs): recomputation gave a different output (")


def test_stateful_layers_of_two_ranks_are_both_named(caplog):
    train([Counting(), Counting()], ranks=2, recompute="always")
    assert sorted(message.split(":")[0] for message in warnings_of(caplog)) == [
        "layers.0 (Counting)",
        "layers.1 (Counting)",
    ]


@pytest.mark.parametrize("layer", [Counting(by=0), nn.Dropout(), nn.MultiheadAttention])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_repeatable_layer_logs_no_warning(caplog, layer, dtype):
    """This includes layers whose kernels round differently with a graph than without."""
    if layer is nn.MultiheadAttention:
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 8)
    layers = [part.to(dtype) for part in (nn.Linear(WIDTH, WIDTH), layer, nn.GELU())]

    def body(world):
        pipe = Pipeline(layers, nn.functional.mse_loss, recompute="always", world=world)
        pipe.step(*batch(dtype=dtype))

    run_on_threads(1, body)
    assert warnings_of(caplog) == []


def test_stateful_layer_logs_no_warning_without_recomputation(caplog):
    train([Counting()], recompute="never")
    assert warnings_of(caplog) == []


class CountingLoss(nn.Module):
    """Multiply the loss by a buffer that each call changes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.ones(()))

    def forward(self, output, target):
        self.weight.mul_(1.5)
        return (output - target).square().mean() * self.weight


@pytest.mark.parametrize("recompute", ["always", "except_last", "never"])
@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b"])
def test_loss_buffer_changes_once_per_microbatch(recompute, schedule):
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    plain, plain_loss = copy.deepcopy(layers), CountingLoss()
    for seed in range(2):
        nn.ModuleList(plain).zero_grad()
        for x, y in zip(
            *(part.tensor_split(MICROBATCHES) for part in batch(seed=seed)), strict=True
        ):
            (plain_loss(plain[1](plain[0](x)), y) / MICROBATCHES).backward()
    loss_fn = CountingLoss()
    ranks = train(layers, ranks=2, loss_fn=loss_fn, recompute=recompute, schedule=schedule)
    assert loss_fn.weight == plain_loss.weight == 1.5 ** (2 * MICROBATCHES)
    for name, gradient in ranks[0][0].items():
        expected = nn.ModuleList(plain).get_parameter(name.removeprefix("layers.")).grad
        assert torch.allclose(gradient, expected, rtol=1e-4, atol=1e-4)


def test_loss_with_python_state_logs_warning(caplog):
    calls = []

    def loss_fn(output, target):
        calls.append(None)
        return (output - target).square().mean() * len(calls)

    train([nn.Linear(WIDTH, WIDTH)], loss_fn=loss_fn, recompute="always")
    (message,) = warnings_of(caplog)
    assert message.startswith("loss_fn (loss_fn): recomputation gave a different output")


class Average(nn.Linear):
    """Subtract a running average that is also updated in evaluation."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x):
        self.average.mul_(0.9).add_(x.detach().mean(0))
        return super().forward(x - self.average)


def test_prediction_changes_buffers_as_in_plain_torch():
    layers = [Average(), nn.Tanh()]
    plain = nn.Sequential(*copy.deepcopy(layers))
    inputs, targets = batch()
    with torch.no_grad():
        expected = torch.cat([plain(x) for x in inputs.tensor_split(MICROBATCHES)])

    def body(world):
        pipe = Pipeline(layers, nn.functional.mse_loss, microbatches=MICROBATCHES, world=world)
        held = layers[0].average
        outputs = pipe.predict(inputs)
        assert layers[0].average is held
        pipe.step(inputs, targets)
        assert layers[0].average is held
        return outputs

    assert torch.allclose(run_on_threads(1, body)[0], expected)
    with torch.no_grad():
        for x in inputs.tensor_split(MICROBATCHES):
            plain(x)
    assert torch.allclose(layers[0].average, plain[0].average)


class LateAndLarge(nn.Linear):
    """Change a large buffer from the second step on."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("queue", torch.ones(LARGE))

    def forward(self, x):
        self.count += 1
        if self.count > MICROBATCHES + 1:
            self.queue.mul_(0.5)
        return super().forward(x) * self.queue[:WIDTH]


@pytest.mark.parametrize("recompute", ["always", "never"])
@pytest.mark.parametrize("offload", [False, True])
def test_large_buffer_that_changes_late_raises_error_naming_it(recompute, offload):
    """With offloading, autograd's own check does not detect the change."""
    expected = r"layers\.0 \(LateAndLarge\): .* changed buffer queue, .* add_\(0\)"
    with pytest.raises(ActionError, match=expected):
        train([LateAndLarge()], recompute=recompute, offload=offload)


class Aliased(nn.Linear):
    """Read through an attribute the buffer that is written through its name."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(2, WIDTH))
        self.first = self.scale[0]

    def forward(self, x):
        self.scale.mul_(0.9)
        return super().forward(x) * self.first


class WrittenByAlias(Aliased):
    """Write through a list the buffer that is read through its name."""

    def __init__(self):
        super().__init__()
        self.others = [self.first]
        del self.first

    def forward(self, x):
        self.others[0].mul_(0.9)
        return nn.Linear.forward(self, x) * self.scale[0]


@pytest.mark.parametrize("kind", [Aliased, WrittenByAlias])
def test_aliased_buffer_raises_error(kind):
    expected = rf"layers\.0 \({kind.__name__}\): buffer scale .* use self\.scale itself"
    with pytest.raises(ActionError, match=expected):
        # Not copied, so that both names share memory.
        train([kind()], recompute="always", copy_layers=list)


class WithGraph(nn.Linear):
    """Change a buffer only if gradients are enabled."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x):
        if torch.is_grad_enabled():
            self.average.add_(x.detach().mean(0))
        return super().forward(x - self.average)


def test_buffer_changed_only_by_recomputation_raises_error():
    with pytest.raises(
        ActionError, match=r"layers\.0 \(WithGraph\): recomputation changed buffer average"
    ):
        train([WithGraph()], recompute="always")


class CheckpointedAverage(Average):
    """Run the forward under `torch.utils.checkpoint`."""

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def test_buffer_changed_again_by_own_checkpoint_logs_warning(caplog):
    train([nn.Linear(WIDTH, WIDTH), CheckpointedAverage()], recompute="never")
    (message,) = warnings_of(caplog)
    assert message.startswith("layers.1 (CheckpointedAverage): buffer average was changed in a")


@pytest.mark.parametrize("memory_bytes", [1080, 1150, 1300])
def test_memory_budget_keeps_gradients_and_buffers(memory_bytes):
    """Some layers of a stage are recomputed, others are not."""
    torch.manual_seed(0)
    layers = [part for _ in range(3) for part in (Average(), nn.Tanh())]
    options = {"recompute": "budget", "example": tuple(b[:2] for b in batch())}
    plain = train(layers, recompute="never", schedule="one_f_one_b")
    ours = train(layers, memory_bytes=memory_bytes, optimizer_states=0, **options)
    for mine, theirs in zip(ours[0], plain[0], strict=True):
        for name, value in mine.items():
            assert torch.allclose(value, theirs[name], rtol=1e-5), name


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["always", "never"])
def test_buffers_do_not_depend_on_recompute_if_compiled_or_bfloat16(recompute):
    torch.manual_seed(0)
    layers = [part for _ in range(2) for part in (Average(), nn.Tanh())]
    for options in ({"compile": "aot_eager"}, {"precision": "bfloat16"}):
        ((_, buffers),) = train(layers, recompute=recompute, **options)
        ((_, plain),) = train(layers, recompute="never", **options)
        for name, buffer in buffers.items():
            assert torch.equal(buffer, plain[name]), name
        expected = plain if "precision" in options else train(layers, recompute="never")[0][1]
        for name, buffer in buffers.items():
            assert torch.allclose(buffer, expected[name], rtol=1e-5), name
