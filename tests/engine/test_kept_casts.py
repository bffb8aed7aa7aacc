"""Autocast casts each weight once per step, and again after each change of the weight."""

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from gpipe_hpc import Pipeline
from gpipe_hpc.engine import precision as engine_precision
from gpipe_hpc.errors import ActionError
from gpipe_hpc.models import LayerSpec, build_gpt, build_layer, token_cross_entropy
from gpipe_hpc.schedule import Op
from tests.support import token_batch

SPECS = build_gpt(vocab_size=13, block_size=8, num_layers=2, num_heads=2, width=16)
SEED = 2
CAST_WEIGHTS = 2 * 4 * 2 + 1  # two blocks with four matrices and their biases, and the head

needs_kept_casts = pytest.mark.skipif(
    not engine_precision.casts_keep_their_graph(), reason="this torch casts for each graph"
)


def pipeline(microbatches=4, schedule="gpipe", recompute="never", **settings) -> Pipeline:
    """Return a pipeline of one rank, since autocast's cache is shared by all threads."""
    return Pipeline(
        SPECS,
        token_cross_entropy,
        microbatches=microbatches,
        schedule=schedule,
        recompute=recompute,
        seed=SEED,
        precision="bfloat16",
        **settings,
    )


class WeightCasts(TorchDispatchMode):
    """Count the casts of parameters to another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_cast = func is torch.ops.aten._to_copy.default
        self.number += is_cast and isinstance(args[0], nn.Parameter)
        return func(*args, **(kwargs or {}))


def num_casts(run) -> int:
    with WeightCasts() as casts:
        run()
    return casts.number


WAYS = [
    (schedule, recompute)
    for schedule in ("gpipe", "one_f_one_b", "zb_h1")
    for recompute in ("never", "always")
]


@needs_kept_casts
@pytest.mark.parametrize("schedule, recompute", WAYS)
@pytest.mark.parametrize("microbatches", [1, 2, 8])
def test_each_weight_is_cast_once_per_step(schedule, recompute, microbatches):
    pipe = pipeline(microbatches, schedule, recompute)
    for _ in range(2):
        assert num_casts(lambda: pipe.step(*token_batch())) == CAST_WEIGHTS


@needs_kept_casts
def test_each_weight_is_cast_once_per_evaluation_and_prediction():
    pipe = pipeline()
    assert num_casts(lambda: pipe.evaluate(*token_batch())) == CAST_WEIGHTS
    assert num_casts(lambda: pipe.predict(token_batch()[0])) == CAST_WEIGHTS


@needs_kept_casts
def test_two_stages_of_one_rank_cast_each_weight_once_per_step():
    pipe = pipeline(4, "interleaved", "always", partition=[3, 4])
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    for _ in range(2):
        assert num_casts(lambda: pipe.step(*token_batch())) == CAST_WEIGHTS
        optimizer.step()


def plain(weights: dict[str, Tensor], microbatches: int, schedule: str, given=None):
    """Return loss and gradients of a loop that casts weights again for each micro-batch."""
    layers = [build_layer(spec, index=i, seed=SEED) for i, spec in enumerate(SPECS)]
    named = {f"layers.{i}.{n}": p for i, m in enumerate(layers) for n, p in m.named_parameters()}
    with torch.no_grad():
        for name, weight in weights.items():
            named[name].copy_(weight)
    inputs, targets = given or token_batch()
    pieces = list(
        zip(inputs.tensor_split(microbatches), targets.tensor_split(microbatches), strict=True)
    )
    total_loss = 0.0
    for x, y in reversed(pieces) if schedule == "gpipe" else pieces:
        with torch.autocast("cpu", torch.bfloat16):
            for layer in layers:
                x = layer(x)
            loss, _ = token_cross_entropy(x, y)
        loss.backward()
        total_loss += loss.item()
    weight = targets.numel()
    return total_loss / weight, {name: p.grad / weight for name, p in named.items()}


def assert_equals_plain_loop(
    pipe: Pipeline, result, microbatches: int, schedule: str, given=None, weights=None
):
    """Assert that a step has the loss and gradients of the plain loop with the same weights."""
    named = dict(pipe.named_parameters())
    weights = weights or {name: p.detach() for name, p in named.items()}
    loss, gradients = plain(weights, microbatches, schedule, given)
    assert result.loss == pytest.approx(loss, rel=1e-6)
    assert named.keys() == gradients.keys()
    for name, parameter in named.items():
        assert torch.equal(parameter.grad, gradients[name]), name


@pytest.mark.parametrize("schedule", ["gpipe", "zb_h1"])
@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_gradients_equal_a_loop_that_casts_for_each_microbatch(schedule, recompute, microbatches):
    pipe = pipeline(microbatches, schedule, recompute)
    assert_equals_plain_loop(pipe, pipe.step(*token_batch()), microbatches, schedule)


@pytest.mark.parametrize("schedule, recompute", WAYS)
def test_step_uses_the_weights_updated_by_the_optimizer(schedule, recompute):
    pipe = pipeline(4, schedule, recompute)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.5)
    for step in range(3):
        optimizer.zero_grad()
        assert_equals_plain_loop(
            pipe, pipe.step(*token_batch(step)), 4, schedule, token_batch(step)
        )
        optimizer.step()


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_training_and_evaluation_can_alternate(recompute):
    """Otherwise training could use a cast without graph that an evaluation made."""
    pipe = pipeline(4, "gpipe", recompute)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.5)
    for step in range(3):
        weights = {name: p.detach() for name, p in pipe.named_parameters()}
        expected, _ = plain(weights, 4, "gpipe", token_batch(9))
        assert pipe.evaluate(*token_batch(9)).loss == pytest.approx(expected, rel=1e-6)
        optimizer.zero_grad()
        assert_equals_plain_loop(pipe, pipe.step(*token_batch(step)), 4, "gpipe", token_batch(step))
        optimizer.step()


@pytest.mark.parametrize("schedule, recompute", WAYS)
def test_older_versions_of_torch_cast_for_each_graph(schedule, recompute, monkeypatch):
    monkeypatch.setattr(engine_precision, "casts_keep_their_graph", lambda: False)
    pipe = pipeline(4, schedule, recompute)
    num_forwards = 2 if recompute == "always" else 1
    assert_equals_plain_loop(pipe, pipe.step(*token_batch()), 4, schedule)
    assert num_casts(lambda: pipe.step(*token_batch())) == 4 * num_forwards * CAST_WEIGHTS


class Norm(nn.Module):
    """Return float32 under autocast, as layer norms do."""

    def __init__(self, kind: type[nn.Module], *sizes: int) -> None:
        super().__init__()
        self.inner, self.norm = kind(*sizes), nn.GroupNorm(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.inner(x)).float())


class LiveStorages(TorchDispatchMode):
    """Record the storages created in the context, and measure those that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[StorageWeakRef, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tree_map_only(Tensor, self.note, result)
        return result

    def note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.made.append((StorageWeakRef(storage), storage.nbytes()))

    def nbytes(self) -> int:
        self.made = [each for each in self.made if not each[0].expired()]
        return sum({storage.cdata: nbytes for storage, nbytes in self.made}.values())


@needs_kept_casts
@pytest.mark.parametrize("schedule", ["interleaved", "zb_v"])
@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("kind, sizes", [(nn.Linear, (8, 8)), (nn.Conv1d, (8, 8, 3, 1, 1))])
def test_casts_of_activations_are_freed_within_the_step(schedule, recompute, kind, sizes):
    """Regression: autocast caches casts of all leaves, so it kept casts of stage inputs."""
    shape = (8, 5) if kind is nn.Conv1d else (8,)
    storages, live_bytes = LiveStorages(), []

    def loss_fn(output, targets):
        live_bytes.append(storages.nbytes())
        return (output * targets).sum(), len(targets)

    pipe = Pipeline(
        [LayerSpec(Norm, kind, *sizes) for _ in range(4)],
        loss_fn,
        microbatches=8,
        schedule=schedule,
        recompute=recompute,
        partition=[2, 2],
        precision="bfloat16",
    )
    data = torch.rand(64, *shape), torch.rand(64, *shape)
    pipe.step(*data)  # the first step copies tensors to detect in-place writes
    live_bytes.clear()
    with storages:
        pipe.step(*data)
    # A loss takes 4 bytes per micro-batch; one cast of a stage input would take 128 or more.
    assert max(live_bytes) < max(live_bytes[:4]) + 256


class Shrinking(nn.Linear):
    """Linear layer that halves its own weight in each forward after the first `first`."""

    def __init__(self, width: int, first: int) -> None:
        super().__init__(width, width)
        self.num_left = first

    def forward(self, x: Tensor) -> Tensor:
        if self.num_left <= 0:
            with torch.no_grad():
                self.weight.mul_(0.5)
        self.num_left -= 1
        return super().forward(x)


def plain_losses(layer: nn.Module, x: Tensor, microbatches: int) -> list[float]:
    losses = []
    for part in x.tensor_split(microbatches):
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(layer(part).float().square().mean().item())
    return losses


def test_layer_that_changes_its_weight_uses_the_new_value():
    torch.manual_seed(0)
    first, second = Shrinking(8, 0), Shrinking(8, 0)
    second.load_state_dict(first.state_dict())
    x = torch.randn(8, 8)
    pipe = Pipeline(
        [first],
        lambda y, _: y.float().square().mean(),
        microbatches=4,
        schedule="gpipe",
        recompute="never",
        precision="bfloat16",
    )
    losses = pipe.step(x, x).microbatch_losses
    assert losses == pytest.approx(plain_losses(second, x, 4), rel=1e-6)


def test_recomputing_a_layer_that_changes_its_weight_raises_error():
    """Otherwise each micro-batch would halve the weight twice."""
    x = torch.randn(8, 8)
    pipe = Pipeline(
        [Shrinking(8, 0)],
        lambda y, _: y.float().square().mean(),
        microbatches=4,
        schedule="gpipe",
        recompute="always",
        precision="bfloat16",
    )
    with pytest.raises(ActionError, match=r"recomputation changed parameter layers\.0\.weight"):
        pipe.step(x, x)


@needs_kept_casts
def test_layer_that_starts_to_change_its_weight_raises_error():
    x = torch.randn(8, 8)
    pipe = Pipeline(
        [Shrinking(8, 1)],
        lambda y, _: y.float().square().mean(),
        microbatches=4,
        schedule="gpipe",
        recompute="never",
        precision="bfloat16",
    )
    with pytest.raises(ActionError, match="a forward changed a parameter in this micro-batch"):
        pipe.step(x, x)


def test_weight_changed_by_a_hook_in_backward_is_cast_again():
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    for layer in layers:

        def halve(gradient: Tensor, weight: nn.Parameter = layer.weight) -> None:
            with torch.no_grad():
                weight.mul_(0.5)

        layer.weight.register_hook(halve)
    x, (ours, plain) = torch.randn(8, 8), layers
    expected = []
    for part in x.tensor_split(4):
        with torch.autocast("cpu", torch.bfloat16):
            loss = plain(part).float().square().mean()
        expected.append(loss.item())
        loss.backward()
    pipe = Pipeline(
        [ours],
        lambda y, _: y.float().square().mean(),
        microbatches=4,
        schedule="one_f_one_b",
        recompute="never",
        precision="bfloat16",
    )
    assert pipe.step(x, x).microbatch_losses == pytest.approx(expected, rel=1e-6)
    assert torch.equal(ours.weight, plain.weight) and expected[3] < expected[0] / 2


@needs_kept_casts
@pytest.mark.parametrize(("recompute", "runs"), [("never", 1), ("always", 2)])
def test_offloading_casts_weights_for_each_microbatch(recompute, runs):
    pipe = pipeline(4, recompute=recompute, offload=True)
    moved = sum(action.op is Op.OFFLOAD for action in pipe.schedule.ranks[0])
    assert 0 < moved < 4
    assert num_casts(lambda: pipe.step(*token_batch())) == CAST_WEIGHTS * runs * 4


def test_outdated_casts_of_an_outer_autocast_are_not_used():
    layers = [nn.Linear(8, 8), nn.Linear(8, 8)]
    layers[1].load_state_dict(layers[0].state_dict())
    x, losses = torch.randn(8, 8), []
    for layer, around in zip(layers, (True, False), strict=True):
        pipe = Pipeline(
            [layer], lambda y, _: y.float().square().mean(), precision="bfloat16", recompute="never"
        )
        with torch.autocast("cpu", torch.bfloat16, enabled=around):
            layer(x)
            with torch.no_grad():
                layer.weight.mul_(0.5)
            losses.append(pipe.step(x, x).loss)
    assert losses[0] == losses[1]
